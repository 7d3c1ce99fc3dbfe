"""What all ranks agreed on."""

import pytest

from tailbound.config import LossBound
from tailbound.protocol.events import Direction, RoundKey
from tailbound.protocol.messages import BucketSpec
from tailbound.protocol.plan import Limits, Plan

BUCKETS = (
    BucketSpec("float32", ("a", "b"), ((100, 7), (25,))),
    BucketSpec("bfloat16", ("c",), ((725,),)),
    BucketSpec("float64", ("d",), ((),)),
)


def make_plan(first_counter: int = 1) -> Plan:
    return Plan(
        BUCKETS, LossBound(), 1448, 3, Limits(1 << 20, 60.0, 5.0), first_counter
    )


@pytest.mark.parametrize(
    ("bucket", "itemsize", "num_elements", "num_chunks"),
    [(0, 4, 725, 3), (1, 2, 725, 2), (2, 8, 1, 1)],
)
def test_a_bucket_is_cut_by_the_bytes_of_its_dtype(
    bucket: int, itemsize: int, num_elements: int, num_chunks: int
) -> None:
    layout = make_plan().layout(bucket)

    assert layout.itemsize == itemsize
    assert layout.num_elements == num_elements
    assert layout.num_chunks == num_chunks


@pytest.mark.parametrize(
    ("index", "direction", "expected"),
    [
        (0, Direction.IN, RoundKey(1, 0, Direction.IN)),
        (0, Direction.BACK, RoundKey(1, 0, Direction.BACK)),
        (1, Direction.IN, RoundKey(2, 1, Direction.IN)),
        (2, Direction.IN, RoundKey(3, 2, Direction.IN)),
        (3, Direction.IN, RoundKey(4, 0, Direction.IN)),
    ],
)
def test_buckets_take_turns_and_the_counter_grows_by_one(
    index: int, direction: Direction, expected: RoundKey
) -> None:
    assert make_plan().key(index, direction) == expected


def test_the_counter_wraps_around_and_the_buckets_turn_does_not() -> None:
    plan = make_plan(first_counter=2**32 - 1)

    keys = [plan.key(index, Direction.IN) for index in range(4)]

    assert [key.counter for key in keys] == [4294967295, 0, 1, 2]
    assert [key.bucket for key in keys] == [0, 1, 2, 0]


def test_a_round_is_named_for_people() -> None:
    plan = make_plan()

    assert plan.key(4, Direction.IN).describe() == "the gradient of round 5, bucket 1"
    assert plan.key(4, Direction.BACK).describe() == "the mean of round 5, bucket 1"
