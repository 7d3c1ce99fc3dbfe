"""Which workers are slow all the time, and how slow each is.

A threshold helps where the straggler is another one in every step. Where it is always
the same, the best threshold drops that worker's data for ever, and training never sees
it. So such a worker is named, and the cure is elsewhere: rebalance or replace it.
"""

import numpy as np
from numpy.typing import NDArray

from tailbound.compute.samples import Floats

F64 = NDArray[np.float64]

FAST_QUANTILE = 0.25
"""Workers are compared with this quantile of all: half of them may be slow, as in
real traces, and one very fast one does not make all others stragglers."""
SLOW_MEAN = 1.25
"""Mean micro-batch time over the fast workers' from which a worker may be persistent.
Fixed offsets of 10 to 20 % are common on sound systems, and a threshold copes."""
SLOW_STEP = 1.1
"""A step in which a worker takes this many times the fast workers' time is slow."""
SLOW_SHARE = 0.75
"""Share of slow steps from which it is persistent: a straggler that moves is not."""


def find_persistent(latency_s_SWM: Floats, dropped_share_W: F64) -> tuple[int, ...]:
    """Workers that are slow in the mean, in most steps, and in what is dropped.

    Args:
        latency_s_SWM: seconds of each micro-batch; nothing missing.
        dropped_share_W: what the best threshold drops of each worker's micro-batches.
            A persistent straggler has at least its fair share of the drops.

    Returns:
        Their indices, ascending.
    """
    time_s_SW = latency_s_SWM.sum(axis=2, dtype=np.float64)
    mean_s_W = time_s_SW.mean(axis=0)
    fast_s = np.quantile(mean_s_W, FAST_QUANTILE)
    fast_s_S = np.quantile(time_s_SW, FAST_QUANTILE, axis=1)
    slow_share_W = (time_s_SW > SLOW_STEP * fast_s_S[:, None]).mean(axis=0)
    is_persistent_W = (
        (mean_s_W >= SLOW_MEAN * fast_s)
        & (slow_share_W >= SLOW_SHARE)
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
