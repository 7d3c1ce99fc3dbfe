"""Sort a run's records, and make of them the series that the summary and plots read.

A series over steps is a pair of arrays of equal length S: step numbers, rising, and
one value for each.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tailbound.records import (
    EpochReport,
    Record,
    RoundReport,
    StepReport,
    ThresholdReport,
)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Series = tuple[Ints, Floats]


@dataclass(slots=True)
class RunRecords:
    """The records of one run, sorted by kind, in the order in which they came."""

    way_in: list[RoundReport] = field(default_factory=list)
    """Rounds from a worker to the server; the way back is exact and not compared."""
    steps: list[StepReport] = field(default_factory=list)
    thresholds: list[ThresholdReport] = field(default_factory=list)
    epochs: list[EpochReport] = field(default_factory=list)


def gather(records: Iterable[Record]) -> dict[str, RunRecords]:
    """Sort records by run and by kind. Reads the iterable once.

    Args:
        records: records of any number of runs, in any order.

    Returns:
        The records of each run that has any, by the run's name.
    """
    runs: dict[str, RunRecords] = {}
    for record in records:
        run = runs.setdefault(record.run, RunRecords())
        if isinstance(record, RoundReport):
            if record.direction == "in":
                run.way_in.append(record)
        elif isinstance(record, StepReport):
            run.steps.append(record)
        elif isinstance(record, ThresholdReport):
            run.thresholds.append(record)
        else:
            run.epochs.append(record)
    return runs


def latencies_ms(way_in: list[RoundReport]) -> Floats:
    """Send latency of each round, in ms; shape (rounds,). Source: spec N11."""
    return np.array([1e3 * report.latency_s for report in way_in], dtype=np.float64)


def slowest_ms(way_in: list[RoundReport]) -> Series:
    """Per step, the send latency of its slowest worker, in ms (DBLP, figure 2)."""
    return per_step(way_in, lambda report: 1e3 * report.latency_s, max)


def mean_probes(way_in: list[RoundReport]) -> Series:
    """Per step, probes of one round, averaged over the workers."""
    return per_step(way_in, lambda report: float(report.probes), mean)


def mean_retransmitted(way_in: list[RoundReport]) -> Series:
    """Per step, retransmitted chunks of one round, averaged over the workers."""
    return per_step(way_in, lambda report: float(report.retransmitted), mean)


def mean_metric(epochs: list[EpochReport]) -> Series:
    """Per epoch, the metric averaged over ranks."""
    values: dict[int, list[float]] = {}
    for report in epochs:
        values.setdefault(report.epoch, []).append(report.metric)
    return to_series({epoch: mean(group) for epoch, group in values.items()})


def critical_spans(way_in: list[RoundReport]) -> list[tuple[int, int]]:
    """First and last step of each stretch that ran under the critical bound."""
    critical: dict[int, bool] = {}
    for report in way_in:
        critical[report.step] = critical.get(report.step, False) or report.critical
    spans: list[tuple[int, int]] = []
    is_open = False
    for step in sorted(critical):
        if critical[step]:
            first = spans.pop()[0] if is_open else step
            spans.append((first, step))
        is_open = critical[step]
    return spans


def decisions(steps: list[StepReport]) -> list[StepReport]:
    """The steps at which the detector compared norms, once each, in order."""
    checked: dict[int, StepReport] = {}
    for report in steps:
        if report.ratio is not None:
            known = checked.get(report.step)
            if known is None or report.rank < known.rank:
                checked[report.step] = report
    return [checked[step] for step in sorted(checked)]


def per_step(
    way_in: list[RoundReport],
    value: Callable[[RoundReport], float],
    reduce: Callable[[list[float]], float],
) -> Series:
    """Group rounds by step, and reduce each group's values to one."""
    groups: dict[int, list[float]] = {}
    for report in way_in:
        groups.setdefault(report.step, []).append(value(report))
    return to_series({step: reduce(group) for step, group in groups.items()})


def to_series(values: dict[int, float]) -> Series:
    """Split a mapping into its sorted keys and their values."""
    keys = sorted(values)
    return (
        np.array(keys, dtype=np.int64),
        np.array([values[key] for key in keys], dtype=np.float64),
    )


def mean(values: list[float]) -> float:
    """The arithmetic mean of one or more numbers."""
    return sum(values) / len(values)
