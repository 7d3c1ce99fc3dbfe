"""The four runs as rows of text: for the page and for the terminal."""

from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tailbound.report.outcome import Summary
from tailbound.report.table import make_table
from tailbound.report.tails import NAMES, RUNS, TailRun, TailSummary
from tailbound.report.tails_words import headline, sentences
from tailbound.report.text import UNKNOWN, metric, percent, times, with_unit


@dataclass(frozen=True, slots=True)
class TailRow:
    """A measure of all four runs."""

    label: str
    cells: tuple[str, ...]
    """One for each of ``RUNS``."""
    is_main: bool = False


def tail_rows(summary: TailSummary) -> list[TailRow]:
    """The measures, the main ones marked."""

    def row(label: str, name: str, unit: str, *, is_main: bool = False) -> TailRow:
        cells = []
        for run in RUNS:
            found = summary.run(run)
            cells.append(with_unit(getattr(found, name, None), unit))
        return TailRow(label, tuple(cells), is_main)

    def ratio(label: str, name: str, *, is_main: bool = False) -> TailRow:
        cells = ["1×" if summary.neither else UNKNOWN]  # noqa: RUF001
        cells += [times(getattr(summary.ratio[run], name)) for run in RUNS[1:]]
        return TailRow(label, tuple(cells), is_main)

    def shares(label: str, name: str) -> TailRow:
        return TailRow(label, tuple(_share(summary.run(run), name) for run in RUNS))

    runs = [summary.run(run) for run in RUNS]
    name = next((run.metric_name for run in runs if run and run.metric_name), "metric")
    return [
        row("step, mean", "step_ms", "ms", is_main=True),
        ratio("faster", "step", is_main=True),
        row("step, standard deviation", "step_std_ms", "ms"),
        row("step, 99th percentile", "p99_ms", "ms"),
        row("slowest rank's compute", "compute_ms", "ms"),
        row("training time", "train_s", "s"),
        row("time to the same loss", "same_loss_s", "s"),
        shares("dropped under a threshold", "dropped_share"),
        shares("dropped in all", "dropped_share_all"),
        TailRow("threshold", tuple(_threshold(run) for run in runs)),
        row("overshoot", "overshoot_ms", "ms"),
        TailRow(name, tuple(metric(run.metric if run else None) for run in runs)),
        TailRow(
            "replicas equal",
            tuple(
                UNKNOWN
                if run is None or run.identical is None
                else "yes"
                if run.identical
                else "NO"
                for run in runs
            ),
        ),
    ]


def _threshold(run: TailRun | None) -> str:
    if run is None or run.looks is None:
        return UNKNOWN
    return with_unit(run.looks.threshold_ms, "ms")


def _share(run: TailRun | None, name: str) -> str:
    return UNKNOWN if run is None else percent(getattr(run, name))


def make_outcome_table(summary: Summary | TailSummary) -> RenderableType:
    """Draw any run folder's summary."""
    if isinstance(summary, TailSummary):
        return make_tail_table(summary)
    return make_table(summary)


def make_tail_table(summary: TailSummary) -> RenderableType:
    """Draw the four runs for ``rich.console.Console.print``."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for run in RUNS:
        table.add_column(NAMES[run], justify="right")
    for row in tail_rows(summary):
        cells = (Text(cell) for cell in (row.label, *row.cells))
        table.add_row(*cells, style="bold" if row.is_main else "")
    verdict = Text(" ".join(sentences(summary)))
    return Group(Text(headline(summary), style="bold"), table, verdict, Text())
