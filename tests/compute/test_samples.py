"""Latencies are checked, and what a threshold cut is filled in without chance."""

import numpy as np
import pytest

from tailbound.compute.samples import check_samples, impute
from tailbound.errors import ConfigError, ShapeError

NAN = float("nan")


def test_floats_are_taken_as_they_are_and_others_become_floats() -> None:
    narrow = np.ones((1, 2, 3), np.float32)

    assert check_samples(narrow) is narrow
    assert check_samples([[[1, 2]]]).dtype == np.float64


@pytest.mark.parametrize("shape", [(2, 3), (0, 2, 3), (2, 0, 3), (2, 3, 0)])
def test_three_axes_are_needed_none_of_them_empty(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="one or more of each"):
        check_samples(np.ones(shape))


@pytest.mark.parametrize("wrong", [-1.0, float("inf")])
def test_a_time_that_is_none_is_named_with_its_place(wrong: float) -> None:
    latency_s_SWM = np.ones((2, 3, 4))
    latency_s_SWM[1, 2, 3] = wrong

    with pytest.raises(ConfigError, match="step 1, worker 2, micro-batch 3"):
        check_samples(latency_s_SWM)


def test_nothing_missing_is_nothing_copied() -> None:
    latency_s_SWM = np.ones((2, 2, 2))

    filled, share = impute(latency_s_SWM)

    assert filled is latency_s_SWM
    assert share == 0.0


def test_a_hole_takes_the_same_micro_batch_of_the_nearest_step() -> None:
    latency_s_SWM = np.array([[[1.0, 5.0]], [[1.0, NAN]], [[1.0, 7.0]], [[1.0, NAN]]])

    filled, share = impute(latency_s_SWM)

    # The earlier of two that are equally near.
    assert filled[:, 0, 1].tolist() == [5.0, 5.0, 7.0, 7.0]
    assert share == 0.25


def test_a_position_never_seen_takes_the_workers_own_values_in_order() -> None:
    latency_s_SWM = np.array([[[1.0, NAN], [9.0, 9.0]], [[2.0, NAN], [9.0, 9.0]]])

    filled, _ = impute(latency_s_SWM)

    assert filled[:, 0, 1].tolist() == [1.0, 2.0]
    assert filled[:, 1].tolist() == [[9.0, 9.0], [9.0, 9.0]]


def test_a_worker_without_any_value_is_named() -> None:
    latency_s_SWM = np.array([[[1.0], [NAN]], [[1.0], [NAN]]])

    with pytest.raises(ConfigError, match="worker 1"):
        impute(latency_s_SWM)
