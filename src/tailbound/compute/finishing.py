"""Prefix times where a micro-batch that runs at the threshold is finished.

That is how a step is cut between micro-batches: one may start before the threshold and
end after it. It counts as kept, and the step lasts until the last of those ends.
"""

import numpy as np
from numpy.typing import NDArray

from tailbound.compute.search import PrefixTimes

F64 = NDArray[np.float64]

GRID = 300
"""Thresholds that are tried. Each costs a look at every worker of every step, and the
speedup is flat around its best."""


class FinishingTimes(PrefixTimes):
    """The same questions as to PrefixTimes, other answers; the search is on a grid."""

    def speedup(self, cut_s_K: F64, kept_s_K: F64 | None = None) -> F64:
        """See PrefixTimes."""
        ends_s_SK = self._ends_s_SK(cut_s_K)
        gain_SK = (self.longest_s_S + self.comm_s_S)[:, None] / (
            ends_s_SK + self.comm_s_S[:, None]
        )
        kept_SK = np.stack(
            [1.0 - self._dropped_K(step, cut_s_K) for step in self.steps]
        )
        mean_K: F64 = (gain_SK * kept_SK).mean(axis=0)
        return mean_K

    @property
    def steps(self) -> range:
        """Numbers of the steps."""
        return range(len(self.prefix_s_SWM))

    def dropped_share(self, threshold_s_K: F64) -> F64:
        """See PrefixTimes."""
        shares = [self._dropped_K(step, threshold_s_K) for step in self.steps]
        mean_K: F64 = np.mean(shares, axis=0)
        return mean_K

    def dropped_share_W(self, threshold_s: float) -> F64:
        """See PrefixTimes."""
        starts_s_SWM = self.prefix_s_SWM[:, :, :-1]
        dropped_W = np.count_nonzero(starts_s_SWM >= threshold_s, axis=(0, 2))
        share_W: F64 = dropped_W / self.prefix_s_SWM[:, 0].size
        return share_W

    def step_s(self, threshold_s: float) -> float:
        """See PrefixTimes."""
        ends_s_S = self._ends_s_SK(np.array([threshold_s]))[:, 0]
        return float(np.mean(ends_s_S + self.comm_s_S))

    def least_for_everyone(self) -> float:
        """See PrefixTimes; every worker finishes what it starts, so the first one."""
        return 0.0

    def least_for_drop(self, max_drop: float) -> float:
        """See PrefixTimes; the first micro-batch of each worker is never dropped."""
        starts_s = np.sort(self.prefix_s_SWM[:, :, :-1], axis=None)
        num_dropped = int(max_drop * self.prefix_s_SWM.size)
        left = starts_s.size - num_dropped
        return float(starts_s[left - 1]) if left > 0 else 0.0

    def best_above(self, least_s: float) -> tuple[float, float]:
        """See PrefixTimes; of a grid of thresholds, the least among them."""
        first = np.searchsorted(self.sorted_s, max(least_s, np.nextafter(0.0, 1.0)))
        pool_s = self.sorted_s[first:]
        if not pool_s.size:
            return np.inf, 1.0
        ranks = np.unique(np.linspace(0, pool_s.size - 1, GRID).astype(np.int64))
        threshold_s_K = np.nextafter(pool_s[ranks], np.inf)
        speedup_K = self.speedup(threshold_s_K)
        best = int(speedup_K.argmax())
        return float(threshold_s_K[best]), float(speedup_K[best])

    def _dropped_K(self, step: int, threshold_s_K: F64) -> F64:
        """Share of a step's micro-batches that did not start before each threshold."""
        prefix_s_WM = self.prefix_s_SWM[step]
        starts_s = np.sort(prefix_s_WM[:, :-1], axis=None)
        late_K = starts_s.size - np.searchsorted(starts_s, threshold_s_K)
        share_K: F64 = late_K / prefix_s_WM.size
        return share_K

    def _ends_s_SK(self, threshold_s_K: F64) -> F64:
        """When the last worker of each step ends under each threshold."""
        ends_s_SK = np.empty((len(self.prefix_s_SWM), len(threshold_s_K)))
        for prefix_s_WM, end_s_K in zip(self.prefix_s_SWM, ends_s_SK, strict=True):
            end_s_K[:] = 0.0
            for prefix_s_M in prefix_s_WM:
                runs_K = np.searchsorted(prefix_s_M, threshold_s_K)
                last_K = np.minimum(runs_K, len(prefix_s_M) - 1)
                np.maximum(end_s_K, prefix_s_M[last_K], out=end_s_K)
        return ends_s_SK
