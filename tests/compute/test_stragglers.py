"""Workers that are slow all the time, and how slow each is."""

import numpy as np
import pytest

from tailbound.compute.stragglers import (
    find_persistent,
    individual_scores,
    relative_scores,
)


def times(num_steps: int = 20) -> np.ndarray:
    """Four equal workers: 10 s a step, give or take 2 %."""
    rng = np.random.default_rng(1)
    return 10.0 * (1.0 + 0.02 * rng.standard_normal((num_steps, 4)))


EVEN_DROPS = np.full(4, 0.1)


def test_a_worker_that_is_slow_in_every_step_is_named() -> None:
    time_s_SW = times()
    time_s_SW[:, 2] *= 1.5

    assert find_persistent(time_s_SW, EVEN_DROPS) == (2,)


def test_half_of_the_workers_may_be_slow() -> None:
    time_s_SW = times()
    time_s_SW[:, [0, 3]] *= 4.0

    assert find_persistent(time_s_SW, EVEN_DROPS) == (0, 3)


def test_a_straggler_that_moves_is_not_persistent() -> None:
    time_s_SW = times()
    steps = np.arange(len(time_s_SW))
    time_s_SW[steps, steps % 4] *= 3.0

    assert find_persistent(time_s_SW, EVEN_DROPS) == ()


def test_a_small_offset_is_not_worth_replacing_a_worker() -> None:
    time_s_SW = times()
    time_s_SW[:, 1] *= 1.2

    assert find_persistent(time_s_SW, EVEN_DROPS) == ()


def test_who_does_not_pay_for_the_threshold_is_not_named() -> None:
    time_s_SW = times()
    time_s_SW[:, 2] *= 1.5

    assert find_persistent(time_s_SW, np.array([0.2, 0.2, 0.0, 0.2])) == ()


def test_few_steps_tell_nothing() -> None:
    time_s_SW = times(9)
    time_s_SW[:, 2] *= 1.5

    assert find_persistent(time_s_SW, EVEN_DROPS) == ()


def test_the_fastest_worker_has_score_1() -> None:
    assert relative_scores(np.array([2.0, 1.0, 4.0])).tolist() == [0.5, 1.0, 0.25]


def test_a_worker_is_compared_with_its_own_best() -> None:
    scores_W = individual_scores(np.array([2.0, 4.0]), np.array([2.0, 1.0]))

    assert scores_W == pytest.approx([1.0, 0.25])
