"""How a bucket is cut, how much may be missing, in which order chunks leave."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailbound.errors import ShapeError
from tailbound.protocol.chunks import (
    ChunkLayout,
    allowed_missing,
    beyond_bound,
    is_run,
    send_order,
)

# -- the bound -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "num_chunks", "expected"),
    [
        (0.008, 1000, 8),
        (0.008, 100, 0),
        (0.408, 3, 1),
        (0.29, 100, 29),  # 0.29 * 100 is 28.999999999999996 in floats
        (0.07, 100, 7),  # 7.000000000000001
        (0.57, 100, 57),  # 56.99999999999999
        (0.0, 1, 0),
        (0.0, 1_000_000, 0),
        (0.5, 1, 0),
        (0.5, 2, 1),
        (0.249999, 4, 0),
        (0.25, 4, 1),
        (0.999, 1000, 999),
        (0.9999999999, 1000, 999),
        (0.9999999999, 3, 2),
        (0.9999999999, 1, 0),
        (0.408, 69_444, 28_333),  # 28333.152: 100 MB at MTU 1500
    ],
)
def test_the_missing_that_close_a_round_are_the_share_rounded_down(
    p: float, num_chunks: int, expected: int
) -> None:
    assert allowed_missing(p, num_chunks) == expected


@given(p=st.floats(0.0, 1.0, exclude_max=True), num_chunks=st.integers(1, 10**6))
def test_all_chunks_missing_is_never_within_the_bound(
    p: float, num_chunks: int
) -> None:
    assert 0 <= allowed_missing(p, num_chunks) < num_chunks


@pytest.mark.parametrize(("missing", "expected"), [(0, 0), (40, 0), (41, 1), (99, 59)])
def test_only_what_is_missing_above_the_bound_is_beyond_it(
    missing: int, expected: int
) -> None:
    assert beyond_bound(missing, 0.408, 100) == expected


# -- the cut -------------------------------------------------------------------


@pytest.mark.parametrize(
    (
        "num_elements",
        "itemsize",
        "room_bytes",
        "elements_per_chunk",
        "num_chunks",
        "tail_bytes",
    ),
    [
        (1000, 2, 1399, 699, 2, 602),
        (1000, 4, 1399, 349, 3, 1208),
        (1000, 8, 1399, 174, 6, 1040),
        (362, 4, 1448, 362, 1, 0),
        (363, 4, 1448, 362, 2, 4),
        (361, 4, 1448, 362, 1, 1444),
        (724, 4, 1448, 362, 2, 0),
        (1, 8, 8, 1, 1, 0),
        (3, 8, 15, 1, 3, 0),
        (1, 2, 65483, 32741, 1, 2),
    ],
)
def test_a_chunk_holds_as_many_whole_elements_as_fit(
    num_elements: int,
    itemsize: int,
    room_bytes: int,
    elements_per_chunk: int,
    num_chunks: int,
    tail_bytes: int,
) -> None:
    layout = ChunkLayout(num_elements, itemsize, room_bytes)

    assert layout.elements_per_chunk == elements_per_chunk
    assert layout.num_chunks == num_chunks
    assert layout.tail_bytes == tail_bytes
    assert layout.num_full == num_chunks - (1 if tail_bytes else 0)
    assert layout.chunk_bytes == elements_per_chunk * itemsize
    assert layout.segment_bytes == elements_per_chunk * itemsize + 24


@given(
    num_elements=st.integers(1, 5000),
    itemsize=st.sampled_from([2, 4, 8]),
    room_bytes=st.integers(8, 2000),
)
def test_chunks_cover_the_bucket_and_never_split_an_element(
    num_elements: int, itemsize: int, room_bytes: int
) -> None:
    layout = ChunkLayout(num_elements, itemsize, room_bytes)

    assert layout.chunk_bytes <= room_bytes < layout.chunk_bytes + itemsize
    assert layout.chunk_bytes % itemsize == layout.tail_bytes % itemsize == 0
    assert 0 <= layout.tail_bytes < layout.chunk_bytes
    whole = layout.num_full * layout.chunk_bytes + layout.tail_bytes
    assert whole == num_elements * itemsize


@pytest.mark.parametrize(
    ("num_elements", "itemsize", "room_bytes", "says"),
    [
        (0, 4, 1448, "at least one element"),
        (-1, 4, 1448, "at least one element"),
        (10, 1, 1448, "not 1"),
        (10, 3, 1448, "not 3"),
        (10, 16, 1448, "not 16"),
        (10, 4, 3, "into 3 bytes"),
        (10, 8, 7, "into 7 bytes"),
        (10, 4, 0, "into 0 bytes"),
        (10, 4, -1424, "into -1424 bytes"),
        (2**32 + 1, 8, 8, "32-bit sequence number"),
    ],
)
def test_a_bucket_that_cannot_be_cut_is_refused(
    num_elements: int, itemsize: int, room_bytes: int, says: str
) -> None:
    with pytest.raises(ShapeError, match=says):
        ChunkLayout(num_elements, itemsize, room_bytes)


def test_sequence_numbers_reach_just_to_their_end() -> None:
    assert ChunkLayout(2**32, 8, 8).num_chunks == 2**32


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([], 0),
        ([0], 1396),
        ([2], 1208),
        ([0, 1], 2792),
        ([1, 2], 2604),
        ([2, 2], 2416),
    ],
)
def test_the_short_last_chunk_counts_its_own_bytes(
    chunks: list[int], expected: int
) -> None:
    layout = ChunkLayout(1000, 4, 1399)

    assert layout.num_bytes(np.array(chunks, dtype=np.int64)) == expected


def test_without_a_short_chunk_all_count_the_same() -> None:
    layout = ChunkLayout(8, 4, 8)

    assert layout.num_bytes(np.array([0, 3])) == 16


# -- the order -----------------------------------------------------------------


@pytest.mark.parametrize("order", ["rotate", "fixed", "norm"])
@pytest.mark.parametrize("num_chunks", [1, 2, 7, 1000])
@pytest.mark.parametrize("counter", [0, 1, 2**32 - 1])
def test_every_order_sends_every_chunk_once(
    order: str, num_chunks: int, counter: int
) -> None:
    norm_C = np.linspace(1.0, 0.0, num_chunks)

    order_C = send_order(
        order,  # type: ignore[arg-type]
        num_chunks,
        counter=counter,
        share=2 / 3,
        norm_C=norm_C,
    )

    assert order_C.dtype == np.int64
    assert sorted(order_C.tolist()) == list(range(num_chunks))


def test_the_fixed_order_is_from_first_to_last() -> None:
    assert send_order("fixed", 4, counter=9, share=0.5).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("counter", "share", "expected"),
    [
        (0, 0.0, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (1, 0.0, [6, 7, 8, 9, 0, 1, 2, 3, 4, 5]),  # 0.618 of 10
        (2, 0.0, [2, 3, 4, 5, 6, 7, 8, 9, 0, 1]),  # 1.236 modulo 1
        (3, 0.0, [8, 9, 0, 1, 2, 3, 4, 5, 6, 7]),  # 1.854
        (1, 0.5, [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]),  # 1.118
    ],
)
def test_rotation_starts_elsewhere_each_round_and_for_each_rank(
    counter: int, share: float, expected: list[int]
) -> None:
    order_C = send_order("rotate", 10, counter=counter, share=share)

    assert order_C.tolist() == expected


def test_rotation_gives_every_tenth_of_a_bucket_its_turn_at_the_end() -> None:
    last = {
        int(send_order("rotate", 1000, counter=counter, share=0.0)[-1]) // 100
        for counter in range(1, 18)
    }

    assert last == {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}


def test_the_norm_order_sends_the_largest_first_and_nan_last() -> None:
    norm_C = np.array([1.0, np.nan, 5.0, 0.0, np.inf, 5.0])

    order_C = send_order("norm", 6, counter=1, share=0.0, norm_C=norm_C)

    assert order_C.tolist() == [4, 2, 5, 0, 3, 1]


@pytest.mark.parametrize("norm_C", [None, np.ones(3), np.ones((4, 1))])
def test_the_norm_order_needs_a_norm_per_chunk(norm_C: np.ndarray | None) -> None:
    with pytest.raises(ShapeError, match="needs 4 norms"):
        send_order("norm", 4, counter=1, share=0.0, norm_C=norm_C)


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([4], True),
        ([4, 5, 6], True),
        ([4, 6], False),
        ([4, 4], False),
        ([5, 4], False),
        ([4, 6, 5, 7], False),  # ends fit, the middle does not
        ([4, 4, 6], False),
    ],
)
def test_a_run_grows_by_one(chunks: list[int], expected: bool) -> None:
    assert is_run(np.array(chunks)) is expected
