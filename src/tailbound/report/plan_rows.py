"""The rows of a plan's tables, as text; the terminal and the page print them."""

from dataclasses import dataclass

from tailbound.compute.plan_words import percent, seconds, times
from tailbound.compute.plans import Outcome, Plan
from tailbound.report.text import UNKNOWN

SIZE_HEADINGS = (
    "workers,\nmicro-batches",
    "step",
    "slowest /\naverage",
    "threshold",
    "dropped",
    "speedup",
)
WORKER_HEADINGS = ("worker", "compute in a step", "slowest in", "dropped")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table."""

    cells: tuple[str, ...]
    is_main: bool = False


def size_rows(plan: Plan) -> list[Row]:
    """The trace, then each estimate."""
    trace = _size(plan, plan.num_workers, plan.num_micro_batches)
    return [
        Row(trace, is_main=True),
        *(
            Row(_size(one, one.num_workers, one.num_micro_batches))
            for one in plan.estimates
        ),
    ]


def worker_rows(plan: Plan) -> list[Row]:
    """Each worker, the slowest first; those slow all the time stand out."""
    names = sorted(plan.step_s_W, key=lambda name: -plan.step_s_W[name])
    return [
        Row(
            (
                name,
                seconds(plan.step_s_W[name]),
                f"{percent(plan.slowest_share_W[name])} of steps",
                percent(plan.dropped_share_W[name]),
            ),
            is_main=name in plan.persistent_stragglers,
        )
        for name in names
    ]


def _size(one: Outcome, workers: int, micro_batches: int) -> tuple[str, ...]:
    return (
        f"{workers}, {micro_batches}",
        seconds(one.baseline_step_s),
        times(one.iteration_ratio),
        UNKNOWN if one.threshold_s is None else seconds(one.threshold_s),
        percent(one.dropped_share),
        times(one.speedup),
    )
