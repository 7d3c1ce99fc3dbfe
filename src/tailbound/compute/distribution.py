"""How the time of a step is distributed, given how each worker's time is.

A step takes as long as its slowest worker, T = max T_n. Workers are independent.

Source: DropCompute, section analysis_iteration_time; spec C4.
"""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

F64 = NDArray[np.float64]

LARGEST_Z = 8.0
"""A standard normal exceeds this with a chance of 6e-16."""


def step_cdf(cdf_WX: ArrayLike) -> F64:
    """Distribution of the step time T for workers that may differ: prod F_n(x).

    Args:
        cdf_WX: each worker's distribution of T_n at some times x, in [0, 1]; workers
            are independent. See :func:`normal_cdf`.

    Returns:
        F_T(x) for each x.

    Source: section analysis_iteration_time.
    """
    return np.asarray(np.prod(np.asarray(cdf_WX, dtype=np.float64), axis=0))


def step_pdf(pdf_WX: ArrayLike, cdf_WX: ArrayLike) -> F64:
    """Density of T for workers that may differ: sum f_n(x) prod over others F_n'(x).

    Args:
        pdf_WX: each worker's density at some times x, per second.
        cdf_WX: each worker's distribution at the same times.

    Returns:
        f_T(x) for each x, per second.

    Source: section analysis_iteration_time.
    """
    pdf = np.asarray(pdf_WX, dtype=np.float64)
    cdf = np.asarray(cdf_WX, dtype=np.float64)
    ones = np.ones_like(cdf[:1])
    # products of the workers before and after each: no division by an F_n of 0
    before = np.cumprod(np.concatenate((ones, cdf[:-1])), axis=0)
    after = np.cumprod(np.concatenate((ones, cdf[:0:-1])), axis=0)[::-1]
    return np.asarray(np.sum(pdf * before * after, axis=0))


def identical_step_cdf(cdf_X: ArrayLike, num_workers: int) -> F64:
    """Distribution of T for N workers with the same distribution: F(x)^N."""
    return np.asarray(cdf_X, dtype=np.float64) ** num_workers


def identical_step_pdf(pdf_X: ArrayLike, cdf_X: ArrayLike, num_workers: int) -> F64:
    """Density of T for N workers with the same distribution: N f(x) F(x)^(N-1).

    Source: eq:latency_pdf.
    """
    others_X = identical_step_cdf(cdf_X, num_workers - 1)
    return np.asarray(num_workers * np.asarray(pdf_X, dtype=np.float64) * others_X)


def normal_cdf(seconds_X: ArrayLike, mean_s_W: ArrayLike, std_s_W: ArrayLike) -> F64:
    """Each worker's distribution if its T_n is normal (figure experiement_vs_theory).

    Args:
        seconds_X: times x.
        mean_s_W: mean T_n of each worker.
        std_s_W: its standard deviation, > 0.

    Returns:
        cdf_WX, as :func:`step_cdf` takes it.
    """
    return phi(z_scores(seconds_X, mean_s_W, std_s_W))


def normal_pdf(seconds_X: ArrayLike, mean_s_W: ArrayLike, std_s_W: ArrayLike) -> F64:
    """Each worker's density, per second, if its T_n is normal; see normal_cdf."""
    z_WX = z_scores(seconds_X, mean_s_W, std_s_W)
    std_W1 = np.atleast_1d(np.asarray(std_s_W, dtype=np.float64))[:, None]
    return np.asarray(np.exp(-0.5 * z_WX**2) / (math.sqrt(2.0 * math.pi) * std_W1))


def z_scores(seconds_X: ArrayLike, mean_s_W: ArrayLike, std_s_W: ArrayLike) -> F64:
    """(x - mean) / std of each worker and time."""
    mean_W1, std_W1 = (
        np.atleast_1d(np.asarray(values, dtype=np.float64))[:, None]
        for values in (mean_s_W, std_s_W)
    )
    return np.asarray((np.asarray(seconds_X, dtype=np.float64) - mean_W1) / std_W1)


def phi(z: F64) -> F64:
    """Distribution of the standard normal, element by element."""
    share = (z > 0.0).astype(np.float64)
    inside = np.abs(z) < LARGEST_Z
    scaled = (z[inside] * -math.sqrt(0.5)).tolist()
    share[inside] = 0.5 * np.fromiter(map(math.erfc, scaled), np.float64, len(scaled))
    return share
