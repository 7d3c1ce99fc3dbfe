"""The benchmark on the terminal."""

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

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
from tailbound.report.text import plural


def make_bench_table(summary: BenchSummary) -> RenderableType:
    """Draw a summary for ``rich.console.Console.print``."""
    settings = summary.settings
    what = (
        f"{plural(settings.world, 'rank')}, {settings.mbytes:g} MB, "
        f"{plural(settings.rounds, 'round')}, {settings.plan} plan; "
        f"{describe_network(summary)}"
    )
    measures = _make_table(HEADINGS)
    for row in bench_rows(summary):
        cells = (Text(cell) for cell in (row.label, *row.cells))
        measures.add_row(*cells, style="bold" if row.is_main else "")
    bounds = _make_table(BOUND_HEADINGS)
    for part in bound_rows(summary):
        bounds.add_row(*(Text(cell) for cell in part))
    return Group(
        Text(headline(summary), style="bold"),
        Text(what),
        measures,
        bounds,
        Text(" ".join(sentences(summary))),
        Text(),
    )


def _make_table(headings: tuple[str, ...]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    first, *others = headings
    table.add_column(first)
    for heading in others:
        table.add_column(heading, justify="right")
    return table
