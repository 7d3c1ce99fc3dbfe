"""Which workers are slow all the time, and how slow each is.

A threshold helps where the straggler is another one in every step. Where it is always
the same, the best threshold drops that worker's data for ever, and training never sees
it. So such a worker is named, and the cure is elsewhere: rebalance or replace it.
"""

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

FAST_SHARE = 0.25
"""The fastest quarter of the workers, by mean, is what the others are compared with:
half of them and more may be slow, and one fast worker alone is no measure."""
SLOW_MEAN = 1.25
"""Mean time over the fast workers' from which a worker may be a persistent straggler.
Fixed offsets of 10 to 20 % are common on sound systems, and a threshold copes; on the
real traces the largest is 1.21, the least of those to replace 2.4."""
SLOW_STEP = 1.1
"""A step is slow for a worker that takes this many times the fast workers' time."""
SLOW_SHARE = 0.8
"""Share of slow steps from which a worker is slow all the time. Of equal workers each
is slower than the fast ones in little more than half of the steps."""
MIN_STEPS = 10
"""Fewer steps do not tell slow all the time from slow by chance."""
MIN_DEVIATIONS = 5.0
"""Mean excess over the fast workers' time, in standard errors of that mean. With it, 32
equal workers under the paper's delay model name one of them in less than 1 of 50 looks
at 20 steps."""


def find_persistent(time_s_SW: F64, dropped_share_W: F64) -> tuple[int, ...]:
    """Workers that are slow in the mean, in most steps, and in what is dropped.

    A worker is named if all of this holds, with the constants of this module: its mean
    time is at least SLOW_MEAN times that of the fast ones; it is slower than SLOW_STEP
    times them in SLOW_SHARE of the steps; its excess is more than chance
    (MIN_DEVIATIONS); and it has at least an even share of what is dropped, so that it
    is this worker and not a moving straggler which the threshold pays for.

    Args:
        time_s_SW: compute time of each worker in each step.
        dropped_share_W: what the best threshold without a cap drops of each worker's
            micro-batches; zeros if it drops nothing.

    Returns:
        Their indices, ascending; none if there are fewer than MIN_STEPS steps.
    """
    num_steps = len(time_s_SW)
    if num_steps < MIN_STEPS:
        return ()
    mean_s_W = time_s_SW.mean(axis=0)
    fast_s = np.quantile(mean_s_W, FAST_SHARE, method="inverted_cdf")
    fast_s_S1 = np.median(time_s_SW[:, mean_s_W <= fast_s], axis=1, keepdims=True)
    excess_s_SW = time_s_SW - fast_s_S1
    error_s_W = excess_s_SW.std(axis=0, ddof=1) / np.sqrt(num_steps)
    is_persistent_W = (
        (mean_s_W >= SLOW_MEAN * fast_s)
        & (np.mean(time_s_SW > SLOW_STEP * fast_s_S1, axis=0) >= SLOW_SHARE)
        & (excess_s_SW.mean(axis=0) >= MIN_DEVIATIONS * error_s_W)
        & (dropped_share_W >= dropped_share_W.mean())
    )
    return tuple(np.flatnonzero(is_persistent_W).tolist())


def relative_scores(mean_s_W: F64) -> F64:
    """The fastest worker's mean micro-batch time over each one's: 0 to 1, 1 is fastest.

    Args:
        mean_s_W: seconds, more than 0.
    """
    return np.asarray(mean_s_W.min() / mean_s_W, dtype=np.float64)


def individual_scores(mean_s_W: F64, best_mean_s_W: F64) -> F64:
    """The best mean that each worker ever had over its mean now: 0 to 1, 1 is its best.

    Args:
        mean_s_W: seconds, more than 0.
        best_mean_s_W: seconds, at most mean_s_W.
    """
    return np.asarray(best_mean_s_W / mean_s_W, dtype=np.float64)
