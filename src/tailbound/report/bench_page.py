"""The benchmark as a folder: ``summary.json``, ``bench.html`` and ``cdf.png``.

The page needs nothing from anywhere else, and follows the reader's light or dark theme.
"""

from collections.abc import Iterator
from html import escape
from pathlib import Path

from tailbound.report.bench_outcome import BenchSummary
from tailbound.report.bench_rows import (
    BOUND_HEADINGS,
    HEADINGS,
    bench_rows,
    bound_rows,
    describe_network,
    headline,
    sentences,
)
from tailbound.report.build import write_whole
from tailbound.report.folders import filled_folder
from tailbound.report.page import document, figure, pairs_table, prose, table, tile
from tailbound.report.plots import Plot
from tailbound.report.text import bound, number, plural, times, with_unit


def write_bench(folder: Path, summary: BenchSummary) -> Path:
    """Write a run's folder.

    Args:
        folder: is made; files of an older run are replaced.
        summary: of the run.

    Returns:
        The path of the page.

    Raises:
        ConfigError, MissingExtraError: see
            :func:`~tailbound.report.folders.filled_folder`.
    """
    page = folder / "bench.html"
    with filled_folder(folder):
        from tailbound.report.bench_plots import render_bench_plots, write_cdf_png

        write_whole(folder / "summary.json", summary.to_json())
        write_cdf_png(folder / "cdf.png", summary)
        write_whole(page, make_bench_page(summary, render_bench_plots(summary)))
    return page


def make_bench_page(summary: BenchSummary, plots: list[Plot]) -> str:
    """Put the page together; the same input gives the same text."""
    return document(
        f"tailbound bench allreduce, {summary.settings.started}",
        [
            *opening(summary),
            *comparison(summary),
            *(line for plot in plots for line in figure(plot)),
            *by_bound(summary),
            *how_it_was_made(summary),
        ],
    )


def opening(summary: BenchSummary) -> Iterator[str]:
    """Headline, the four ratios, and how far to trust them."""
    settings = summary.settings
    yield "<header>"
    yield (
        f'<p class="eyebrow">tailbound bench allreduce · '
        f"{escape(plural(settings.world, 'rank'))} · {settings.mbytes:g} MB · "
        f'{escape(describe_network(summary))} · <span class="whole">'
        f"{escape(settings.started)}</span></p>"
    )
    yield f"<h1>{prose(headline(summary))}</h1>"
    ours, theirs, ratio = summary.tailbound, summary.gloo, summary.ratio
    if theirs is not None and ratio is not None:
        yield '<div class="tiles">'
        for label, name, over in (
            ("p50 over Gloo's", "p50_ms", ratio.p50),
            ("p95 over Gloo's", "p95_ms", ratio.p95),
            ("slowest over Gloo's", "max_ms", ratio.max),
            ("CPU over Gloo's", "cpu_ms", ratio.cpu),
        ):
            note = (
                f"{number(getattr(ours, name))} / "
                f"{with_unit(getattr(theirs, name), 'ms')}"
            )
            yield tile(label, times(over), note)
        yield "</div>"
    items = "".join(f"<li>{prose(text)}</li>" for text in sentences(summary))
    yield f'<ul class="verdict">{items}</ul>'
    yield "</header>"


def comparison(summary: BenchSummary) -> Iterator[str]:
    """The table of both libraries."""
    yield "<section>"
    yield "<h2>Side by side</h2>"
    rows = [((row.label, *row.cells), row.is_main) for row in bench_rows(summary)]
    yield from table(HEADINGS, rows)
    yield (
        '<p class="note">A round takes as long as its slowest rank. CPU is of all '
        "threads of a rank, its driver&#x27;s included; sent is what the network "
        "interfaces counted, headers and repairs included. tailbound&#x27;s result is "
        "the mean, Gloo&#x27;s the sum.</p>"
    )
    yield "</section>"


def by_bound(summary: BenchSummary) -> Iterator[str]:
    """The rounds of tailbound, apart by loss bound."""
    yield "<section>"
    yield "<h2>By loss bound</h2>"
    yield from table(BOUND_HEADINGS, [(row, False) for row in bound_rows(summary)])
    yield "</section>"


def how_it_was_made(summary: BenchSummary) -> Iterator[str]:
    """Settings and versions."""
    settings = summary.settings
    rows = [
        ("ranks", str(settings.world)),
        ("gradient", f"{settings.mbytes:g} MB of float32"),
        ("rounds", f"{settings.rounds}, after {settings.warmup} to warm up"),
        ("plan", settings.plan),
        (
            "loss bound",
            bound(settings.p_low)
            if settings.p_low == settings.p_high
            else f"{bound(settings.p_low)} / {bound(settings.p_high)}",
        ),
        ("network", describe_network(summary)),
        ("seed", str(settings.seed)),
        ("cores", str(settings.cores)),
        ("load before", f"{settings.load:g}"),
    ]
    yield "<section>"
    yield "<h2>How it was made</h2>"
    yield '<div class="columns">'
    yield from pairs_table("Settings", rows)
    yield from pairs_table("Versions", sorted(settings.versions.items()))
    yield "</div>"
    yield "</section>"
