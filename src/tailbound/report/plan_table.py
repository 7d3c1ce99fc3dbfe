"""A plan on the terminal: what to gain, and a table of the trace and the estimates."""

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tailbound.compute.plan_words import headline, sentences
from tailbound.compute.plans import Plan
from tailbound.report.plan_rows import SIZE_HEADINGS, size_rows


def make_plan_table(plan: Plan) -> RenderableType:
    """Draw a plan for ``rich.console.Console.print``.

    Returns:
        Headline, table and sentences; plain text, so that no worker's name is taken
        for markup.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, heading in enumerate(SIZE_HEADINGS):
        table.add_column(heading, justify="right" if number else "left")
    for row in size_rows(plan):
        table.add_row(
            *(Text(cell) for cell in row.cells), style="bold" if row.is_main else ""
        )
    return Group(
        Text(headline(plan), style="bold"),
        table,
        *(Text(f"- {sentence}") for sentence in sentences(plan)),
        Text(),
    )
