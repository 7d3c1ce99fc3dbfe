"""Four runs in numbers: neither bound, the compute bound, the network bound, both.

A step's time is that of its slowest rank, compute and exchange. Steps before the last
calibration has ended are left out of every run's step times, so that all are over the
same steps. Needs no plotting library.
Source: DropCompute, sections runtime_perf and generalization_perf; spec C3, C10.
"""

import math
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tailbound.records import Record, StepReport, ThresholdReport
from tailbound.report.outcome import LOWER_IS_BETTER, RunSettings
from tailbound.report.series import RunRecords, gather, mean
from tailbound.report.text import six_digits

Floats = NDArray[np.float64]

RUNS = ("neither", "compute", "network", "both")
NAMES = {
    "neither": "neither bound",
    "compute": "compute bound",
    "network": "network bound",
    "both": "both bounds",
}
SMOOTH_SHARE = 0.1
"""Losses are averaged over this share of the steps before they are compared."""


class Looks(msgspec.Struct, frozen=True, kw_only=True):
    """The compute bound's decisions in short."""

    threshold_ms: float | None
    """The last one chosen."""
    predicted_step_ms: float | None
    """With the first threshold chosen."""
    predicted_speedup: float | None
    predicted_drop: float | None
    calibration_step_ms: float | None
    realised_step_ms: float | None
    """Since the last look; and so the next two."""
    realised_speedup: float | None
    dropped_share_W: tuple[float, ...]
    relative_score_W: tuple[float, ...]
    individual_score_W: tuple[float, ...]
    persistent_stragglers: tuple[int, ...]


class TailRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run. None stands where nothing is known."""

    steps: int
    """Steps that the times below are over."""
    step_ms: float | None
    """Mean time of a step, in ms."""
    step_std_ms: float | None
    """Its standard deviation."""
    p99_ms: float | None
    compute_ms: float | None
    """Mean over steps of the slowest rank's compute, in ms."""
    train_s: float | None
    """Training time of the slowest rank, evaluation left out, in s."""
    same_loss_s: float | None
    """Seconds until the loss with which the run with neither bound ended."""
    dropped_share: float
    """Micro-batches dropped, over those planned, in steps with a threshold."""
    dropped_share_all: float
    """The same over all steps."""
    overshoot_ms: float | None
    """Mean time by which cut ranks passed the threshold."""
    looks: Looks | None
    """What the compute bound predicted and found; None: there was none."""
    metric: float | None
    """Held-out metric of the last epoch, mean over ranks."""
    metric_name: str | None
    identical: bool | None
    """All ranks had the same digest at the end of every epoch."""


class TailRatio(msgspec.Struct, frozen=True, kw_only=True):
    """The run with neither bound over another one: above 1, the other is better."""

    step: float | None
    step_std: float | None
    train: float | None
    same_loss: float | None
    metric_kept: float | None
    """How good the other's metric is; 1 is equal, above 1 is better."""


class TailSummary(msgspec.Struct, frozen=True, kw_only=True):
    """All four runs, compared."""

    neither: TailRun | None
    compute: TailRun | None
    network: TailRun | None
    both: TailRun | None
    ratio: dict[str, TailRatio]
    """By run: compute, network, both."""
    settings: RunSettings

    def run(self, name: str) -> TailRun | None:
        """One of the four, by name."""
        found: TailRun | None = getattr(self, name)
        return found

    def to_json(self) -> str:
        """Encode as one JSON object; what is not finite becomes null."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()


def summarise_tails(records: Iterable[Record], settings: RunSettings) -> TailSummary:
    """Put a folder's records into numbers; read once.

    Args:
        records: of the runs named in ``RUNS``, in any order.
        settings: how the runs were made.
    """
    runs = gather(records)
    skip = first_bounded_step(runs) - 1
    found = {name: runs[name] for name in RUNS if name in runs}
    base = found.get("neither")
    target = smooth_loss(base)[-1] if base and len(smooth_loss(base)) else math.nan
    told = {
        name: summarise_run(run, skip=skip, target=target)
        for name, run in found.items()
    }
    return TailSummary(
        **{name: told.get(name) for name in RUNS},
        ratio={name: compare(told.get("neither"), told.get(name)) for name in RUNS[1:]},
        settings=settings,
    )


def first_bounded_step(runs: dict[str, RunRecords]) -> int:
    """The first step at which all bounded runs have their threshold; 1 without any."""
    firsts = []
    for run in runs.values():
        bounded = [step.step for step in run.steps if step.threshold_s is not None]
        if bounded:
            firsts.append(min(bounded))
    return max(firsts, default=1)


def by_step(run: RunRecords) -> list[list[StepReport]]:
    """The reports of all ranks, step by step."""
    steps: dict[int, list[StepReport]] = {}
    for report in run.steps:
        steps.setdefault(report.step, []).append(report)
    return [steps[number] for number in sorted(steps)]


def step_s(run: RunRecords, *, skip: int = 0) -> Floats:
    """Time of each step, that of its slowest rank, in s."""
    return np.array(
        [
            max(report.compute_s + report.exchange_s for report in reports)
            for reports in by_step(run)
            if reports[0].step > skip
        ]
    )


def smooth_loss(run: RunRecords) -> Floats:
    """Training loss over the ranks, averaged over the newest steps, per step."""
    losses = [
        mean([r.loss for r in reports if r.loss is not None])
        for reports in by_step(run)
        if any(r.loss is not None for r in reports)
    ]
    width = max(1, round(SMOOTH_SHARE * len(losses)))
    return np.array(
        [
            np.mean(losses[max(0, end - width) : end])
            for end in range(1, len(losses) + 1)
        ]
    )


def dropped(reports: list[StepReport]) -> float:
    """Share of the planned micro-batches that were dropped."""
    planned = sum(report.planned for report in reports)
    computed = sum(report.computed for report in reports)
    return 1.0 - computed / planned if planned else 0.0


def summarise_run(run: RunRecords, *, skip: int, target: float) -> TailRun:
    """Put one run into numbers."""
    time_s = step_s(run, skip=skip)
    kept = [reports for reports in by_step(run) if reports[0].step > skip]
    compute_s = [max(report.compute_s for report in reports) for reports in kept]
    loss_S, spent_s = smooth_loss(run), np.cumsum(step_s(run))
    reached = np.flatnonzero(loss_S <= target)
    over_s = [r.overshoot_s for r in run.steps if r.overshoot_s is not None]
    looks = [report for report in run.thresholds if report.rank == 0]
    first, last = (looks[0], looks[-1]) if looks else (None, None)
    last_epoch = max((report.epoch for report in run.epochs), default=0)
    ends = [report for report in run.epochs if report.epoch == last_epoch]
    digests: dict[int, set[str]] = {}
    for report in run.epochs:
        digests.setdefault(report.epoch, set()).add(report.digest)
    return TailRun(
        steps=len(time_s),
        step_ms=_ms(time_s.mean()) if len(time_s) else None,
        step_std_ms=_ms(time_s.std()) if len(time_s) else None,
        p99_ms=_ms(np.percentile(time_s, 99)) if len(time_s) else None,
        compute_ms=_ms(np.mean(compute_s)) if compute_s else None,
        train_s=six_digits(max(r.train_s for r in ends)) if ends else None,
        same_loss_s=six_digits(spent_s[reached[0]]) if len(reached) else None,
        dropped_share=six_digits(
            dropped([r for r in run.steps if r.threshold_s is not None])
        ),
        dropped_share_all=six_digits(dropped(run.steps)),
        overshoot_ms=_ms(np.mean(over_s)) if over_s else None,
        metric=six_digits(mean([r.metric for r in ends])) if ends else None,
        metric_name=ends[0].metric_name if ends else None,
        identical=all(len(seen) == 1 for seen in digests.values()) if ends else None,
        looks=look_back(first, last),
    )


def _ms(seconds: float | np.floating[Any] | None) -> float | None:
    return None if seconds is None else six_digits(1e3 * float(seconds))


def look_back(
    first: ThresholdReport | None, last: ThresholdReport | None
) -> Looks | None:
    """What the first look predicted, and what the last one found."""
    if first is None or last is None:
        return None
    return Looks(
        threshold_ms=_ms(last.threshold_s),
        predicted_step_ms=_ms(first.predicted_step_s),
        predicted_speedup=first.predicted_speedup,
        predicted_drop=first.predicted_drop,
        calibration_step_ms=_ms(last.calibration_step_s),
        realised_step_ms=_ms(last.realised_step_s),
        realised_speedup=last.realised_speedup,
        dropped_share_W=last.dropped_share_W,
        relative_score_W=last.relative_score_W,
        individual_score_W=last.individual_score_W,
        persistent_stragglers=last.persistent_stragglers,
    )


def compare(base: TailRun | None, other: TailRun | None) -> TailRatio:
    """The run with neither bound over another one."""

    def over(name: str) -> float | None:
        ours = getattr(base, name, None)
        theirs = getattr(other, name, None)
        return six_digits(ours / theirs) if ours and theirs else None

    kept = over("metric")
    if (
        kept is not None
        and base is not None
        and base.metric_name not in LOWER_IS_BETTER
    ):
        kept = six_digits(1.0 / kept)
    return TailRatio(
        step=over("step_ms"),
        step_std=over("step_std_ms"),
        train=over("train_s"),
        same_loss=over("same_loss_s"),
        metric_kept=kept,
    )
