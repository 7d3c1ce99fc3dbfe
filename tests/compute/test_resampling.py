"""Traces of another size: what stays, and where the rest comes from."""

import numpy as np

from tailbound.compute.resampling import NEAR_STEPS, with_micro_batches, with_workers
from tailbound.compute.samples import Floats

# The value tells where it is from: step 100s, worker 10s, micro-batch 1s.
STEPS, WORKERS, MICRO_BATCHES = 30, 4, 3
SOURCE_SWM: Floats = (
    100.0 * np.arange(STEPS)[:, None, None]
    + 10.0 * np.arange(WORKERS)[:, None]
    + np.arange(MICRO_BATCHES)
)


def rng() -> np.random.Generator:
    return np.random.default_rng(3)


def test_the_same_size_is_the_same_array() -> None:
    assert with_workers(SOURCE_SWM, WORKERS, rng()) is SOURCE_SWM
    assert with_micro_batches(SOURCE_SWM, MICRO_BATCHES, rng()) is SOURCE_SWM


def test_fewer_workers_are_some_of_them_in_all_steps() -> None:
    fewer_SWM = with_workers(SOURCE_SWM, 2, rng())

    kept = np.unique(fewer_SWM // 10 % 10).astype(int)
    assert len(kept) == 2
    np.testing.assert_array_equal(fewer_SWM, SOURCE_SWM[:, kept])


def test_a_new_worker_has_whole_steps_of_one_worker_from_nearby() -> None:
    more_SWM = with_workers(SOURCE_SWM, 50, rng())

    np.testing.assert_array_equal(more_SWM[:, :WORKERS], SOURCE_SWM)
    new_SWM = more_SWM[:, WORKERS:]
    assert new_SWM.shape == (STEPS, 46, MICRO_BATCHES)
    assert (new_SWM % 10 == np.arange(MICRO_BATCHES)).all()
    worker_SW = new_SWM[:, :, 0] // 10 % 10
    assert (worker_SW == worker_SW[0]).all()
    assert set(worker_SW[0]) == {0.0, 1.0, 2.0, 3.0}
    away_SW = np.abs(new_SWM[:, :, 0] // 100 - np.arange(STEPS)[:, None])
    assert away_SW.max() == NEAR_STEPS


def test_fewer_micro_batches_are_different_ones_of_the_same_step() -> None:
    fewer_SWM = with_micro_batches(SOURCE_SWM, 2, rng())

    assert fewer_SWM.shape == (STEPS, WORKERS, 2)
    np.testing.assert_array_equal(
        fewer_SWM // 10, np.broadcast_to(SOURCE_SWM[:, :, :1] // 10, fewer_SWM.shape)
    )
    assert (fewer_SWM[:, :, 0] != fewer_SWM[:, :, 1]).all()
    assert set(np.unique(fewer_SWM % 10)) == {0.0, 1.0, 2.0}


def test_new_micro_batches_are_drawn_from_the_same_step() -> None:
    more_SWM = with_micro_batches(SOURCE_SWM, 8, rng())

    np.testing.assert_array_equal(more_SWM[:, :, :MICRO_BATCHES], SOURCE_SWM)
    np.testing.assert_array_equal(
        more_SWM // 10, np.broadcast_to(SOURCE_SWM[:, :, :1] // 10, more_SWM.shape)
    )
    assert set(np.unique(more_SWM[:, :, MICRO_BATCHES:] % 10)) == {0.0, 1.0, 2.0}
