"""What DropCompute's theory expects of a step: its time, what is kept, what it gains.

Needs only the mean and the standard deviation of one micro-batch's latency, the
number of workers and the communication time: no training, no trace. The formulas take
the sum of a worker's micro-batches for normal (central limit theorem), so they are
off where few micro-batches of a skewed distribution meet many workers; then give
:func:`expected_speedup` a measured step time ("analytical given E[T]").

Source: DropCompute, sections analysis_iteration_time and speedup_analysis; spec C4.
"""

import math
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from tailbound.compute.distribution import LARGEST_Z, phi
from tailbound.config import require

F64 = NDArray[np.float64]

EULER_MASCHERONI = 0.5772156649015329
STANDARD = NormalDist()
SEARCH_POINTS = 512
"""Thresholds tried between the lowest and the highest."""
LAST_PEAKS = 64
"""How many m have thresholds tried near m mu besides; see best_threshold_s."""


def expected_step_s(
    mean_s: float,
    std_s: float,
    *,
    num_micro_batches: int,
    num_workers: int,
    comm_s: float = 0.0,
) -> float:
    """E[T], the slowest worker's compute time in a step, plus the communication time.

    sqrt(M) sigma ((1 - g) Phi^-1(1 - 1/N) + g Phi^-1(1 - 1/(e N))) + M mu + T_c, where
    g is Euler and Mascheroni's constant; M mu + T_c for one worker.

    Args:
        mean_s: mean latency of a micro-batch (mu), >= 0.
        std_s: its standard deviation (sigma), >= 0.
        num_micro_batches: of a worker in a step (M), >= 1.
        num_workers: N, >= 1. The maximum of N standard normals is met within 2.6 % from
            3 workers on; for 2 the formula gives 0.520, the truth is 0.564.
        comm_s: communication time (T_c), >= 0.

    Raises:
        ConfigError: an argument is out of its range.

    Source: eq:estimate_T, eq:approximate_t (Bailey et al. 2014 for the maximum).
    """
    check_latency(mean_s, std_s, num_micro_batches, comm_s)
    require(num_workers >= 1, f"num_workers is 1 or more, not {num_workers}")
    expected_max = 0.0
    if num_workers > 1:
        # Phi^-1(1 - x) = -Phi^-1(x), which keeps its digits for many workers
        middle = STANDARD.inv_cdf(1.0 / num_workers)
        tail = STANDARD.inv_cdf(1.0 / (math.e * num_workers))
        expected_max = -(1.0 - EULER_MASCHERONI) * middle - EULER_MASCHERONI * tail
    spread_s = math.sqrt(num_micro_batches) * std_s
    return spread_s * expected_max + num_micro_batches * mean_s + comm_s


def expected_micro_batches(
    threshold_s: float, mean_s: float, std_s: float, *, num_micro_batches: int
) -> float:
    """E[M~], the micro-batches that a worker finishes before the threshold.

    sum over m = 1..M of Phi((tau - m mu) / (sqrt(m) sigma)). The error is O(1) for
    thresholds above M mu / 2 (assume:tau_limit) and comes from the first sqrt(M) terms.

    Args:
        threshold_s: seconds of compute (tau), > 0; may be infinite.
        mean_s: mean latency of a micro-batch (mu), >= 0.
        std_s: its standard deviation (sigma), >= 0. With 0, those m with m mu < tau.
        num_micro_batches: planned (M), >= 1.

    Returns:
        A number in [0, M].

    Raises:
        ConfigError: an argument is out of its range.

    Source: eq:estimate_M, eq:approximate_m.
    """
    check_latency(mean_s, std_s, num_micro_batches, 0.0)
    check_threshold(threshold_s)
    return float(kept_K(np.array([threshold_s]), mean_s, std_s, num_micro_batches)[0])


def expected_speedup(
    threshold_s: float,
    mean_s: float,
    std_s: float,
    *,
    num_micro_batches: int,
    step_s: float,
    comm_s: float = 0.0,
) -> float:
    """E[S_eff], the throughput with the threshold over the throughput without.

    E[M~] / M * (E[T] + T_c) / (min(tau, E[T]) + T_c). The printed formula counts T_c
    within E[T]; here E[T] is compute time alone, as in eq:auto_eff. The error is
    O(1/M + 1/(M sqrt(N))).

    Args:
        threshold_s: seconds of compute (tau), > 0; may be infinite.
        mean_s: mean latency of a micro-batch (mu), >= 0.
        std_s: its standard deviation (sigma), >= 0.
        num_micro_batches: planned (M), >= 1.
        step_s: E[T] without communication, > 0: of :func:`expected_step_s`, or
            measured without a threshold ("analytical given E[T]").
        comm_s: communication time (T_c), >= 0.

    Raises:
        ConfigError: an argument is out of its range.

    Source: eq:eff_speedup, eq:auto_eff; figure estimate_s_eff.
    """
    check_latency(mean_s, std_s, num_micro_batches, comm_s)
    require(
        step_s > 0.0 and math.isfinite(step_s),
        f"step_s is a positive number of seconds, not {step_s}",
    )
    kept = expected_micro_batches(
        threshold_s, mean_s, std_s, num_micro_batches=num_micro_batches
    )
    faster = (step_s + comm_s) / (min(threshold_s, step_s) + comm_s)
    return kept / num_micro_batches * faster


def best_threshold_s(
    mean_s: float,
    std_s: float,
    *,
    num_micro_batches: int,
    comm_s: float = 0.0,
    max_drop: float = 1.0,
) -> float:
    """tau*, the threshold with the largest expected speedup.

    argmax over tau > M mu / 2 (assume:tau_limit) of E[M~(tau)] / (tau + T_c). E[T]
    cancels, so tau* is the same for any number of workers. With so few workers that
    E[T] < tau*, no threshold gains: compare :func:`expected_speedup` with 1.

    Args:
        mean_s: mean latency of a micro-batch (mu), > 0.
        std_s: its standard deviation (sigma), >= 0. With 0 the result drops nothing.
        num_micro_batches: planned (M), >= 1.
        comm_s: communication time (T_c), >= 0.
        max_drop: share in [0, 1] of the micro-batches that may be dropped at most;
            0 gives a threshold that drops less than one in 1e15.

    Returns:
        Seconds of compute.

    Raises:
        ConfigError: an argument is out of its range.

    Source: appendix:speedup_analysis, "Finding tau*".
    """
    check_latency(mean_s, std_s, num_micro_batches, comm_s)
    require(mean_s > 0.0, f"mean_s is a positive number of seconds, not {mean_s}")
    require(0.0 <= max_drop <= 1.0, f"max_drop is a share in [0, 1], not {max_drop}")
    total_s = num_micro_batches * mean_s
    spread_s = math.sqrt(num_micro_batches) * std_s
    highest_s = math.nextafter(total_s + LARGEST_Z * spread_s, math.inf)
    if std_s == 0.0:
        return highest_s
    lowest_s = lowest_threshold_s(
        (total_s / 2.0, highest_s), mean_s, std_s, num_micro_batches, max_drop
    )

    def gain_K(threshold_s_K: F64) -> F64:
        finished_K = kept_K(threshold_s_K, mean_s, std_s, num_micro_batches)
        return np.asarray(finished_K / (threshold_s_K + comm_s))

    # With little noise each m mu has a narrow peak above it, the last ones the highest.
    m_M = np.arange(max(1, num_micro_batches - LAST_PEAKS), num_micro_batches + 1)
    around = np.sqrt(m_M)[:, None] * std_s * np.linspace(-2.0, LARGEST_Z, 21)
    near = m_M[:, None] * mean_s + around
    tried = np.concatenate(
        (np.linspace(lowest_s, highest_s, SEARCH_POINTS), near.ravel())
    )
    tried = np.unique(tried[(tried >= lowest_s) & (tried <= highest_s)])
    best = int(np.argmax(gain_K(tried)))
    low, high = tried[max(0, best - 1)], tried[min(len(tried) - 1, best + 1)]
    while high - low > 1e-9 * high:  # the peak is between its neighbours: zoom in
        zoomed = np.linspace(low, high, 17)
        best = int(np.argmax(gain_K(zoomed)))
        low, high = zoomed[max(0, best - 1)], zoomed[min(16, best + 1)]
    return float(high)


def kept_K(
    threshold_s_K: F64, mean_s: float, std_s: float, num_micro_batches: int
) -> F64:
    """E[M~] for many thresholds; see :func:`expected_micro_batches`."""
    m_M = np.arange(1, num_micro_batches + 1)
    left_s_KM = threshold_s_K[:, None] - m_M * mean_s
    if std_s == 0.0:
        return np.asarray(np.sum(left_s_KM > 0.0, axis=1, dtype=np.float64))
    return np.asarray(phi(left_s_KM / (np.sqrt(m_M) * std_s)).sum(axis=1))


def lowest_threshold_s(
    bracket_s: tuple[float, float],
    mean_s: float,
    std_s: float,
    num_micro_batches: int,
    max_drop: float,
) -> float:
    """The lowest threshold in the bracket that drops max_drop or less."""
    low, high = bracket_s
    needed = (1.0 - max_drop) * num_micro_batches

    def is_enough(threshold_s: float) -> bool:
        finished_K = kept_K(np.array([threshold_s]), mean_s, std_s, num_micro_batches)
        return float(finished_K[0]) >= needed

    if is_enough(low):
        return low
    while high - low > 1e-12 * high:
        middle = (low + high) / 2.0
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def check_latency(
    mean_s: float, std_s: float, num_micro_batches: int, comm_s: float
) -> None:
    """Raise ConfigError unless all are in range."""
    for name, value in (("mean_s", mean_s), ("std_s", std_s), ("comm_s", comm_s)):
        require(
            value >= 0.0 and math.isfinite(value),
            f"{name} is 0 or more seconds, not {value}",
        )
    require(
        num_micro_batches >= 1,
        f"num_micro_batches is 1 or more, not {num_micro_batches}",
    )


def check_threshold(threshold_s: float) -> None:
    """Raise ConfigError unless this is a threshold."""
    require(threshold_s > 0.0, f"threshold_s is above 0 seconds, not {threshold_s}")
