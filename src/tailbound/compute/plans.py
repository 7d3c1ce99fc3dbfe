"""What a plan holds: numbers that ``tailbound plan`` tells, writes and draws.

Shares are in [0, 1], times in seconds; workers are named as in the trace. A threshold
of None means that none gains anything; the other numbers are then without one.
"""

from typing import Literal

import msgspec


class DropPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The lowest threshold that drops no more than a given share."""

    max_drop: float
    threshold_s: float
    dropped_share: float
    speedup: float


class PlanCurve(msgspec.Struct, frozen=True, kw_only=True):
    """What thresholds do (figure choosing_threshold); K of them, rising."""

    threshold_s_K: list[float]
    speedup_K: list[float]
    """Effective speedup: steps are faster, and count for less."""
    step_speedup_K: list[float]
    """How much faster a step is, drops not considered."""
    dropped_share_K: list[float]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The best threshold for some latencies."""

    speedup: float
    threshold_s: float | None
    dropped_share: float
    iteration_ratio: float
    """Mean compute time of a step's slowest worker over that of a worker."""
    baseline_step_s: float
    """Mean time of a step without a threshold, communication included."""
    step_s: float
    """The same with the threshold."""


class Estimate(Outcome, frozen=True, kw_only=True):
    """An outcome for a job that was not recorded: means over several draws."""

    num_workers: int
    num_micro_batches: int
    speedup_by_drop: list[float]
    """At the shares of the plan's ``by_drop``."""


class Plan(Outcome, frozen=True, kw_only=True):
    """What a compute bound would gain on a trace.

    Its own outcome leaves what runs at the threshold there (Algorithm 2,
    ``preempt="backward"``).
    """

    verdict: str
    """In plain words."""
    next_line: str
    """What to write in the training script."""
    max_drop: float
    """Share that the threshold may drop."""
    comm_s: float
    """Mean communication time of a step."""
    is_comm_known: bool
    """False: no communication time was given or recorded, so it counts as 0."""
    num_steps: int
    num_workers: int
    num_micro_batches: int
    left_out_steps: int
    """Steps of the files that were not whole."""
    imputed_share: float
    """Samples that a threshold had cut, and that were filled in."""
    straggler: Literal["moves", "persists", "none"]
    """``moves``: now one worker is the slowest, now another. ``persists``: some are
    slow all the time. ``none``: all workers take the same time."""
    persistent_stragglers: list[str]
    """Workers that are slow all the time."""
    finishing: Outcome
    """Where a micro-batch that runs at the threshold is finished and counts
    (``preempt="micro_batch"``)."""
    without_stragglers: Outcome | None
    """The same trace without those workers."""
    unlimited: Outcome
    """The same trace with ``max_drop`` of 1."""
    dropped_share_W: dict[str, float]
    """Each worker's share of its micro-batches that are dropped."""
    step_s_W: dict[str, float]
    """Each worker's mean compute time in a step."""
    slowest_share_W: dict[str, float]
    """Share of the steps in which each worker is the slowest."""
    slow_first_steps: int
    """Steps at the start that took over twice the median: no tail, but warm-up."""
    curve: PlanCurve
    by_drop: list[DropPoint]
    """For 0 to 20 % (figure speedup)."""
    estimates: list[Estimate]
    """For other numbers of workers and micro-batches (spec C9)."""

    def to_json(self) -> str:
        """As JSON for people and programs."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()
