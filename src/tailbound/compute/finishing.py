"""Prefix times where a micro-batch that runs at the threshold is finished.

That is how a step is cut between micro-batches: one may start before the threshold and
end after it. It counts as kept, and the step lasts until the last of those ends. So a
threshold matters only by what has started below it, and a step's part of the speedup
changes only where one of its own micro-batches starts: the best threshold is found by
one sum over all starts, in order.
"""

import numpy as np
from numpy.typing import NDArray

from tailbound.compute.samples import Floats
from tailbound.compute.search import PrefixTimes

F64 = NDArray[np.float64]


class FinishingTimes(PrefixTimes):
    """The same questions as to PrefixTimes, other answers: kept is what has started."""

    def __init__(self, latency_s_SWM: Floats, comm_s_S: F64) -> None:
        """See PrefixTimes."""
        super().__init__(latency_s_SWM, comm_s_S)
        shape_SP = self.sorted_s_SP.shape
        order_SP = np.argsort(self.mark_s_SWM.reshape(shape_SP), axis=1)
        ends_s_SP = np.take_along_axis(
            self.prefix_s_SWM.reshape(shape_SP), order_SP, axis=1
        )
        self._last_end_s_SP = np.maximum.accumulate(ends_s_SP, axis=1)
        """When the first p micro-batches of a step, by start, have ended."""

    def best_above(self, least_s: float) -> tuple[float, float]:
        """Best threshold of all that are above a time; see PrefixTimes.

        All thresholds from one start to the next do the same. The one in the middle is
        returned, so that times that are a little off do not change what is kept.
        """
        comm_s_S1 = self.comm_s_S[:, np.newaxis]
        step_s_SP = self._last_end_s_SP + comm_s_S1
        # A step of no time has only begun: more of it starts at 0 s too.
        worth_SP = np.divide(
            self.longest_s_S[:, np.newaxis] + comm_s_S1,
            step_s_SP,
            out=np.zeros_like(step_s_SP),
            where=step_s_SP > 0.0,
        )
        worth_SP *= np.arange(1, worth_SP.shape[1] + 1)
        gain_SP = np.diff(worth_SP, axis=1, prepend=0.0)
        # Stable: ranks on other processors must add up in the same order.
        order = np.argsort(self.sorted_s_SP, axis=None, kind="stable")
        speedup_X = np.cumsum(gain_SP.ravel()[order]) / self.sorted_s.size
        # After the last of equal starts; after the very last nothing is dropped.
        width_s_X = np.diff(self.sorted_s)
        is_one_X = (width_s_X > 0.0) & (self.sorted_s[:-1] >= least_s)
        if not is_one_X.any():
            return np.inf, 1.0
        best = int(np.where(is_one_X, speedup_X[:-1], 0.0).argmax())
        threshold_s = float(self.sorted_s[best] + width_s_X[best] / 2.0)
        return threshold_s, float(self.speedup(np.array([threshold_s]))[0])

    def _marks_s_SWM(self) -> F64:
        """When each micro-batch starts."""
        starts_s_SWM = np.zeros_like(self.prefix_s_SWM)
        starts_s_SWM[:, :, 1:] = self.prefix_s_SWM[:, :, :-1]
        return starts_s_SWM

    def _ends_s_BK(self, steps: slice, threshold_s_K: F64) -> F64:
        """See PrefixTimes: all that have started come to their end."""
        last_BK = self._kept_BK(steps, threshold_s_K) - 1
        ends_s_BK: F64 = np.take_along_axis(self._last_end_s_SP[steps], last_BK, axis=1)
        return ends_s_BK
