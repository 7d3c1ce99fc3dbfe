"""Write the report: one HTML page that needs nothing from anywhere else.

The verdict comes first, then the comparison, the plots, how the run was made, and each
decision of the regime detector. It follows the reader's light or dark theme and the
width of the screen. Every string that comes from a record or a setting is escaped.
"""

from collections.abc import Iterable, Iterator
from html import escape

from tailbound.records import Record, StepReport
from tailbound.report.outcome import RunSettings, Summary
from tailbound.report.page import document, figure, pairs_table, prose
from tailbound.report.plots import Plot
from tailbound.report.rows import make_rows
from tailbound.report.series import decisions, gather
from tailbound.report.text import (
    UNKNOWN,
    bound,
    metric,
    number,
    plural,
    times,
    with_unit,
)
from tailbound.report.verdict import (
    NAMES,
    burst_pairs,
    details,
    headline,
    lead,
    mean_latency,
)
from tailbound.report.verdict import warnings as warnings_of


def make_page(summary: Summary, records: Iterable[Record], plots: list[Plot]) -> str:
    """Put a page together; the same input gives the same text.

    Args:
        summary: of these records.
        records: read once, for the detector's decisions.
        plots: made by :func:`~tailbound.report.plots.render_plots`.

    Returns:
        A whole HTML document.
    """
    settings = summary.settings
    return document(
        f"tailbound: {settings.task}, {settings.started}",
        [
            *opening(summary),
            *comparison(summary),
            *(line for plot in plots for line in figure(plot)),
            *how_it_was_made(settings),
            *detector(records),
        ],
    )


def opening(summary: Summary) -> Iterator[str]:
    """Headline, the four ratios, the verdict, and what to be wary of."""
    settings = summary.settings
    yield "<header>"
    yield (
        f'<p class="eyebrow">tailbound · {escape(settings.task)} · '
        f"{escape(plural(settings.workers, 'worker'))} · "
        f'<span class="whole">{escape(settings.started)}</span></p>'
    )
    yield f"<h1>{escape(headline(summary))}</h1>"
    yield from (
        f'<p class="warning">{prose(warning)}</p>' for warning in warnings_of(summary)
    )
    ratios = "".join(tiles(summary))
    if ratios:
        yield f'<div class="tiles">{ratios}</div>'
    sentences = lead(summary)
    if sentences:
        yield f'<p class="verdict">{prose(" ".join(sentences))}</p>'
    points = details(summary)
    if points:
        items = "".join(f"<li>{prose(point)}</li>" for point in points)
        yield f'<ul class="verdict">{items}</ul>'
    yield "</header>"


def tiles(summary: Summary) -> Iterator[str]:
    """The measures of the bar, large: the ratio, and the two values behind it."""
    pairs = burst_pairs(summary)
    if pairs:
        fixed_ms = mean_latency([fixed for fixed, _ in pairs])
        adaptive_ms = mean_latency([adaptive for _, adaptive in pairs])
        label = "burst rounds" if len(pairs) > 1 else "burst round"
        yield tile(label, fixed_ms / adaptive_ms, fixed_ms, adaptive_ms, "ms")
    fixed, adaptive = summary.fixed, summary.adaptive
    if fixed is not None and adaptive is not None:
        ratio = summary.ratio
        yield tile("99th percentile", ratio.p99, fixed.p99_ms, adaptive.p99_ms, "ms")
        yield tile("mean latency", ratio.mean, fixed.mean_ms, adaptive.mean_ms, "ms")
        yield tile("training time", ratio.train, fixed.train_s, adaptive.train_s, "s")


def tile(
    label: str,
    ratio: float | None,
    fixed: float | None,
    adaptive: float | None,
    unit: str,
) -> str:
    """One measure; empty if its ratio is not known."""
    if ratio is None:
        return ""
    return (
        f'<div class="tile"><span class="label">{label}</span>'
        f'<span class="ratio">{times(ratio)}</span>'
        f'<span class="values"><span class="fixed">{number(fixed)}</span> → '
        f'<span class="adaptive">{with_unit(adaptive, unit)}</span></span></div>'
    )


def comparison(summary: Summary) -> Iterator[str]:
    """The table of both runs."""
    settings = summary.settings
    low, high = prose(bound(settings.p_low)), prose(bound(settings.p_high))
    yield "<section>"
    yield "<h2>Both runs</h2>"
    yield '<div class="scroll"><table class="comparison">'
    yield (
        "<thead><tr><th></th>"
        '<th scope="col"><span class="fixed">fixed bound</span>'
        f"<small>p = {low}</small></th>"
        '<th scope="col"><span class="adaptive">phase-aware</span>'
        f"<small>p = {low} / {high}</small></th>"
        '<th scope="col">ratio<small>fixed / phase-aware</small></th></tr></thead>'
    )
    yield "<tbody>"
    for row in make_rows(summary):
        kind = ' class="main"' if row.is_main else ""
        cells = "".join(
            f"<td>{escape(cell)}</td>" for cell in (row.fixed, row.adaptive, row.ratio)
        )
        yield f'<tr{kind}><th scope="row">{escape(row.label)}</th>{cells}</tr>'
    yield "</tbody></table></div>"
    yield (
        '<p class="note">Latency is the way from a worker to the server: from the '
        "first datagram handed to the kernel until the stop. A burst round counts its "
        "slowest worker; the other latencies are over every step and worker.</p>"
    )
    yield "</section>"


def settings_rows(settings: RunSettings) -> list[tuple[str, str]]:
    """Settings by name, for people."""
    bursts = ", ".join(str(burst_round) for burst_round in settings.burst_rounds)
    return [
        ("task", settings.task),
        ("workers", str(settings.workers)),
        ("epochs", str(settings.epochs)),
        ("batch size of a worker", str(settings.batch_size)),
        ("seed", str(settings.seed)),
        ("round-trip time added", f"{settings.rtt_ms:g} ms"),
        ("background loss", bound(settings.loss)),
        ("loss in a burst", bound(settings.burst)),
        ("burst rounds", bursts or "none"),
        ("loss bound, fixed run", bound(settings.p_low)),
        (
            "loss bound, phase-aware run",
            f"{bound(settings.p_low)} critical, {bound(settings.p_high)} otherwise",
        ),
        *([("phase found by", settings.detector)] if settings.detector else []),
        ("MTU", f"{settings.mtu} bytes" if settings.mtu != "auto" else "auto"),
        ("started", settings.started),
    ]


def how_it_was_made(settings: RunSettings) -> Iterator[str]:
    """Settings and versions."""
    yield "<section>"
    yield "<h2>How it was made</h2>"
    yield '<div class="columns">'
    yield from pairs_table("Settings", settings_rows(settings))
    yield from pairs_table("Versions", sorted(settings.versions.items()))
    yield "</div>"
    yield "</section>"


def detector(records: Iterable[Record]) -> Iterator[str]:
    """Each decision of the regime detector, folded away."""
    runs = gather(records)
    tables = [
        (key, decisions(runs[key].steps))
        for key in ("adaptive", "fixed")
        if key in runs
    ]
    tables = [(key, reports) for key, reports in tables if reports]
    if not tables:
        return
    yield "<section>"
    yield "<h2>What the regime detector decided</h2>"
    yield (
        '<p class="note">At each check, how much the norm of the reduced gradient '
        "changed, relative to what it was; a change of eta or more is critical.</p>"
    )
    for key, reports in tables:
        yield "<details>"
        yield f"<summary>{NAMES[key]} run, {plural(len(reports), 'check')}</summary>"
        yield '<div class="scroll"><table class="decisions"><thead><tr>'
        yield (
            '<th scope="col">step</th><th scope="col">norm</th>'
            '<th scope="col">change</th><th scope="col">verdict</th></tr></thead>'
            "<tbody>"
        )
        yield from (decision(report) for report in reports)
        yield "</tbody></table></div>"
        yield "</details>"
    yield "</section>"


def decision(report: StepReport) -> str:
    """One line of the detector's table."""
    ratio = UNKNOWN if report.ratio is None else f"{report.ratio:.3f}"
    return (
        f"<tr><td>{report.step}</td><td>{metric(report.norm)}</td><td>{ratio}</td>"
        f"<td>{escape(report.verdict)}</td></tr>"
    )
