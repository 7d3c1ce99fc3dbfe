"""Effective speedup of many thresholds over a simulated cluster, in bounded memory.

Latencies are drawn, counted and forgotten block by block; what stays are sums per
threshold. The thresholds are chosen beforehand from a small pilot sample: those that
keep given shares of it.

Source: DropCompute, Algorithm 2 (appendix:auto_threshold); spec C3, C5.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tailbound.compute.latencies import LatencyStream, Workload

F64 = NDArray[np.float64]

BLOCK_SAMPLES = 1 << 18
"""Micro-batches in memory at once: 2 MiB, so that a block stays in the cache."""
PILOT_SAMPLES = 200_000
"""Micro-batches that thresholds are chosen from: shares are met within 0.1 points."""
JUST_ABOVE = 1.0 + 1e-9
"""A threshold stands this factor above a prefix time, which it is to keep: more than
sums of the same numbers in another order differ."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A synchronous cluster to simulate."""

    workload: Workload
    num_workers: int
    num_micro_batches: int
    comm_s: float
    """Communication time of each step, in seconds."""
    seed: int
    """With the two numbers above it decides what is drawn."""

    def streams(self) -> tuple[LatencyStream, LatencyStream]:
        """Latencies of the cluster, and others of a pilot sample."""
        entropy = (self.seed, self.num_workers, self.num_micro_batches)
        cluster, pilot = (
            LatencyStream(self.workload, self.num_micro_batches, seed)
            for seed in np.random.SeedSequence(entropy).spawn(2)
        )
        return cluster, pilot


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a simulated cluster takes without a threshold and with each."""

    step_s: float
    """E[T]: mean over steps of the slowest worker's compute time."""
    mean_s: float
    """Mean latency of all micro-batches."""
    std_s: float
    """Their standard deviation."""
    threshold_s_K: F64
    speedup_K: F64
    """S_eff: mean over steps of (T + T_c) / (min(tau, T) + T_c) * M~ / M."""
    dropped_share_K: F64
    bounded_step_s_K: F64
    """Mean over steps of min(tau, T)."""


def pilot_thresholds(cluster: Cluster, dropped_share_K: ArrayLike) -> F64:
    """Choose thresholds that drop given shares, by a sample of the cluster.

    Args:
        cluster: whose latencies the sample is like.
        dropped_share_K: shares in [0, 1).

    Returns:
        Seconds above 0, rising, each once; just above a prefix time of the sample.
    """
    workers = min(
        cluster.num_workers, max(1, PILOT_SAMPLES // cluster.num_micro_batches)
    )
    steps = max(1, PILOT_SAMPLES // (workers * cluster.num_micro_batches))
    _, pilot = cluster.streams()
    prefix_s = np.cumsum(pilot.draw(steps, workers), axis=2).ravel()
    kept_share_K = 1.0 - np.asarray(dropped_share_K)
    threshold_s_K = np.unique(np.quantile(prefix_s, kept_share_K, method="higher"))
    return threshold_s_K[threshold_s_K > 0.0] * JUST_ABOVE


def evaluate(
    cluster: Cluster,
    threshold_s_K: F64,
    *,
    num_steps: int,
    block_samples: int = BLOCK_SAMPLES,
) -> Evaluation:
    """Simulate a cluster and evaluate all thresholds on the same steps.

    Args:
        cluster: what to simulate.
        threshold_s_K: seconds of compute, above 0, rising; a threshold counts the
            prefix times below it (strictly).
        num_steps: how many, >= 1.
        block_samples: micro-batches in memory at once, where a worker has no more.
            Results are the same for any number, up to the rounding of sums.

    Returns:
        Means over the steps.
    """
    workers, micro_batches = cluster.num_workers, cluster.num_micro_batches
    per_step = workers * micro_batches
    worker_block = min(workers, max(1, block_samples // micro_batches))
    step_block = max(1, block_samples // (per_step + len(threshold_s_K)))
    stream, _ = cluster.streams()
    slowest_sum = latency_sum = square_sum = 0.0
    speedup_sum_K, finished_sum_K, bounded_sum_K = np.zeros((3, len(threshold_s_K)))
    for first_step in range(0, num_steps, step_block):
        steps = min(step_block, num_steps - first_step)
        slowest_s_S1 = np.zeros((steps, 1))
        finished_SK = np.zeros((steps, len(threshold_s_K)))
        for first in range(0, workers, worker_block):
            latency_s_SWM = stream.draw(
                steps, min(worker_block, workers - first), first_worker=first
            )
            latency_sum += float(latency_s_SWM.sum())
            square_sum += float(np.vdot(latency_s_SWM, latency_s_SWM))
            prefix_s_SWM = np.cumsum(latency_s_SWM, axis=2, out=latency_s_SWM)
            time_s_S1 = prefix_s_SWM[:, :, -1].max(axis=1, keepdims=True)
            np.maximum(slowest_s_S1, time_s_S1, out=slowest_s_S1)
            prefix_s_SP = prefix_s_SWM.reshape(steps, -1)
            prefix_s_SP.sort(axis=1)
            for prefix_s_P, finished_K in zip(prefix_s_SP, finished_SK, strict=True):
                finished_K += np.searchsorted(prefix_s_P, threshold_s_K)
        bounded_s_SK = np.minimum(threshold_s_K, slowest_s_S1)
        cut_s_SK = bounded_s_SK + cluster.comm_s
        faster_SK = np.ones_like(cut_s_SK)  # a step of 0 s cannot be cut
        np.divide(
            slowest_s_S1 + cluster.comm_s, cut_s_SK, faster_SK, where=cut_s_SK > 0.0
        )
        speedup_sum_K += (faster_SK * finished_SK).sum(axis=0) / per_step
        slowest_sum += float(slowest_s_S1.sum())
        finished_sum_K += finished_SK.sum(axis=0)
        bounded_sum_K += bounded_s_SK.sum(axis=0)
    num_samples = num_steps * per_step
    mean_s = latency_sum / num_samples
    return Evaluation(
        step_s=slowest_sum / num_steps,
        mean_s=mean_s,
        std_s=float(np.sqrt(max(0.0, square_sum / num_samples - mean_s**2))),
        threshold_s_K=threshold_s_K,
        speedup_K=speedup_sum_K / num_steps,
        dropped_share_K=1.0 - finished_sum_K / num_samples,
        bounded_step_s_K=bounded_sum_K / num_steps,
    )
