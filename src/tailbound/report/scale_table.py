"""A simulation on the terminal: one row for each number of workers."""

from rich import box
from rich.table import Table
from rich.text import Text

from tailbound.compute.plan_words import percent, seconds, times
from tailbound.compute.simulate import ScalePoint, Simulation
from tailbound.report.text import UNKNOWN, number

HEADINGS = (
    "workers",
    "slowest /\naverage",
    "threshold",
    "dropped",
    "speedup",
    "baseline",
    "bounded",
    "linear",
)


def make_scale_table(simulation: Simulation) -> Table:
    """Draw a simulation for ``rich.console.Console.print``, in 80 columns.

    The last three columns are throughputs.
    """
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        title=Text(
            f"{simulation.noise} noise, {seconds(simulation.base_s)} and "
            f"{simulation.num_micro_batches} micro-batches, "
            f"{seconds(simulation.comm_s)} of communication",
            style="bold",
        ),
        title_justify="left",
        caption="baseline, bounded, linear: micro-batches per second",
        caption_justify="left",
    )
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for point in simulation.points:
        table.add_row(*map(Text, _cells(point)))
    return table


def _cells(point: ScalePoint) -> tuple[str, ...]:
    return (
        str(point.workers),
        times(point.iteration_ratio),
        UNKNOWN if point.threshold_s is None else seconds(point.threshold_s),
        percent(point.dropped_share),
        times(point.speedup),
        number(point.baseline_micro_batches_per_s),
        number(point.bounded_micro_batches_per_s),
        number(point.linear_micro_batches_per_s),
    )
