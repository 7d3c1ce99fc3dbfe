"""The report of the four runs: one HTML page that needs nothing from anywhere else."""

from collections.abc import Iterator
from html import escape

from tailbound.report.html import settings_rows
from tailbound.report.page import document, figure, pairs_table, prose, table, tile
from tailbound.report.plots import Plot
from tailbound.report.tails import NAMES, TailSummary
from tailbound.report.tails_table import tail_rows
from tailbound.report.tails_words import headline, sentences
from tailbound.report.text import number, percent, plural, times, with_unit

WHERE = {"backward": "in the backward", "micro_batch": "between micro-batches"}


def make_tail_page(summary: TailSummary, plots: list[Plot]) -> str:
    """Put the page together; the same input gives the same text."""
    settings = summary.settings
    return document(
        f"tailbound: {settings.task}, {settings.started}",
        [
            *opening(summary),
            *comparison(summary),
            *(line for plot in plots for line in figure(plot)),
            *how_it_was_made(summary),
        ],
    )


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
            yield tile(label, value, note)
        yield "</div>"
    items = "".join(f"<li>{prose(text)}</li>" for text in sentences(summary))
    yield f'<ul class="verdict">{items}</ul>'
    yield "</header>"


def comparison(summary: TailSummary) -> Iterator[str]:
    """The table of the four runs."""
    yield "<section>"
    yield "<h2>The four runs</h2>"
    yield from table(
        ("", *NAMES.values()),
        [((row.label, *row.cells), row.is_main) for row in tail_rows(summary)],
    )
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
