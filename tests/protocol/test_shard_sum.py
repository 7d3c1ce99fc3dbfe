"""The sum of a shard, whether its own gradient or a peer's chunks come first."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tailbound.protocol.shard_sum import ShardSum
from tailbound.protocol.shards import Shard, cut_shards
from tailbound.reduction import FORMATS, narrow, widen


def second_shard(dtype: str) -> Shard:
    """Elements 4 to 8 of 8, in two chunks of two."""
    itemsize = FORMATS[dtype].wire.itemsize
    shard = cut_shards(8, itemsize, 2 * itemsize, 2, 0)[1]
    assert shard is not None
    return shard


def wire(dtype: str, *values: float) -> NDArray[Any]:
    fmt = FORMATS[dtype]
    return narrow(np.array(values, fmt.sum), fmt)


@pytest.mark.parametrize("dtype", list(FORMATS))
@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize(
    ("weight", "total", "expected"),
    [
        # Own 5, 6, 7, 8 plus 10 and 20 for the first chunk; the second stays away.
        (1.0, 2.0, [7.5, 13.0, 3.5, 4.0]),
        (0.0, 1.0, [10.0, 20.0, 0.0, 0.0]),
    ],
)
def test_the_order_of_coming_changes_nothing(
    dtype: str, is_early: bool, weight: float, total: float, expected: list[float]
) -> None:
    values_N = wire(dtype, 1, 2, 3, 4, 5, 6, 7, 8)
    shard_sum = ShardSum(second_shard(dtype), FORMATS[dtype])
    chunk = wire(dtype, 10, 20).reshape(1, 2)

    if is_early:
        shard_sum.sink.put_run(0, chunk)
        shard_sum.put_own(values_N, weight)
    else:
        shard_sum.put_own(values_N, weight)
        shard_sum.sink.put_run(0, chunk)
    mean_E = shard_sum.finish(total, None)

    assert widen(mean_E, FORMATS[dtype]).tolist() == expected
    assert widen(values_N, FORMATS[dtype]).tolist() == [1, 2, 3, 4, *expected]


def test_what_comes_before_and_after_the_own_gradient_is_added() -> None:
    values_N = wire("float32", 0, 0, 0, 0, 1, 1, 1, 1)
    shard_sum = ShardSum(second_shard("float32"), FORMATS["float32"])

    shard_sum.sink.put_run(0, wire("float32", 10, 10).reshape(1, 2))
    shard_sum.put_own(values_N, 1.0)
    shard_sum.sink.put_run(1, wire("float32", 20, 20).reshape(1, 2))

    assert shard_sum.finish(1.0, None).tolist() == [11, 11, 21, 21]


def test_a_hole_may_be_the_mean_of_what_arrived() -> None:
    values_N = wire("float32", 0, 0, 0, 0, 1, 1, 1, 1)
    shard_sum = ShardSum(second_shard("float32"), FORMATS["float32"])
    shard_sum.put_own(values_N, 1.0)
    shard_sum.sink.put_run(0, wire("float32", 3, 5).reshape(1, 2))

    mean_E = shard_sum.finish(2.0, np.array([2.0, 1.0]))

    assert mean_E.tolist() == [2, 3, 1, 1]
