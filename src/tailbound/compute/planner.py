"""What a compute bound would gain on a recorded trace, in numbers and in words.

Post-analysis: the trace was recorded without a threshold, and each threshold's effect
on it is computed, not measured. Source: DropCompute, Algorithm 2 and figures
choosing_threshold and speedup; spec C3, C9.
"""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any, Literal

import numpy as np
from msgspec.structs import asdict, replace
from numpy.typing import ArrayLike, NDArray

from tailbound.compute.plan_words import advice, headline, sentences
from tailbound.compute.plans import DropPoint, Estimate, Outcome, Plan, PlanCurve
from tailbound.compute.resampling import with_micro_batches, with_workers
from tailbound.compute.samples import Floats, impute
from tailbound.compute.search import PrefixTimes
from tailbound.compute.threshold import Choice, choose
from tailbound.compute.traces import Trace
from tailbound.config import require

F64 = NDArray[np.float64]

DROPS = tuple(percent / 100.0 for percent in range(21))
"""Shares for which the speedup is told: the range of the paper's figures."""
CURVE_POINTS = 240
"""Thresholds in a plan: enough to draw."""
MAX_SAMPLES = 2_000_000
"""Micro-batches that an estimate is drawn from, in all: below a second."""
MAX_STEP_SAMPLES = 16_000_000
"""Micro-batches in one step of an estimate: more do not fit into 1 GB."""
MAX_DRAWS = 8
"""Times that an estimate is drawn, if that many fit into MAX_SAMPLES."""
LEAVING_GAIN = 0.01
"""Speedup beyond finishing a micro-batch from which leaving it is proposed."""
NO_TAIL = 1.001
"""Iteration ratios below this are no straggler."""


def plan(
    trace: Trace,
    *,
    comm_s: ArrayLike | None = None,
    max_drop: float = 0.10,
    num_workers: Sequence[int] = (),
    num_micro_batches: Sequence[int] = (),
    rng: np.random.Generator | None = None,
) -> Plan:
    """Say what DropCompute would gain on a trace.

    Args:
        trace: of two or more workers.
        comm_s: communication time of a step, or of each step; None: the trace's.
        max_drop: share in [0, 1] of the micro-batches that may be dropped.
        num_workers: estimate the gain for these numbers of workers.
        num_micro_batches: and of micro-batches; with both, for each pair. With none,
            half, double and four times the workers, half and double the micro-batches.
        rng: draws for the estimates; None: one with seed 0.

    Raises:
        ConfigError: an argument is out of its range, or the latencies cannot be
            planned with, see :func:`~tailbound.compute.threshold.choose`.
    """
    comm_s_S, is_comm_known = _comm(trace, comm_s)
    latency_s_SWM, imputed_share = impute(trace.latency_s_SWM)
    choice = choose(latency_s_SWM, comm_s_S, max_drop=max_drop)
    prefix = PrefixTimes(latency_s_SWM, comm_s_S)
    cases = _cases(latency_s_SWM.shape, num_workers, num_micro_batches)
    rng = np.random.default_rng(0) if rng is None else rng
    time_s_SW = prefix.time_s_SW
    persistent = list(choice.persistent_stragglers)
    slowest_W = np.bincount(time_s_SW.argmax(axis=1), minlength=len(trace.workers))
    num_steps, _, planned = latency_s_SWM.shape
    finishing = _outcome(
        choose(latency_s_SWM, comm_s_S, max_drop=max_drop, finish_started=True)
    )
    is_left = choice.speedup >= finishing.speedup + LEAVING_GAIN

    def by_worker(value_W: NDArray[Any]) -> dict[str, float]:
        return dict(zip(trace.workers, value_W.tolist(), strict=True))

    found = Plan(
        **asdict(_outcome(choice)),
        verdict="",
        next_line=_next_line(planned, max_drop, is_left=is_left),
        max_drop=max_drop,
        comm_s=float(comm_s_S.mean()),
        is_comm_known=is_comm_known,
        num_steps=num_steps,
        num_workers=len(trace.workers),
        num_micro_batches=planned,
        left_out_steps=trace.left_out_steps,
        imputed_share=imputed_share,
        straggler=_straggler(choice),
        persistent_stragglers=[trace.workers[worker] for worker in persistent],
        finishing=finishing,
        without_stragglers=_without(latency_s_SWM, persistent, comm_s_S, max_drop),
        unlimited=_outcome(
            choice if max_drop == 1.0 else choose(latency_s_SWM, comm_s_S)
        ),
        dropped_share_W=by_worker(choice.dropped_share_W),
        step_s_W=by_worker(time_s_SW.mean(axis=0)),
        slowest_share_W=by_worker(slowest_W / num_steps),
        slow_first_steps=_slow_first_steps(prefix.longest_s_S + comm_s_S),
        curve=_curve(choice, prefix),
        by_drop=_by_drop(prefix),
        estimates=[
            _estimate(latency_s_SWM, comm_s_S, case, max_drop, rng) for case in cases
        ],
    )
    words = (f"{headline(found)}.", *sentences(found), advice(found))
    return replace(found, verdict=" ".join(words))


def _comm(trace: Trace, comm_s: ArrayLike | None) -> tuple[F64, bool]:
    """Communication time of each step, and whether anybody told it."""
    if comm_s is None:
        if trace.comm_s_S is not None:
            return trace.comm_s_S, True
        return np.zeros(len(trace.steps)), False
    told = np.asarray(comm_s, np.float64)
    require(
        told.shape in ((), (len(trace.steps),)),
        f"comm_s is one number, or one for each of {len(trace.steps)} steps, not "
        f"{told.shape}",
    )
    require(
        bool(np.all((told >= 0.0) & (told < math.inf))),
        "a communication time is 0 or more seconds",
    )
    return np.broadcast_to(told, (len(trace.steps),)), True


def _outcome(choice: Choice) -> Outcome:
    return Outcome(
        speedup=choice.speedup,
        threshold_s=choice.threshold_s if math.isfinite(choice.threshold_s) else None,
        dropped_share=choice.dropped_share,
        iteration_ratio=choice.iteration_ratio,
        baseline_step_s=choice.baseline_step_s,
        step_s=choice.step_s,
    )


def _next_line(num_micro_batches: int, max_drop: float, *, is_left: bool) -> str:
    settings = f'threshold_s="auto", max_drop={max_drop}'
    if is_left:
        settings += ', preempt="backward"'
    return (
        f"tailbound.attach(model, optimizer, micro_batches={num_micro_batches}, "
        f"compute=tailbound.ComputeBound({settings}))"
    )


def _straggler(choice: Choice) -> Literal["moves", "persists", "none"]:
    if choice.persistent_stragglers:
        return "persists"
    return "moves" if choice.iteration_ratio >= NO_TAIL else "none"


def _without(
    latency_s_SWM: Floats, workers: list[int], comm_s_S: F64, max_drop: float
) -> Outcome | None:
    """The outcome without some workers; None if that leaves fewer than two."""
    rest_SWM = np.delete(latency_s_SWM, workers, axis=1)
    if not workers or rest_SWM.shape[1] < 2:
        return None
    return _outcome(choose(rest_SWM, comm_s_S, max_drop=max_drop))


def _slow_first_steps(step_s_S: F64) -> int:
    is_slow_S = step_s_S > 2.0 * np.median(step_s_S)
    return int(np.argmin(is_slow_S))


def _curve(choice: Choice, prefix: PrefixTimes) -> PlanCurve:
    """The curve at evenly spread thresholds, and at the best one."""
    first_s, last_s = prefix.sorted_s[[0, -1]]
    threshold_s_K = np.linspace(first_s, last_s * 1.02, CURVE_POINTS)[1:]
    if math.isfinite(choice.threshold_s):
        threshold_s_K = np.union1d(threshold_s_K, [choice.threshold_s])
    longest_s_S, comm_s_S = prefix.longest_s_S, prefix.comm_s_S
    step_s_KS = np.minimum(threshold_s_K[:, np.newaxis], longest_s_S) + comm_s_S
    return PlanCurve(
        threshold_s_K=threshold_s_K.tolist(),
        speedup_K=prefix.speedup(threshold_s_K).tolist(),
        step_speedup_K=np.mean((longest_s_S + comm_s_S) / step_s_KS, axis=1).tolist(),
        dropped_share_K=prefix.dropped_share(threshold_s_K).tolist(),
    )


def _by_drop(prefix: PrefixTimes) -> list[DropPoint]:
    threshold_s_K = np.array(
        [np.nextafter(prefix.least_for_drop(drop), math.inf) for drop in DROPS]
    )
    return [
        DropPoint(
            max_drop=drop, threshold_s=threshold_s, dropped_share=share, speedup=speedup
        )
        for drop, threshold_s, share, speedup in zip(
            DROPS,
            threshold_s_K.tolist(),
            prefix.dropped_share(threshold_s_K).tolist(),
            prefix.speedup(threshold_s_K).tolist(),
            strict=True,
        )
    ]


def _cases(
    shape: tuple[int, ...], num_workers: Sequence[int], num_micro_batches: Sequence[int]
) -> list[tuple[int, int]]:
    """The jobs to estimate: workers and micro-batches."""
    _, workers, micro_batches = shape
    for name, counts, least in (
        ("workers", num_workers, 2),
        ("micro-batches", num_micro_batches, 1),
    ):
        for count in counts:
            require(count >= least, f"--{name} is {least} or more, not {count}")
    if num_workers or num_micro_batches:
        pairs = list(
            product(num_workers or (workers,), num_micro_batches or (micro_batches,))
        )
    else:
        pairs = [(count, micro_batches) for count in _ladder(workers, 2, (0.5, 2, 4))]
        pairs += [(workers, count) for count in _ladder(micro_batches, 1, (0.5, 2))]
    pairs = [pair for pair in pairs if pair != (workers, micro_batches)]
    for pair in pairs:
        require(
            math.prod(pair) <= MAX_STEP_SAMPLES,
            f"{pair[0]} workers with {pair[1]} micro-batches are more than the "
            f"{MAX_STEP_SAMPLES} samples that a step of an estimate may have; ask for "
            "fewer, or use tailbound simulate",
        )
    return pairs


def _ladder(count: int, least: int, factors: Sequence[float]) -> list[int]:
    return [size for factor in factors if (size := int(count * factor)) >= least]


def _estimate(
    latency_s_SWM: Floats,
    comm_s_S: F64,
    case: tuple[int, int],
    max_drop: float,
    rng: np.random.Generator,
) -> Estimate:
    """The best threshold for a job of another size, as the mean of some draws."""
    num_workers, num_micro_batches = case
    num_steps = min(len(latency_s_SWM), max(1, MAX_SAMPLES // math.prod(case)))
    num_draws = min(MAX_DRAWS, max(1, MAX_SAMPLES // (num_steps * math.prod(case))))
    outcomes, speedup_DK = [], []
    for _ in range(num_draws):
        first = int(rng.integers(len(latency_s_SWM) - num_steps + 1))
        steps = slice(first, first + num_steps)
        drawn_SWM = with_micro_batches(
            with_workers(latency_s_SWM[steps], num_workers, rng), num_micro_batches, rng
        )
        choice = choose(drawn_SWM, comm_s_S[steps], max_drop=max_drop)
        outcomes.append(_outcome(choice))
        points = _by_drop(PrefixTimes(drawn_SWM, comm_s_S[steps]))
        speedup_DK.append([point.speedup for point in points])
    thresholds_s = [one.threshold_s for one in outcomes if one.threshold_s is not None]

    def mean(name: str) -> float:
        return float(np.mean([getattr(one, name) for one in outcomes]))

    return Estimate(
        num_workers=num_workers,
        num_micro_batches=num_micro_batches,
        speedup=mean("speedup"),
        threshold_s=float(np.mean(thresholds_s)) if thresholds_s else None,
        dropped_share=mean("dropped_share"),
        iteration_ratio=mean("iteration_ratio"),
        baseline_step_s=mean("baseline_step_s"),
        step_s=mean("step_s"),
        speedup_by_drop=np.mean(speedup_DK, axis=0).tolist(),
    )
