"""Shards: whole chunks for all ranks, as evenly as that goes."""

import pytest

from tailbound.protocol.shards import cut_shards

Ranges = list[tuple[int, int] | None]


@pytest.mark.parametrize(
    ("num_elements", "world_size", "slot", "expected"),
    [
        # Chunks of 2 elements.
        (8, 4, 0, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (8, 2, 5, [(0, 4), (4, 8)]),
        (11, 4, 0, [(0, 4), (4, 8), (8, 10), (10, 11)]),
        (7, 2, 0, [(0, 4), (4, 7)]),
        (1, 3, 0, [(0, 1), None, None]),
        (1, 3, 1, [None, (0, 1), None]),
        (3, 3, 2, [(2, 3), None, (0, 2)]),
        (4, 3, 4, [None, (0, 2), (2, 4)]),
    ],
)
def test_a_bucket_is_shared_out_in_whole_chunks(
    num_elements: int, world_size: int, slot: int, expected: Ranges
) -> None:
    shards = cut_shards(num_elements, 4, 8, world_size, slot)

    assert [shard and (shard.first, shard.stop) for shard in shards] == expected


def test_a_shard_knows_how_it_is_cut() -> None:
    shard = cut_shards(7, 4, 8, 2, 0)[1]

    assert shard is not None
    assert (shard.layout.num_elements, shard.layout.num_chunks) == (3, 2)
    assert shard.layout.tail_bytes == 4
