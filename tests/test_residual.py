"""What was lost travels again: sums, momentum, formats, and what is never carried."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailbound.errors import ConfigError, ShapeError
from tailbound.reduction import FORMATS
from tailbound.residual import Residual, Residuals

FLOAT32 = FORMATS["float32"]
NAN, INF = float("nan"), float("inf")


def five(momentum: float = 0.0) -> Residual:
    """Five elements in chunks of two and a short one."""
    return Residual(5, 2, FLOAT32, momentum=momentum)


def sent(residual: Residual, *values: float, arrived: str, scale: float = 1.0) -> Any:
    """What leaves for this gradient; ``arrived`` has a + for each chunk that came."""
    values_N = np.array(values, np.float32)
    residual.apply(values_N, loss_scale=scale)
    residual.note(np.array([sign == "+" for sign in arrived]))
    return values_N.tolist()


# -- the residual ---------------------------------------------------------------


def test_a_lost_chunk_is_part_of_the_next_gradient() -> None:
    residual = five()

    first = sent(residual, 1, 2, 3, 4, 5, arrived="+-+")
    second = sent(residual, 10, 20, 30, 40, 50, arrived="+++")

    assert first == [1, 2, 3, 4, 5]
    assert second == [10, 20, 33, 44, 50]


def test_what_has_arrived_is_owed_no_longer() -> None:
    residual = five()
    sent(residual, 1, 2, 3, 4, 5, arrived="---")
    sent(residual, 1, 1, 1, 1, 1, arrived="+++")

    assert sent(residual, 7, 7, 7, 7, 7, arrived="+++") == [7] * 5


def test_a_chunk_that_is_lost_again_and_again_grows() -> None:
    residual = five()
    sent(residual, 1, 2, 3, 4, 5, arrived="++-")
    sent(residual, 1, 2, 3, 4, 50, arrived="++-")

    assert sent(residual, 1, 2, 3, 4, 500, arrived="+++") == [1, 2, 3, 4, 555]


def test_what_is_carried_is_a_copy_since_the_mean_may_come_before_the_bitmap() -> None:
    residual = five()
    values_N = np.array([1, 2, 3, 4, 5], np.float32)
    residual.apply(values_N)
    values_N[...] = 99.0  # the mean, in the gradient's memory
    residual.note(np.array([False, False, False]))

    assert sent(residual, 0, 0, 0, 0, 0, arrived="+++") == [1, 2, 3, 4, 5]


def test_a_bucket_of_several_blocks_is_carried_whole() -> None:
    residual = Residual(70_000, 362, FLOAT32)  # 193 chunks and one of 134
    values_N = np.arange(70_000, dtype=np.float32)
    residual.apply(values_N.copy())
    arrived_C = np.ones(194, np.bool_)
    arrived_C[[0, 90, 193]] = False  # 90: elements 32580 to 32941, over a block's end
    residual.note(arrived_C)

    next_N = np.zeros(70_000, np.float32)
    residual.apply(next_N)

    expected_N = np.zeros(70_000, np.float32)
    for first, stop in ((0, 362), (32_580, 32_942), (69_866, 70_000)):
        expected_N[first:stop] = values_N[first:stop]
    assert next_N.tobytes() == expected_N.tobytes()


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(-1000, 1000), min_size=5, max_size=5),
            st.lists(st.booleans(), min_size=3, max_size=3),
        ),
        max_size=8,
    )
)
def test_nothing_is_lost_or_doubled(rounds: list[tuple[list[int], list[bool]]]) -> None:
    """What arrived and what is still owed add up to all gradients."""
    residual = five()
    total_N, all_N = np.zeros(5), np.zeros(5)
    for gradient, arrived in [*rounds, ([0] * 5, [True] * 3)]:
        values_N = np.array(gradient, np.float32)
        residual.apply(values_N)
        residual.note(np.array(arrived))
        total_N += np.where(np.repeat(arrived, 2)[:5], values_N, 0.0)
        all_N += gradient

    assert total_N.tolist() == all_N.tolist()


# -- formats and scales ---------------------------------------------------------


def test_bfloat16_is_carried_wider_than_it_travels() -> None:
    """256 and 1 and 1 are 258, though 257 rounds to 256 on the wire."""
    residual = Residual(1, 1, FORMATS["bfloat16"])
    leaves = []
    for bits in (0x4380, 0x3F80, 0x3F80):
        values_N = np.array([bits], np.uint16)
        residual.apply(values_N)
        residual.note(np.array([False]))
        leaves.append(int(values_N[0]))

    assert leaves == [0x4380, 0x4380, 0x4381]


def test_what_outgrows_float16_is_inf_on_the_way_and_still_carried() -> None:
    residual = Residual(1, 1, FORMATS["float16"])
    leaves = []
    for value in (60000, 60000, -60000):
        values_N = np.array([value], np.float16)
        residual.apply(values_N)
        residual.note(np.array([False]))
        leaves.append(float(values_N[0]))

    assert leaves == [60000, INF, 60000]


def test_another_loss_scale_is_taken_out_of_what_is_carried() -> None:
    residual = Residual(2, 2, FLOAT32)

    sent(residual, 4, 8, arrived="-", scale=4.0)  # 1 and 2

    assert sent(residual, 2, 2, arrived="+", scale=2.0) == [4, 6]  # 1+1 and 2+1


# -- what is never carried -------------------------------------------------------


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_lost_chunk_that_is_not_finite_is_dropped_and_counted(bad: float) -> None:
    residual = five()

    sent(residual, 1, bad, 3, 4, 5, arrived="--+")

    assert sent(residual, 0, 0, 0, 0, 0, arrived="+++") == [0, 0, 3, 4, 0]
    assert residual.dropped == 1


def test_a_chunk_that_is_not_finite_and_arrives_is_not_counted() -> None:
    residual = five()

    sent(residual, NAN, 2, 3, 4, 5, arrived="+--")

    assert sent(residual, 0, 0, 0, 0, 0, arrived="+++") == [0, 0, 3, 4, 5]
    assert residual.dropped == 0


def test_a_velocity_that_is_not_finite_begins_again_even_if_its_chunk_arrived() -> None:
    residual = five(momentum=0.5)
    sent(residual, 4, NAN, 4, 4, INF, arrived="++-")

    # Chunk 0 and 2 from 0; chunk 1 has velocity 0.5 * 4.
    assert sent(residual, 1, 1, 1, 1, 1, arrived="+++") == [1, 1, 3, 3, 1]
    assert residual.dropped == 1


# -- momentum correction ----------------------------------------------------------


def test_with_nothing_lost_the_velocity_of_sgd_with_momentum_is_sent() -> None:
    residual = Residual(1, 1, FLOAT32, momentum=0.5)

    leaves = [sent(residual, 1, arrived="+") for _ in range(4)]

    assert leaves == [[1], [1.5], [1.75], [1.875]]


def test_what_comes_late_has_the_momentum_it_would_have_had_in_time() -> None:
    """Velocities 1, 1.5, 1.75: sent as sums until they arrive."""
    residual = Residual(1, 1, FLOAT32, momentum=0.5)

    leaves = [sent(residual, 1, arrived=sign) for sign in "--++"]

    assert leaves == [[1], [2.5], [4.25], [1.875]]


# -- bounds of use -----------------------------------------------------------------


@pytest.mark.parametrize(("num", "per_chunk"), [(0, 2), (5, 0)])
def test_an_empty_bucket_is_refused(num: int, per_chunk: int) -> None:
    with pytest.raises(ShapeError, match="1 or more elements in chunks of 1 or more"):
        Residual(num, per_chunk, FLOAT32)


@pytest.mark.parametrize("momentum", [-0.1, 1.0, NAN])
def test_a_momentum_out_of_range_is_refused(momentum: float) -> None:
    with pytest.raises(ConfigError, match=r"momentum is in \[0, 1\)"):
        Residual(5, 2, FLOAT32, momentum=momentum)


@pytest.mark.parametrize("values_N", [np.zeros(4, np.float32), np.zeros(5)])
def test_an_array_that_is_not_the_bucket_is_refused(values_N: Any) -> None:
    with pytest.raises(ShapeError, match="the bucket is 5 float32"):
        five().apply(values_N)


def test_a_bitmap_of_another_length_is_refused() -> None:
    with pytest.raises(ShapeError, match="the bucket has 3 chunks"):
        five().note(np.ones(2, np.bool_))


# -- several buckets ----------------------------------------------------------------


def test_each_key_has_a_residual_of_its_own() -> None:
    residuals = Residuals()

    first, second = (residuals.of(key, 5, 2, FLOAT32) for key in (0, 1))

    assert first is not second
    assert residuals.of(0, 5, 2, FLOAT32) is first


@pytest.mark.parametrize(
    "shape", [(6, 2, FLOAT32), (5, 3, FLOAT32), (5, 2, FORMATS["bfloat16"])]
)
def test_a_bucket_that_has_changed_owes_nothing(shape: Any) -> None:
    residuals = Residuals(momentum=0.5)
    before = residuals.of(0, 5, 2, FLOAT32)

    after = residuals.of(0, *shape)

    assert after is not before
    assert after.shape == shape
