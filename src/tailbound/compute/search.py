"""Find the best of all thresholds, without trying each: sort, bound, look closer.

A prefix time is the compute time after which a worker has finished one more of its
micro-batches in a step. The effective speedup falls between two neighbouring prefix
times and jumps just above each, so its supremum lies just above one of them: the
candidates are ``nextafter(prefix time, inf)``, as many as there are samples.

For thresholds a < b no candidate in between can be better than a step that is cut at a
and yet keeps what b keeps. So a few candidates are evaluated, the intervals between
them that this bound rules out are left out, and the rest is looked at more closely.
"""

import numpy as np
from numpy.typing import NDArray

from tailbound.compute.samples import Floats
from tailbound.errors import ConfigError

F64 = NDArray[np.float64]

EVALUATIONS = 400_000
"""Thresholds times steps in the search's first round: some hundredths of a second."""
MIN_POINTS = 64
"""Thresholds in the first round of a search through very many steps."""
MAX_SIFTED = 4_000_000
"""Micro-batches that are sifted one by one: more would take 250 MB beside the array."""
BLOCK = 65_536
"""Thresholds times steps that are worked on at once: they stay in the cache."""


class PrefixTimes:
    """The prefix times of a window of steps, and the speedup of any threshold.

    Letters: S steps, W workers, M micro-batches, P = W * M, K thresholds, B steps of a
    block.
    """

    def __init__(self, latency_s_SWM: Floats, comm_s_S: F64) -> None:
        """Add up and sort.

        Args:
            latency_s_SWM: seconds of each micro-batch; nothing missing.
            comm_s_S: seconds of communication in each step.

        Raises:
            ConfigError: a step took no time at all.
        """
        self.prefix_s_SWM = np.cumsum(latency_s_SWM, axis=2, dtype=np.float64)
        self.comm_s_S = comm_s_S
        self.longest_s_S: F64 = self.time_s_SW.max(axis=1)
        """Compute time of the slowest worker of each step (T_i)."""
        empty_S = self.longest_s_S + comm_s_S == 0.0
        if empty_S.any():
            raise ConfigError(
                f"step {np.argmax(empty_S)} took no time at all, neither compute nor "
                "communication; remove it"
            )
        self.mark_s_SWM = self._marks_s_SWM()
        """A micro-batch is kept by thresholds above this time."""
        self.sorted_s_SP = np.sort(
            self.mark_s_SWM.reshape(len(self.mark_s_SWM), -1), axis=1
        )
        self.sorted_s = np.sort(self.mark_s_SWM, axis=None)

    @property
    def time_s_SW(self) -> F64:
        """Compute time of each worker in each step (T_i,n)."""
        return self.prefix_s_SWM[:, :, -1]

    def speedup(self, cut_s_K: F64, kept_s_K: F64 | None = None) -> F64:
        """Effective speedup of thresholds.

        Args:
            cut_s_K: thresholds, more than 0.
            kept_s_K: count the micro-batches that these thresholds keep instead. If
                they are not below cut_s_K, that bounds the speedup of all in between.

        Returns:
            S_eff of each.

        Source: DropCompute, algorithm:optimal_threshold; spec C3.
        """
        kept_s_K = cut_s_K if kept_s_K is None else kept_s_K
        num_steps = len(self.comm_s_S)
        total_K = np.zeros(len(cut_s_K))
        block = max(1, BLOCK // max(1, len(cut_s_K)))
        for first in range(0, num_steps, block):
            steps = slice(first, first + block)
            comm_s_B1 = self.comm_s_S[steps, np.newaxis]
            whole_s_B1 = self.longest_s_S[steps, np.newaxis] + comm_s_B1
            cut_s_BK = self._ends_s_BK(steps, cut_s_K) + comm_s_B1
            total_K += (whole_s_B1 / cut_s_BK * self._kept_BK(steps, kept_s_K)).sum(
                axis=0
            )
        return total_K / self.sorted_s.size

    def dropped_share(self, threshold_s_K: F64) -> F64:
        """Share of the micro-batches that each threshold drops."""
        num_kept_K = np.searchsorted(self.sorted_s, threshold_s_K)
        return (self.sorted_s.size - num_kept_K) / self.sorted_s.size

    def dropped_share_W(self, threshold_s: float) -> F64:
        """Share of its micro-batches that each worker drops under one threshold."""
        dropped_W = np.count_nonzero(self.mark_s_SWM >= threshold_s, axis=(0, 2))
        share_W: F64 = dropped_W / self.mark_s_SWM[:, 0].size
        return share_W

    def step_s(self, threshold_s: float) -> float:
        """Mean time of a step, communication included."""
        ends_s_S1 = self._ends_s_BK(slice(None), np.array([threshold_s]))
        return float(np.mean(ends_s_S1[:, 0] + self.comm_s_S))

    def least_for_everyone(self) -> float:
        """Time above which each worker keeps one micro-batch per step on average."""
        num_steps, num_workers, _ = self.mark_s_SWM.shape
        nth = num_steps - 1
        return max(
            float(np.partition(self.mark_s_SWM[:, worker], nth, axis=None)[nth])
            for worker in range(num_workers)
        )

    def least_for_drop(self, max_drop: float) -> float:
        """Time above which no more than this share of the micro-batches is dropped."""
        num_kept = self.sorted_s.size - int(max_drop * self.sorted_s.size)
        return float(self.sorted_s[num_kept - 1]) if num_kept > 0 else 0.0

    def best_above(self, least_s: float) -> tuple[float, float]:
        """Best threshold of all that are above a time.

        Args:
            least_s: at most the longest prefix time.

        Returns:
            The threshold and its speedup.
        """
        # A threshold is a positive number of seconds, so 0 s is no candidate.
        first = np.searchsorted(self.sorted_s, max(least_s, np.nextafter(0.0, 1.0)))
        pool_s = self.sorted_s[first:]
        best_s, best_speedup = np.inf, 0.0
        num_points = max(MIN_POINTS, EVALUATIONS // len(self.comm_s_S))
        while pool_s.size:
            stride = -(-pool_s.size // num_points)
            picks = np.append(np.arange(0, pool_s.size - 1, stride), pool_s.size - 1)
            threshold_s_K = np.nextafter(pool_s[picks], np.inf)
            speedup_K = self.speedup(threshold_s_K)
            if speedup_K.max() > best_speedup:
                best_s = float(threshold_s_K[speedup_K.argmax()])
                best_speedup = float(speedup_K.max())
            if stride == 1:
                break
            bound_K = self.speedup(threshold_s_K[:-1], threshold_s_K[1:])
            open_ = np.repeat(bound_K > best_speedup, np.diff(picks))
            pool_s = pool_s[:-1][open_]
            between = np.searchsorted(self.sorted_s, threshold_s_K[[0, -1]])
            if between[1] - between[0] <= MAX_SIFTED:
                pool_s = self._sift(pool_s, threshold_s_K, speedup_K, best_speedup)
            num_points *= 2
        return best_s, best_speedup

    def _marks_s_SWM(self) -> F64:
        return self.prefix_s_SWM

    def _kept_BK(self, steps: slice, threshold_s_K: F64) -> NDArray[np.intp]:
        """Micro-batches of each step that each threshold keeps."""
        return np.stack(
            [
                np.searchsorted(mark_s_P, threshold_s_K)
                for mark_s_P in self.sorted_s_SP[steps]
            ]
        )

    def _ends_s_BK(self, steps: slice, threshold_s_K: F64) -> F64:
        """Compute time of each step under each threshold."""
        ends_s_BK: F64 = np.minimum(threshold_s_K, self.longest_s_S[steps, np.newaxis])
        return ends_s_BK

    def _sift(
        self, pool_s: F64, threshold_s_K: F64, speedup_K: F64, best_speedup: float
    ) -> F64:
        """Those of a pool of prefix times that the bound by single samples leaves in.

        From one evaluated threshold to the next, what the first one keeps loses value
        as steps grow longer: a convex function, so at most the straight line between
        its ends. Each micro-batch that is kept in addition is worth at most what it
        would be worth in a step that is cut at the first. With n evaluated thresholds
        this is too much by the order of 1 / n**2, and not 1 / n as the bound that
        knows no order, which takes a long time where there are many steps.
        """
        # In the search's words: just above each pool time, between two thresholds.
        pool_s = np.unique(pool_s[pool_s >= threshold_s_K[0]])
        last_K = self.speedup(threshold_s_K[1:], threshold_s_K[:-1])
        time_s_X, step_X = self._between(threshold_s_K[0], threshold_s_K[-1])
        since_X = np.searchsorted(threshold_s_K, time_s_X, side="right") - 1
        cut_s_X = np.minimum(threshold_s_K[since_X], self.longest_s_S[step_X])
        whole_s_S = self.longest_s_S + self.comm_s_S
        gain_X = whole_s_S[step_X] / (cut_s_X + self.comm_s_S[step_X])
        gained = np.append(0.0, np.cumsum(gain_X / self.sorted_s.size))

        since = np.searchsorted(threshold_s_K, pool_s, side="right") - 1
        first_s, width_s = threshold_s_K[since], np.diff(threshold_s_K)[since]
        way = (np.nextafter(pool_s, np.inf) - first_s) / width_s
        bound = (
            speedup_K[since] * (1.0 - way)
            + last_K[since] * way
            + gained[np.searchsorted(time_s_X, pool_s, side="right")]
            - gained[np.searchsorted(time_s_X, first_s)]
        )
        # Less than rounding in a sum of MAX_SIFTED terms must not rule out the best.
        left_s: F64 = pool_s[bound > best_speedup * (1.0 - 1e-9)]
        return left_s

    def _between(self, first_s: float, stop_s: float) -> tuple[F64, NDArray[np.intp]]:
        """Prefix times in [first_s, stop_s), ascending, and the step of each."""
        rows = [
            row_P[slice(*np.searchsorted(row_P, (first_s, stop_s)))]
            for row_P in self.sorted_s_SP
        ]
        time_s = np.concatenate(rows)
        step = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        order = np.argsort(time_s, kind="stable")
        return time_s[order], step[order]
