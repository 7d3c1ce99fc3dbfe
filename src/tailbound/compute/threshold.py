"""Choose the threshold for given latencies: a pure function, the same everywhere.

The live job, the simulator's check and ``tailbound plan`` all call ``choose``.
Source: DropCompute, algorithm:optimal_threshold and section:automatic_threshold;
spec C3; DESIGN 10.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tailbound.compute.finishing import FinishingTimes
from tailbound.compute.samples import Floats, impute
from tailbound.compute.search import PrefixTimes
from tailbound.compute.stragglers import find_persistent
from tailbound.config import require
from tailbound.errors import ShapeError

F64 = NDArray[np.float64]

CURVE_POINTS = 500
"""Thresholds of a curve where no candidates are given."""
GAIN = 1e-9
"""A speedup must exceed 1 by more than rounding to be one."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Speedup and dropped share over the threshold; K points, thresholds ascend."""

    threshold_s_K: F64
    speedup_K: F64
    dropped_share_K: F64


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A threshold, and what it would have brought on latencies that were measured."""

    threshold_s: float
    """Seconds of compute (tau); inf: no threshold helps."""
    speedup: float
    """Effective speedup S_eff: faster steps, times the share that is kept."""
    dropped_share: float
    """Of all micro-batches, in [0, 1]."""
    dropped_share_W: F64
    """Of each worker's."""
    iteration_ratio: float
    """E[T] / E[T_i]: mean time of the slowest worker over that of all workers."""
    step_s: float
    """Mean time of a step with the threshold, communication included."""
    baseline_step_s: float
    """The same without."""
    imputed_share: float
    """Latencies that were missing and filled in, over all."""
    curve: Curve
    persistent_stragglers: tuple[int, ...]
    """Workers that are slow all the time: no threshold is a cure."""
    verdict: str
    """The choice in a sentence or two."""


def choose(
    latency_s_SWM: ArrayLike,
    comm_s_S: ArrayLike,
    *,
    max_drop: float = 1.0,
    candidates: Sequence[float] | None = None,
    finish_started: bool = False,
) -> Choice:
    """Choose the threshold with the largest effective speedup.

    A micro-batch counts if its prefix time is below the threshold (strict). Without
    candidates the search is exact: the supremum lies just above a prefix time, and
    that is what is returned. Never chosen: a threshold that drops more than
    ``max_drop``, or below which some worker finishes less than one micro-batch a step.

    Latencies that a threshold cut are filled in from the same worker's others. Where a
    started micro-batch is always finished, what is missing was never started, so its
    value has no part in its being missing, and filling is unbiased as far as position
    in the step does not matter. One that was left in the middle (``backward``) is
    censored: it took longer than was seen, and the filled value is too small on
    average (docs/design/0021).

    Args:
        latency_s_SWM: seconds of compute; NaN where a step was cut.
        comm_s_S: seconds of communication of each step, or one number for all.
        max_drop: largest share of micro-batches that may be dropped, in [0, 1].
        candidates: thresholds in seconds, more than 0, to choose from.
        finish_started: a micro-batch that runs at the threshold is finished, as with
            ``preempt="micro_batch"``, instead of left at the threshold (Algorithm 2).
            Then the step ends with the last of those, and they count as kept.

    Raises:
        ConfigError: a value is out of range, or a worker has no latency at all.
        ShapeError: the arrays do not fit together.
    """
    require(0.0 <= max_drop <= 1.0, f"max_drop is a share in [0, 1], not {max_drop}")
    times, samples_SWM, imputed_share = _prepare(
        latency_s_SWM, comm_s_S, finish_started
    )
    if candidates is None:
        least_s = max(times.least_for_everyone(), times.least_for_drop(max_drop))
        best_s, speedup = times.best_above(least_s)
        points_s = _spread(times.sorted_s, best_s)
    else:
        points_s = np.unique(np.asarray(candidates, dtype=np.float64))
        require(
            points_s.size > 0 and bool((points_s > 0.0).all()),
            f"candidates are thresholds of more than 0 seconds, not {candidates}",
        )
        speedup_K = times.speedup(points_s)
        allowed_K = times.dropped_share(points_s) <= max_drop
        speedup_K = np.where(allowed_K, speedup_K, 0.0)
        best_s, speedup = float(points_s[speedup_K.argmax()]), float(speedup_K.max())
    if speedup <= 1.0 + GAIN or not times.dropped_share(np.array([best_s]))[0]:
        best_s = math.inf
    return _describe(times, samples_SWM, imputed_share, best_s, points_s, max_drop)


def evaluate(
    latency_s_SWM: ArrayLike,
    comm_s_S: ArrayLike,
    threshold_s: float,
    *,
    finish_started: bool = False,
) -> Choice:
    """Say what one threshold would have brought; see ``choose``.

    Raises:
        ConfigError: see ``choose``.
        ShapeError: see ``choose``.
    """
    times, samples_SWM, imputed_share = _prepare(
        latency_s_SWM, comm_s_S, finish_started
    )
    points_s = np.array([threshold_s])
    return _describe(times, samples_SWM, imputed_share, threshold_s, points_s, 1.0)


def _prepare(
    latency_s_SWM: ArrayLike, comm_s_S: ArrayLike, finish_started: bool
) -> tuple[PrefixTimes, Floats, float]:
    samples_SWM, imputed_share = impute(latency_s_SWM)
    comm = np.asarray(comm_s_S, dtype=np.float64)
    if comm.ndim > 1 or (comm.ndim == 1 and len(comm) != len(samples_SWM)):
        raise ShapeError(
            f"communication times are one number or {len(samples_SWM)}, one a step, "
            f"not of shape {comm.shape}"
        )
    require(
        bool(np.isfinite(comm).all() and (comm >= 0.0).all()),
        "communication times are 0 or more seconds and finite",
    )
    comm_S = np.broadcast_to(comm, (len(samples_SWM),))
    kind = FinishingTimes if finish_started else PrefixTimes
    return kind(samples_SWM, comm_S), samples_SWM, imputed_share


def _spread(sorted_s: F64, best_s: float) -> F64:
    """Thresholds for a curve: just above prefix times of even ranks, and the best."""
    ranks = np.unique(np.linspace(0, sorted_s.size - 1, CURVE_POINTS).astype(np.int64))
    points_s = np.nextafter(sorted_s[ranks], np.inf)
    if math.isfinite(best_s):
        points_s = np.append(points_s, best_s)
    return np.unique(points_s[points_s > 0.0])


def _describe(
    times: PrefixTimes,
    samples_SWM: Floats,
    imputed_share: float,
    threshold_s: float,
    points_s: F64,
    max_drop: float,
) -> Choice:
    longest_s = float(times.longest_s_S.mean())
    baseline_step_s = longest_s + float(times.comm_s_S.mean())
    curve = Curve(points_s, times.speedup(points_s), times.dropped_share(points_s))
    num_workers = samples_SWM.shape[1]
    if math.isfinite(threshold_s):
        dropped_share_W = times.dropped_share_W(threshold_s)
        speedup = float(times.speedup(np.array([threshold_s]))[0])
        step_s = times.step_s(threshold_s)
    else:
        dropped_share_W = np.zeros(num_workers)
        speedup, step_s = 1.0, baseline_step_s
    # Judged by what no cap would hold back: under a cap the slow may drop nothing.
    free_s = float(curve.threshold_s_K[curve.speedup_K.argmax()])
    persistent = find_persistent(times.time_s_SW, times.dropped_share_W(free_s))
    dropped_share = float(dropped_share_W.mean())
    return Choice(
        threshold_s=threshold_s,
        speedup=speedup,
        dropped_share=dropped_share,
        dropped_share_W=dropped_share_W,
        iteration_ratio=longest_s / float(times.time_s_SW.mean()),
        step_s=step_s,
        baseline_step_s=baseline_step_s,
        imputed_share=imputed_share,
        curve=curve,
        persistent_stragglers=persistent,
        verdict=_verdict(threshold_s, speedup, dropped_share, persistent, max_drop),
    )


def _verdict(
    threshold_s: float,
    speedup: float,
    dropped_share: float,
    persistent: tuple[int, ...],
    max_drop: float,
) -> str:
    if math.isfinite(threshold_s):
        said = (
            f"a threshold of {threshold_s:.4g} s makes training {speedup:.3f} times as "
            f"fast and drops {dropped_share:.1%}"
        )
    else:
        cap = "" if max_drop == 1.0 else f" that drops at most {max_drop:.0%}"
        said = f"no threshold{cap} makes training faster"
    if persistent:
        ranks = ", ".join(map(str, persistent))
        noun = "rank" if len(persistent) == 1 else "ranks"
        said += (
            f"; {noun} {ranks} slow in nearly every step: rebalance or replace "
            f"{noun} {ranks}"
        )
    return said
