"""Latencies of a simulated job: a micro-batch's compute, its noise, and stragglers.

Drawn block by block, so that a job of any size fits into memory. What is drawn depends
on the seed and the job, not on how it is cut into blocks.

Source: DropCompute, appendix:runtime_performace, app:local_sgd; spec C5.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailbound.compute.checks import (
    check_not_negative,
    check_positive,
    check_share,
)
from tailbound.compute.noise import Noise
from tailbound.config import require

F64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Stragglers:
    """Workers that now and then wait before they go on, on top of the noise.

    Source: app:local_sgd: 32 workers, 4 % chance in each local step, 1 s.
    """

    chance: float = 0.04
    """That such a worker waits in a micro-batch (or local step), in [0, 1]."""
    delay_s: float = 1.0
    """How long, in seconds, >= 0."""
    num_workers: int | None = None
    """Only the first so many workers are such; None: all."""

    def __post_init__(self) -> None:
        check_share("chance", self.chance)
        check_not_negative("delay_s", self.delay_s)
        require(
            self.num_workers is None or self.num_workers >= 1,
            f"num_workers is 1 or more, not {self.num_workers}",
        )


STRAGGLERS = {
    "uniform": Stragglers(),
    "one_server": Stragglers(chance=0.04 * 32 / 8, num_workers=8),
}
"""The paper's two scenarios. Of its 32 workers 1.28 wait in a local step on average;
all on one server of 8 workers, that is a chance of 16 % for each of them."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What a micro-batch takes: base and noise, 0 if that is negative, and waits."""

    noise: Noise
    base_s: float
    """Without noise, in seconds, > 0."""
    stragglers: Stragglers | None = None

    def __post_init__(self) -> None:
        check_positive("base_s", self.base_s)


class LatencyStream:
    """The latencies of one job, in the order step, worker, micro-batch."""

    def __init__(
        self, workload: Workload, num_micro_batches: int, seed: np.random.SeedSequence
    ) -> None:
        self.workload = workload
        self.num_micro_batches = num_micro_batches
        # A generator for each, so that each is consumed in one order for any block.
        self.noise_rng, self.straggler_rng = map(np.random.default_rng, seed.spawn(2))

    def draw(self, num_steps: int, num_workers: int, *, first_worker: int = 0) -> F64:
        """Draw what comes next.

        Args:
            num_steps: more than 1 only for all workers of the job at once.
            num_workers: how many workers of the job.
            first_worker: the first of them, from 0.

        Returns:
            latency_s_SWM, in seconds.
        """
        workload, stragglers = self.workload, self.workload.stragglers
        size = (num_steps, num_workers, self.num_micro_batches)
        latency_s_SWM = workload.noise.sample(self.noise_rng, size)
        latency_s_SWM += workload.base_s
        np.maximum(latency_s_SWM, 0.0, out=latency_s_SWM)
        if stragglers is not None:
            slow = num_workers
            if stragglers.num_workers is not None:
                slow = min(max(stragglers.num_workers - first_worker, 0), num_workers)
            size = (num_steps, slow, self.num_micro_batches)
            waits_SWM = self.straggler_rng.random(size) < stragglers.chance
            latency_s_SWM[:, :slow] += np.multiply(waits_SWM, stragglers.delay_s)
        return latency_s_SWM
