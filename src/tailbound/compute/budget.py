"""The live compute bound: may another micro-batch start, and when to choose anew.

::

    WARM_UP --warmup_steps--> CALIBRATION --calibration_steps, decide--> BOUNDED
    BOUNDED --retune_every, or too much dropped; decide--> BOUNDED

A fixed threshold is BOUNDED from the first step. Every rank has a budget; what they
decide from is gathered from all and equal on all, and so are the decisions. No clock:
the caller says how long it has computed.
Source: DropCompute, Algorithms 1 and 2 (decentralised); spec C1 to C3.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tailbound.compute.compensation import grown_micro_batches
from tailbound.compute.stragglers import individual_scores, relative_scores
from tailbound.compute.threshold import Choice, choose, evaluate
from tailbound.config import ComputeBound
from tailbound.errors import ConfigError, PeerProtocolError
from tailbound.records import ThresholdReport

F64 = NDArray[np.float64]

MAX_WINDOW = 100
"""Steps whose latencies are kept for the next choice: the newest say most."""
TOO_MUCH = 1.5
"""Dropping this many times ``max_drop`` means that times have changed: choose anew."""
CURVE_POINTS = 100
"""Of the curve in a report: enough to draw, and a line of records stays readable."""
_NUMBERS = 3
"""Beside a step's latencies: exchange, whole step, and micro-batches computed."""


class Phase(Enum):
    """What a budget does with the step to come."""

    WARM_UP = "warm-up"
    """Nothing: caches, compilers and allocators settle."""
    CALIBRATION = "calibration"
    """Let it run to its end, and keep its latencies."""
    BOUNDED = "bounded"
    """Cut it at the threshold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """One step as its rank saw it, and what all ranks know of it."""

    latency_s: tuple[float, ...]
    """Compute time of each finished micro-batch."""
    exchange_s: float
    """In the exchange, waiting for slower ranks included."""
    step_s: float
    """From the end of the last step to the end of this one."""
    planned: int
    """Micro-batches of this rank."""
    computed: float
    """Those in its gradient, parts of one included."""
    total_planned: int
    """``planned`` of all ranks."""
    total_computed: float
    """``computed`` of all ranks."""


class _Memory(msgspec.Struct, frozen=True, kw_only=True):
    """What ``Budget.state_dict`` holds."""

    is_auto: bool
    base_micro_batches: int
    num_micro_batches: int
    step: int
    threshold_s: float | None
    decided_at: int | None
    calibrated_from: int
    calibration_step_s: float | None
    dropped: float
    bounded_planned: int
    best_mean_s_W: tuple[float, ...] | None
    recent: tuple[tuple[float, int], ...]
    window: tuple[StepSample, ...]


class Budget:
    """One rank's compute bound over the steps of a job.

    Args:
        bound: the settings.
        num_micro_batches: planned in a step (M).
        rank: this process.
        world_size: ranks of the job.
    """

    def __init__(
        self,
        bound: ComputeBound,
        *,
        num_micro_batches: int,
        rank: int,
        world_size: int,
    ) -> None:
        self.bound = bound
        """The settings."""
        self._rank, self._world_size = rank, world_size
        self._base_micro_batches = num_micro_batches
        self.num_micro_batches = num_micro_batches
        """Planned in the next step; grows with ``compensate="batch"``."""
        self.step = 0
        """Steps done."""
        self._is_auto = bound.threshold_s == "auto"
        self._threshold_s = (
            math.inf if bound.threshold_s == "auto" else float(bound.threshold_s)
        )
        self._decided_at: int | None = None if self._is_auto else 0
        self._calibrated_from = bound.warmup_steps
        self._window: deque[StepSample] = deque(maxlen=MAX_WINDOW)
        self._recent: deque[tuple[float, int]] = deque(maxlen=bound.calibration_steps)
        self._calibration_step_s: float | None = None
        self._best_mean_s_W: F64 | None = None
        self._dropped = 0.0
        self._bounded_planned = 0

    @property
    def phase(self) -> Phase:
        """Of the step to come."""
        if self._decided_at is not None:
            return Phase.BOUNDED
        is_warm = self.step >= self._calibrated_from
        return Phase.CALIBRATION if is_warm else Phase.WARM_UP

    @property
    def threshold_s(self) -> float | None:
        """Of the step to come; None: it is not bounded."""
        return self._threshold_s if math.isfinite(self._threshold_s) else None

    @property
    def mean_dropped_share(self) -> float:
        """Of all ranks' micro-batches, since a threshold is in force."""
        planned = self._bounded_planned
        return self._dropped / planned if planned else 0.0

    def is_over(self, elapsed_s: float) -> bool:
        """True once this much compute is enough (Algorithm 1)."""
        return elapsed_s >= self._threshold_s

    def end_step(self, sample: StepSample) -> bool:
        """Take note of a step.

        Returns:
            True if all ranks must now exchange ``pack`` and call ``decide``; it is
            True on all of them at the same step.
        """
        phase = self.phase
        self.step += 1
        if phase is Phase.WARM_UP:
            return False
        whole = self.num_micro_batches * self._world_size
        if sample.total_planned == whole:
            self._window.append(sample)
        if phase is Phase.CALIBRATION:
            steps = self._calibrated_from + self.bound.calibration_steps
            # An epoch's short last steps do not count; one whole step is needed.
            return self.step >= steps and self.has_news
        self._dropped += sample.total_planned - sample.total_computed
        self._bounded_planned += sample.total_planned
        self._recent.append((sample.total_computed, sample.total_planned))
        assert self._decided_at is not None  # bounded
        due = self.step - self._decided_at >= self.bound.retune_every
        return (due or self._drops_too_much()) and self.has_news

    @property
    def has_news(self) -> bool:
        """There are steps since the last decision that another could start from."""
        return len(self._window) > 0

    def pack(self) -> bytes:
        """This rank's latencies since the last decision, for the all-gather."""
        num = self.num_micro_batches
        rows_SX = np.full((len(self._window), num + _NUMBERS), np.nan)
        for row_X, sample in zip(rows_SX, self._window, strict=True):
            row_X[:_NUMBERS] = sample.exchange_s, sample.step_s, sample.computed
            row_X[_NUMBERS : _NUMBERS + len(sample.latency_s)] = sample.latency_s
        return rows_SX.astype("<f8").tobytes()

    def decide(self, parts: tuple[bytes, ...]) -> ThresholdReport:
        """Choose the threshold from all ranks' latencies; equal on all ranks.

        Args:
            parts: every rank's ``pack``, in rank order.

        Raises:
            PeerProtocolError: a rank sent another number of steps.
        """
        rows_WSX = self._unpack_untrusted(parts)
        comm_s_S: F64 = rows_WSX[:, :, 0].min(axis=0)
        latency_s_SWM: F64 = rows_WSX[:, :, _NUMBERS:].transpose(1, 0, 2)
        step_s = float(rows_WSX[:, :, 1].mean())
        computed_W: F64 = rows_WSX[:, :, 2].mean(axis=1)
        planned = self.num_micro_batches
        was_bounded = self._decided_at is not None
        if not was_bounded:
            self._calibration_step_s = step_s
        idle_W = np.isnan(latency_s_SWM).all(axis=(0, 2))
        choice: Choice | None = None
        relative_W: tuple[float, ...] = ()
        individual_W: tuple[float, ...] = ()
        if not idle_W.any():
            choice = self._choose(latency_s_SWM, comm_s_S)
            relative_W, individual_W = self._scores(latency_s_SWM)
        if self._is_auto:
            self._threshold_s = math.inf if choice is None else choice.threshold_s
            if choice is not None and self.bound.compensate == "batch":
                self._grow(choice)
        kept = float(computed_W.mean()) / planned
        realised = step_s if was_bounded else None
        report = ThresholdReport(
            rank=self._rank,
            step=self.step,
            threshold_s=self.threshold_s,
            calibration_step_s=self._calibration_step_s,
            realised_step_s=realised,
            realised_speedup=_speedup(self._calibration_step_s, realised, kept),
            dropped_share_W=tuple((1.0 - computed_W / planned).tolist()),
            relative_score_W=relative_W,
            individual_score_W=individual_W,
            **_predictions(choice, np.flatnonzero(idle_W).tolist()),
        )
        self._decided_at = self.step
        self._window.clear()
        self._recent.clear()
        return report

    def state_dict(self) -> dict[str, Any]:
        """This rank's memory as plain data, for a checkpoint."""
        best_W = self._best_mean_s_W
        return {
            "is_auto": self._is_auto,
            "base_micro_batches": self._base_micro_batches,
            "num_micro_batches": self.num_micro_batches,
            "step": self.step,
            "threshold_s": self.threshold_s,
            "decided_at": self._decided_at,
            "calibrated_from": self._calibrated_from,
            "calibration_step_s": self._calibration_step_s,
            "dropped": self._dropped,
            "bounded_planned": self._bounded_planned,
            "best_mean_s_W": None if best_W is None else best_W.tolist(),
            "recent": [list(pair) for pair in self._recent],
            "window": [asdict(sample) for sample in self._window],
        }

    def load_state_dict(self, state: Mapping[str, Any], *, is_own: bool) -> None:
        """Go on from a checkpoint, without a warm-up.

        Of another rank's state, such as with another number of ranks, the threshold
        and the counts are taken, and what was measured is left out. A threshold for
        other micro-batches in a step is left out too; ``auto`` then measures anew.

        Args:
            state: what ``state_dict`` gave.
            is_own: it is this rank's, of a job with as many ranks.

        Raises:
            ConfigError: it is no such state.
        """
        try:
            told = msgspec.convert(state, _Memory)
        except msgspec.ValidationError as error:
            raise ConfigError(f"not the state of a compute bound: {error}") from error
        self.step = told.step
        self._dropped, self._bounded_planned = told.dropped, told.bounded_planned
        grows = self.bound.compensate == "batch"
        is_same = (
            told.is_auto == self._is_auto
            and told.base_micro_batches == self._base_micro_batches
            and (grows or told.num_micro_batches == told.base_micro_batches)
        )
        self._window.clear()
        self._recent.clear()
        self._calibrated_from = max(told.step, told.calibrated_from)
        if not is_same:
            self._decided_at = None if self._is_auto else told.step
            return
        self._decided_at = told.decided_at
        self.num_micro_batches = told.num_micro_batches
        self._calibration_step_s = told.calibration_step_s
        if self._is_auto:
            threshold_s = told.threshold_s
            self._threshold_s = math.inf if threshold_s is None else threshold_s
        if is_own:
            self._calibrated_from = told.calibrated_from
            best_W = told.best_mean_s_W
            self._best_mean_s_W = None if best_W is None else np.array(best_W)
            self._recent.extend(told.recent)
            self._window.extend(told.window)

    def _choose(self, latency_s_SWM: F64, comm_s_S: F64) -> Choice:
        """The best threshold; or the fixed one, with what is to be expected of it."""
        finish_started = self.bound.preempt == "micro_batch"
        if self._is_auto:
            return choose(
                latency_s_SWM,
                comm_s_S,
                max_drop=self.bound.max_drop,
                finish_started=finish_started,
            )
        return evaluate(
            latency_s_SWM,
            comm_s_S,
            self._threshold_s,
            finish_started=finish_started,
        )

    def _grow(self, choice: Choice) -> None:
        """Plan so many micro-batches that as many as before are computed (spec C6)."""
        grown = grown_micro_batches(self._base_micro_batches, choice.dropped_share)
        if math.isfinite(self._threshold_s):
            # The same share of a longer step.
            self._threshold_s *= grown / self.num_micro_batches
        self.num_micro_batches = grown

    def _scores(
        self, latency_s_SWM: F64
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Relative and individual scores of each rank."""
        mean_s_W: F64 = np.nanmean(latency_s_SWM, axis=(0, 2))
        best = self._best_mean_s_W
        self._best_mean_s_W = mean_s_W if best is None else np.fmin(best, mean_s_W)
        return (
            tuple(relative_scores(mean_s_W).tolist()),
            tuple(individual_scores(mean_s_W, self._best_mean_s_W).tolist()),
        )

    def _drops_too_much(self) -> bool:
        """More than expected was dropped in the newest steps (``auto`` only)."""
        if not self._is_auto or len(self._recent) < self.bound.calibration_steps:
            return False
        computed = sum(computed for computed, _ in self._recent)
        planned = sum(planned for _, planned in self._recent)
        return planned - computed > TOO_MUCH * self.bound.max_drop * planned

    def _unpack_untrusted(self, parts: tuple[bytes, ...]) -> F64:
        shape = (len(self._window), self.num_micro_batches + _NUMBERS)
        for rank, part in enumerate(parts):
            if len(part) != 8 * shape[0] * shape[1]:
                raise PeerProtocolError(
                    f"rank {rank}",
                    "while a threshold was chosen",
                    f"{len(part)} bytes of latencies, not {8 * shape[0] * shape[1]}",
                )
        rows_WSX: F64 = np.stack(
            [np.frombuffer(part, "<f8").reshape(shape) for part in parts]
        )
        return rows_WSX


def _speedup(before_s: float | None, now_s: float | None, kept: float) -> float | None:
    """Effective speedup that was realised: faster steps, times the share kept."""
    return before_s / now_s * kept if before_s and now_s else None


def _predictions(choice: Choice | None, idle: list[int]) -> dict[str, Any]:
    """The fields of a report that come from the choice, or from there being none."""
    if choice is None:
        ranks = ", ".join(map(str, idle))
        return {
            "predicted_step_s": None,
            "predicted_speedup": None,
            "predicted_drop": None,
            "persistent_stragglers": tuple(idle),
            "verdict": (
                f"no threshold: rank {ranks} finished no micro-batch since the last "
                "look; rebalance or replace it"
            ),
        }
    curve = choice.curve
    thin = slice(None, None, -(-len(curve.threshold_s_K) // CURVE_POINTS))
    return {
        "predicted_step_s": choice.step_s,
        "predicted_speedup": choice.speedup,
        "predicted_drop": choice.dropped_share,
        "persistent_stragglers": choice.persistent_stragglers,
        "verdict": choice.verdict,
        "imputed_share": choice.imputed_share,
        "curve_threshold_s_K": tuple(curve.threshold_s_K[thin].tolist()),
        "curve_speedup_K": tuple(curve.speedup_K[thin].tolist()),
        "curve_drop_K": tuple(curve.dropped_share_K[thin].tolist()),
    }
