"""The report of the four runs: one HTML page that needs nothing from anywhere else."""

from collections.abc import Iterator
from html import escape

from tailbound.report.html import figure, pairs_table, prose, settings_rows, theme
from tailbound.report.plots import Plot
from tailbound.report.style import STYLE
from tailbound.report.tails import NAMES, RUNS, TailSummary
from tailbound.report.tails_table import tail_rows
from tailbound.report.tails_words import headline, sentences
from tailbound.report.text import number, percent, plural, times, with_unit

WHERE = {"backward": "in the backward", "micro_batch": "between micro-batches"}


def make_tail_page(summary: TailSummary, plots: list[Plot]) -> str:
    """Put the page together; the same input gives the same text."""
    settings = summary.settings
    title = escape(f"tailbound: {settings.task}, {settings.started}")
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{title}</title>",
        f"<style>{theme()}{STYLE}</style>",
        "</head>",
        "<body>",
        "<main>",
        *opening(summary),
        *comparison(summary),
        *(line for plot in plots for line in figure(plot)),
        *how_it_was_made(summary),
        "</main>",
        "</body>",
        "</html>",
    ]
    return "\n".join(parts) + "\n"


def opening(summary: TailSummary) -> Iterator[str]:
    """Headline, the four measures of the run with both bounds, and the verdict."""
    settings = summary.settings
    yield "<header>"
    yield (
        f'<p class="eyebrow">tailbound · {escape(settings.task)} · '
        f"{escape(plural(settings.workers, 'worker'))} · slow workers · "
        f'<span class="whole">{escape(settings.started)}</span></p>'
    )
    yield f"<h1>{prose(headline(summary))}</h1>"
    base, both, ratio = summary.neither, summary.both, summary.ratio["both"]
    if base is not None and both is not None:
        yield '<div class="tiles">'
        for label, value, note in (
            (
                "step time",
                times(ratio.step),
                f"{number(base.step_ms)} → {with_unit(both.step_ms, 'ms')}",
            ),
            (
                "its spread",
                times(ratio.step_std),
                f"{number(base.step_std_ms)} → {with_unit(both.step_std_ms, 'ms')}",
            ),
            ("dropped", percent(both.dropped_share), "of the micro-batches"),
            ("metric kept", percent(ratio.metric_kept), both.metric_name or ""),
        ):
            yield (
                f'<div class="tile"><span class="label">{label}</span>'
                f'<span class="ratio">{prose(value)}</span>'
                f'<span class="values">{prose(note)}</span></div>'
            )
        yield "</div>"
    items = "".join(f"<li>{prose(text)}</li>" for text in sentences(summary))
    yield f'<ul class="verdict">{items}</ul>'
    yield "</header>"


def comparison(summary: TailSummary) -> Iterator[str]:
    """The table of the four runs."""
    yield "<section>"
    yield "<h2>The four runs</h2>"
    yield '<div class="scroll"><table class="comparison"><thead><tr><th></th>'
    yield "".join(f'<th scope="col">{NAMES[run]}</th>' for run in RUNS)
    yield "</tr></thead><tbody>"
    for row in tail_rows(summary):
        kind = ' class="main"' if row.is_main else ""
        cells = "".join(f"<td>{prose(cell)}</td>" for cell in row.cells)
        yield f'<tr{kind}><th scope="row">{escape(row.label)}</th>{cells}</tr>'
    yield "</tbody></table></div>"
    yield (
        '<p class="note">A step takes as long as its slowest rank, compute and '
        "exchange together. Steps up to the end of the calibration are left out. All "
        "four runs have the same network, the same delays, data and seeds.</p>"
    )
    yield "</section>"


def how_it_was_made(summary: TailSummary) -> Iterator[str]:
    """Settings and versions."""
    settings = summary.settings
    rows = settings_rows(settings)
    slow = settings.stragglers
    if slow is not None:
        rows += [
            ("micro-batches of a step", str(slow.micro_batches)),
            ("a micro-batch without delay", f"{1e3 * slow.micro_batch_s:g} ms"),
            ("dropped at most", percent(slow.max_drop)),
            (
                "a step is cut",
                WHERE[slow.preempt],
            ),
        ]
    yield "<section>"
    yield "<h2>How it was made</h2>"
    yield '<div class="columns">'
    yield from pairs_table("Settings", rows)
    yield from pairs_table("Versions", sorted(settings.versions.items()))
    yield "</div>"
    yield "</section>"
