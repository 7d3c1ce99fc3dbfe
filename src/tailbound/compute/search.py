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

# Thresholds times steps in one round of the search. A round then takes a few hundredths
# of a second, and 13 million samples are searched in about four of them.
EVALUATIONS = 400_000
# With very many steps the share above would be too few thresholds to rule much out.
MIN_POINTS = 64


class PrefixTimes:
    """The prefix times of a window of steps, and the speedup of any threshold.

    Letters: S steps, W workers, M micro-batches, P = W * M, K thresholds.
    """

    def __init__(self, latency_s_SWM: Floats, comm_s_S: F64) -> None:
        """Add up and sort.

        Args:
            latency_s_SWM: seconds of each micro-batch; nothing missing.
            comm_s_S: seconds of communication in each step.

        Raises:
            ConfigError: a step took no time at all.
        """
        num_steps, _, self.num_micro_batches = latency_s_SWM.shape
        self.prefix_s_SWM = np.cumsum(latency_s_SWM, axis=2, dtype=np.float64)
        self.sorted_s_SP = np.sort(self.prefix_s_SWM.reshape(num_steps, -1), axis=1)
        self.sorted_s = np.sort(self.prefix_s_SWM, axis=None)
        self.comm_s_S = comm_s_S
        empty_S = self.longest_s_S + comm_s_S == 0.0
        if empty_S.any():
            raise ConfigError(
                f"step {np.argmax(empty_S)} took no time at all, neither compute nor "
                "communication; remove it"
            )

    @property
    def time_s_SW(self) -> F64:
        """Compute time of each worker in each step (T_i,n)."""
        return self.prefix_s_SWM[:, :, -1]

    @property
    def longest_s_S(self) -> F64:
        """Compute time of the slowest worker of each step (T_i)."""
        return self.sorted_s_SP[:, -1]

    def speedup(self, cut_s_K: F64, kept_s_K: F64 | None = None) -> F64:
        """Effective speedup of thresholds.

        Args:
            cut_s_K: thresholds, more than 0.
            kept_s_K: count the micro-batches that these thresholds keep instead; not
                below cut_s_K, it bounds the speedup of all thresholds in between.

        Returns:
            S_eff of each.

        Source: DropCompute, algorithm:optimal_threshold; spec C3.
        """
        total_K = np.zeros(len(cut_s_K))
        kept_s_K = cut_s_K if kept_s_K is None else kept_s_K
        for prefix_s_P, longest_s, comm_s in zip(
            self.sorted_s_SP, self.longest_s_S, self.comm_s_S, strict=True
        ):
            kept_K = np.searchsorted(prefix_s_P, kept_s_K)
            total_K += (
                (longest_s + comm_s)
                / (np.minimum(cut_s_K, longest_s) + comm_s)
                * kept_K
            )
        return total_K / self.sorted_s.size

    def dropped_share(self, threshold_s_K: F64) -> F64:
        """Share of the micro-batches that each threshold drops."""
        num_kept_K = np.searchsorted(self.sorted_s, threshold_s_K)
        return (self.sorted_s.size - num_kept_K) / self.sorted_s.size

    def dropped_share_W(self, threshold_s: float) -> F64:
        """Share of its micro-batches that each worker drops under one threshold."""
        dropped_W = np.count_nonzero(self.prefix_s_SWM >= threshold_s, axis=(0, 2))
        share_W: F64 = dropped_W / self.prefix_s_SWM[:, 0].size
        return share_W

    def step_s(self, threshold_s: float) -> float:
        """Mean time of a step, communication included."""
        return float(np.mean(np.minimum(self.longest_s_S, threshold_s) + self.comm_s_S))

    def least_for_everyone(self) -> float:
        """Time above which each worker finishes one micro-batch per step on average."""
        num_steps, num_workers, _ = self.prefix_s_SWM.shape
        return max(
            float(
                np.partition(self.prefix_s_SWM[:, worker], num_steps - 1, None)[
                    num_steps - 1
                ]
            )
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
        max_points = max(MIN_POINTS, EVALUATIONS // len(self.comm_s_S))
        while pool_s.size:
            stride = -(-pool_s.size // max_points)
            picks = np.append(np.arange(0, pool_s.size - 1, stride), pool_s.size - 1)
            threshold_s_K = np.nextafter(pool_s[picks], np.inf)
            speedup_K = self.speedup(threshold_s_K)
            if speedup_K.max() > best_speedup:
                best_s = float(threshold_s_K[speedup_K.argmax()])
                best_speedup = float(speedup_K.max())
            bound_K = self.speedup(threshold_s_K[:-1], threshold_s_K[1:])
            open_ = np.repeat(bound_K > best_speedup, np.diff(picks))
            open_[picks[:-1]] = False  # evaluated: every round leaves fewer
            pool_s = pool_s[:-1][open_]
        return best_s, best_speedup
