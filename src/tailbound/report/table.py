"""The summary on the terminal: the verdict, and a table of both runs."""

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tailbound.report.outcome import Summary
from tailbound.report.rows import make_rows
from tailbound.report.text import bound
from tailbound.report.verdict import headline


def make_table(summary: Summary) -> RenderableType:
    """Draw a summary for ``rich.console.Console.print``.

    Args:
        summary: both runs, or what there is of them.

    Returns:
        A headline, the table and the verdict; plain text, so that no name of a task
        or a metric is taken for markup.
    """
    settings = summary.settings
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    low, high = bound(settings.p_low), bound(settings.p_high)
    for title, subtitle in (
        ("fixed", f"p = {low}"),
        ("phase-aware", f"p = {low} / {high}"),
        ("ratio", "fixed / phase-aware"),
    ):
        heading = Text.assemble((title, "bold"), "\n", (subtitle, "dim not bold"))
        table.add_column(heading, justify="right")
    for row in make_rows(summary):
        cells = (row.label, row.fixed, row.adaptive, row.ratio)
        table.add_row(
            *(Text(cell) for cell in cells), style="bold" if row.is_main else ""
        )
    return Group(
        Text(headline(summary), style="bold"), table, Text(summary.verdict), Text()
    )
