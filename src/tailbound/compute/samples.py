"""The array of latencies that everything here starts from, and its missing values.

``latency_s_SWM``: seconds that a worker computed on a micro-batch, by step, worker and
micro-batch; time spent waiting for peers is not in it. NaN stands where a micro-batch
was planned and not finished, because a threshold cut the step.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tailbound.errors import ConfigError, ShapeError

Floats = NDArray[np.floating[Any]]


def check_samples(latency_s_SWM: ArrayLike) -> Floats:
    """Give the latencies back as a float array, or say what is wrong with them.

    Args:
        latency_s_SWM: seconds per step, worker and micro-batch, 0 or more; NaN where
            a micro-batch is missing.

    Returns:
        The same array if it is float32 or float64, else a float64 copy.

    Raises:
        ShapeError: not three axes, or one of them is empty.
        ConfigError: a time is negative or infinite; names the first such place.
    """
    samples_SWM = np.asarray(latency_s_SWM)
    if samples_SWM.dtype not in (np.float32, np.float64):
        samples_SWM = samples_SWM.astype(np.float64)
    if samples_SWM.ndim != 3 or samples_SWM.size == 0:
        raise ShapeError(
            "latencies are (steps, workers, micro-batches), one or more of each, not "
            f"{samples_SWM.shape}"
        )
    # fmin and fmax pass over NaN, and make no temporary as large as the array.
    least = np.fmin.reduce(samples_SWM, axis=None)
    most = np.fmax.reduce(samples_SWM, axis=None)
    if least < 0.0 or most == np.inf:
        step, worker, micro_batch = np.argwhere(
            (samples_SWM < 0.0) | np.isinf(samples_SWM)
        )[0]
        raise ConfigError(
            f"step {step}, worker {worker}, micro-batch {micro_batch}: a time is 0 or "
            f"more seconds, not {samples_SWM[step, worker, micro_batch]}; remove the "
            "step, or write NaN for a micro-batch that was not finished"
        )
    return samples_SWM


def impute(latency_s_SWM: ArrayLike) -> tuple[Floats, float]:
    """Fill in what is missing with values that the same worker showed elsewhere.

    A missing value takes the observed one of the same worker and micro-batch in the
    nearest other step (the earlier of two); if that micro-batch was never finished,
    the worker's observed values in order, again from the start when they are used
    up. Nothing is drawn, so that every rank fills in the same.

    What this is worth depends on how the step was cut. With
    ``preempt="micro_batch"`` a micro-batch that started was finished and timed, so
    what is missing never started: where the cut fell says nothing about it, and the
    filled values are unbiased as long as a worker's latency depends neither on the
    micro-batch's place in the step nor on how slow that step already was. (Where a
    whole step is slow, it is cut earlier and filled from faster ones: its time is
    understated.) With ``preempt="backward"`` one more micro-batch was left in the
    middle. It is censored: it took at least what it had run, long ones are left more
    often than short ones, and its filled value is understated.

    Args:
        latency_s_SWM: as for :func:`check_samples`.

    Returns:
        The filled array (the same array if nothing is missing), and the share of
        values that were filled in.

    Raises:
        ShapeError, ConfigError: as for :func:`check_samples`; or a worker has not one
            value.
    """
    samples_SWM = check_samples(latency_s_SWM)
    missing_SWM = np.isnan(samples_SWM)
    num_missing = int(np.count_nonzero(missing_SWM))
    if num_missing == 0:
        return samples_SWM, 0.0
    filled_SWM = samples_SWM.copy()
    for worker in np.flatnonzero(missing_SWM.any(axis=(0, 2))):
        filled_SWM[:, worker] = _fill(filled_SWM[:, worker], int(worker))
    return filled_SWM, num_missing / samples_SWM.size


def _fill(samples_SM: Floats, worker: int) -> Floats:
    observed_SM = ~np.isnan(samples_SM)
    observed_s = samples_SM[observed_SM]
    if observed_s.size == 0:
        raise ConfigError(
            f"worker {worker} finished no micro-batch in any step; leave it out, or "
            "record steps without a threshold"
        )
    filled_SM = np.take_along_axis(samples_SM, _nearest_step(observed_SM), axis=0)
    still_missing_SM = np.isnan(filled_SM)
    filled_SM[still_missing_SM] = np.resize(
        observed_s, np.count_nonzero(still_missing_SM)
    )
    return filled_SM


def _nearest_step(observed_SM: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Per place, the nearest step with an observed value; itself if it has one."""
    num_steps = len(observed_SM)
    step_S1 = np.arange(num_steps)[:, np.newaxis]
    # Where no step is observed on a side, one so far away that the other is nearer.
    before_SM = np.maximum.accumulate(
        np.where(observed_SM, step_S1, -num_steps), axis=0
    )
    after_SM = np.minimum.accumulate(
        np.where(observed_SM, step_S1, 2 * num_steps)[::-1], axis=0
    )[::-1]
    nearest_SM = np.where(
        step_S1 - before_SM <= after_SM - step_S1, before_SM, after_SM
    )
    return np.clip(nearest_SM, 0, num_steps - 1)
