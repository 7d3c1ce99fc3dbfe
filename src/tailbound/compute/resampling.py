"""What a trace would look like with another number of workers or micro-batches.

What is recorded stays; what is added is drawn from it. So a slow worker stays slow and
a heavy tail heavy, but what is added is independent of the rest of its step: what makes
all workers slow in the same step, such as a shared disk, is not in it.
Source: DropCompute, figure speedup; spec C9.
"""

import numpy as np

from tailbound.compute.samples import Floats

NEAR_STEPS = 10
"""Steps away from which a new worker's step is drawn at most: a drift of the whole job
must not look like a tail. Predicting a real trace from half of its workers, this was
within 2 % where draws from all steps were off by up to 7 %."""


def with_workers(
    latency_s_SWM: Floats, num_workers: int, rng: np.random.Generator
) -> Floats:
    """Take some of the workers away, or add some.

    Fewer: a random choice of them, without change. More: each new worker is one of
    the trace's, with whole steps drawn from that worker's steps nearby.

    Args:
        latency_s_SWM: seconds per step, worker and micro-batch; steps in order.
        num_workers: 1 or more.
        rng: draws.

    Returns:
        Latencies of so many workers; the same array if nothing changes.
    """
    num_steps, had, _ = latency_s_SWM.shape
    if num_workers == had:
        return latency_s_SWM
    if num_workers < had:
        kept_W = np.sort(rng.choice(had, num_workers, replace=False))
        return latency_s_SWM[:, kept_W]
    worker_W = rng.integers(had, size=num_workers - had)
    step_S1 = np.arange(num_steps)[:, np.newaxis]
    step_SW = rng.integers(
        np.maximum(step_S1 - NEAR_STEPS, 0),
        np.minimum(step_S1 + NEAR_STEPS + 1, num_steps),
        size=(num_steps, num_workers - had),
    )
    return np.concatenate((latency_s_SWM, latency_s_SWM[step_SW, worker_W]), axis=1)


def with_micro_batches(
    latency_s_SWM: Floats, num_micro_batches: int, rng: np.random.Generator
) -> Floats:
    """Take some of the micro-batches of each worker's step away, or add some.

    Fewer: a random choice in each step. More: drawn from the same worker's step.

    Args:
        latency_s_SWM: seconds per step, worker and micro-batch.
        num_micro_batches: 1 or more.
        rng: draws.

    Returns:
        Latencies of so many micro-batches; the same array if nothing changes.
    """
    had = latency_s_SWM.shape[2]
    if num_micro_batches == had:
        return latency_s_SWM
    if num_micro_batches < had:
        shuffled_SWM = rng.permuted(latency_s_SWM, axis=2)
        return shuffled_SWM[:, :, :num_micro_batches]
    added = (*latency_s_SWM.shape[:2], num_micro_batches - had)
    pick_SWM = rng.integers(had, size=added)
    extra_SWM = np.take_along_axis(latency_s_SWM, pick_SWM, axis=2)
    return np.concatenate((latency_s_SWM, extra_SWM), axis=2)
