"""A bucket's datagrams: all headers at once, packed and checked as batches."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tailbound.errors import ShapeError
from tailbound.protocol.chunks import ChunkLayout
from tailbound.protocol.events import Direction, RoundKey
from tailbound.protocol.headers import BucketBytes, HeaderTable, MeanBytes
from tailbound.protocol.wire import HEADER, headers_untrusted

KEY = RoundKey(5, 1, Direction.IN)


def make_table(layout: ChunkLayout) -> HeaderTable:
    return HeaderTable(layout, KEY, session=77, rank=3)


def unpack(data: bytes, segment_bytes: int) -> list[tuple[int, bytes]]:
    """Sequence and data of each datagram; each must say its own length and round."""
    found = []
    while data:
        datagram, data = data[:segment_bytes], data[segment_bytes:]
        (header,) = headers_untrusted(memoryview(datagram), 1, len(datagram))
        assert header["length"] == len(datagram) - 24
        assert (header["counter"], header["bucket"], header["kind"]) == (5, 1, 0)
        assert (header["session"], header["rank"]) == (77, 3)
        found.append((int(header["sequence"]), datagram[24:]))
    return found


# -- packing -------------------------------------------------------------------


@pytest.mark.parametrize(
    "chunks",
    [
        [0],
        [0, 1, 2],
        [1, 2],
        [2, 0],
        [0, 2, 1],
        [3],
        [2, 3],
        [0, 1, 2, 3],
        [2, 0, 3],
    ],
    ids=str,
)
def test_a_batch_holds_each_chunks_bytes_and_the_short_one_last(
    chunks: list[int],
) -> None:
    values_N = np.arange(10, dtype="<u2")  # chunks of 3 elements, the last has 1
    layout = ChunkLayout(10, itemsize=2, room_bytes=7)
    out = bytearray(b"\xaa" * 200)

    end = BucketBytes(values_N, layout).pack(
        np.array(chunks), make_table(layout), memoryview(out)
    )

    whole = bytes.fromhex("000001000200 030004000500 060007000800 0900")
    assert unpack(bytes(out[:end]), 30) == [
        (chunk, whole[chunk * 6 : chunk * 6 + 6]) for chunk in chunks
    ]
    assert bytes(out[end:]) == b"\xaa" * (200 - end)


@pytest.mark.parametrize("dtype", ["<f4", "<f8"])
@pytest.mark.parametrize("chunks", [[0, 1, 3], [2, 0], [3]], ids=str)
def test_a_mean_is_divided_as_it_leaves(dtype: str, chunks: list[int]) -> None:
    sum_N = np.array([4, 8, 12, 16, 20, 24, 28], dtype)  # chunks of 2, the last has 1
    layout = ChunkLayout(7, itemsize=sum_N.itemsize, room_bytes=2 * sum_N.itemsize)
    out = bytearray(200)

    end = MeanBytes(sum_N, layout, 4.0).pack(
        np.array(chunks), make_table(layout), memoryview(out)
    )

    mean = {0: [1.0, 2.0], 1: [3.0, 4.0], 2: [5.0, 6.0], 3: [7.0]}
    found = unpack(bytes(out[:end]), layout.segment_bytes)
    assert [(chunk, np.frombuffer(data, dtype).tolist()) for chunk, data in found] == [
        (chunk, mean[chunk]) for chunk in chunks
    ]
    assert sum_N.tolist() == [4, 8, 12, 16, 20, 24, 28]


def test_a_mean_that_overflows_is_inf_without_a_warning() -> None:
    sum_N = np.array([3e38, -3e38, np.inf], np.float32)
    layout = ChunkLayout(3, itemsize=4, room_bytes=8)
    out = bytearray(100)

    end = MeanBytes(sum_N, layout, 1e-3).pack(
        np.array([0, 1]), make_table(layout), memoryview(out)
    )

    found = unpack(bytes(out[:end]), layout.segment_bytes)
    values = np.frombuffer(b"".join(data for _, data in found), np.float32)
    assert values.tolist() == [np.inf, -np.inf, np.inf]


def test_a_bucket_that_divides_evenly_has_no_short_chunk() -> None:
    values_N = np.array([1.0, 2.0], dtype="<f8")
    layout = ChunkLayout(2, itemsize=8, room_bytes=8)
    out = bytearray(64)

    end = BucketBytes(values_N, layout).pack(
        np.array([1, 0]), make_table(layout), memoryview(out)
    )

    assert unpack(bytes(out[:end]), 32) == [
        (1, bytes.fromhex("0000000000000040")),
        (0, bytes.fromhex("000000000000f03f")),
    ]


@pytest.mark.parametrize("chunks", [[1, 2, 0], [0, 1, 2], [2, 0, 1], [1], [2, 3]])
def test_a_sender_that_knows_its_order_ascends_packs_the_same(
    chunks: list[int],
) -> None:
    values_N = np.arange(10, dtype="<u2")
    layout = ChunkLayout(10, itemsize=2, room_bytes=7)
    rows, table = BucketBytes(values_N, layout), make_table(layout)
    out, other = bytearray(90), bytearray(90)

    end = rows.pack(np.array(chunks), table, memoryview(out), is_ascending=True)

    assert end == rows.pack(np.array(chunks), table, memoryview(other))
    assert out == other


def test_what_is_packed_follows_the_buffer_not_a_copy() -> None:
    values_N = np.array([1, 2], dtype="<u2")
    layout = ChunkLayout(2, itemsize=2, room_bytes=2)
    rows = BucketBytes(values_N, layout)
    values_N[1] = 7
    out = bytearray(26)

    rows.pack(np.array([1]), make_table(layout), memoryview(out))

    assert bytes(out[24:]) == b"\x07\x00"


@settings(max_examples=30)
@given(data=st.data(), itemsize=st.sampled_from([2, 4, 8]))
def test_packing_and_unpacking_gives_the_bucket_back(
    data: st.DataObject, itemsize: int
) -> None:
    num_elements = data.draw(st.integers(1, 60))
    layout = ChunkLayout(num_elements, itemsize, data.draw(st.integers(8, 40)))
    num_bytes = num_elements * itemsize
    raw = data.draw(st.binary(min_size=num_bytes, max_size=num_bytes))
    values_N = np.frombuffer(raw, dtype=f"<u{itemsize}")
    order = data.draw(st.permutations(range(layout.num_full)))
    if layout.tail_bytes:
        order = [*order, layout.num_full]
    out = bytearray(layout.num_chunks * layout.segment_bytes)

    end = BucketBytes(values_N, layout).pack(
        np.array(order), make_table(layout), memoryview(out)
    )

    found = unpack(bytes(out[:end]), layout.segment_bytes)
    assert [chunk for chunk, _ in found] == order
    assert b"".join(part for _, part in sorted(found)) == raw


@pytest.mark.parametrize(
    ("values_N", "says"),
    [
        (np.zeros(9, "<f4"), r"shape \(9,\)"),
        (np.zeros((2, 5), "<f4"), r"shape \(2, 5\)"),
        (np.zeros(20, "<f4")[::2], "contiguous"),
        (np.zeros(10, "<f2"), "4 bytes, not 2"),
        (np.zeros(10, "<f8"), "4 bytes, not 8"),
    ],
)
def test_an_array_that_is_not_the_bucket_is_refused(
    values_N: NDArray[Any], says: str
) -> None:
    with pytest.raises(ShapeError, match=says):
        BucketBytes(values_N, ChunkLayout(10, itemsize=4, room_bytes=8))


# -- checking --------------------------------------------------------------------

FOUR = ChunkLayout(10, itemsize=2, room_bytes=6)
"""Chunks 0, 1, 2 of three elements, 30 bytes on the wire, and a short one."""


def packed(*chunks: int) -> bytearray:
    out = bytearray(30 * len(chunks))
    rows = BucketBytes(np.arange(10, dtype="<u2"), FOUR)
    rows.pack(np.array(chunks), make_table(FOUR), memoryview(out))
    return out


def match(data: bytearray, num: int) -> int | list[int] | None:
    found = make_table(FOUR).match(memoryview(data), num, 30)
    return found.tolist() if isinstance(found, np.ndarray) else found


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ((0, 1, 2), 0),
        ((1, 2), 1),
        ((2,), 2),
        ((0, 2), [0, 2]),
        ((1, 0), [1, 0]),
        ((1, 1), [1, 1]),
        ((2, 0, 1), [2, 0, 1]),
    ],
    ids=str,
)
def test_full_chunks_of_the_round_are_known_as_a_run_or_by_their_numbers(
    chunks: tuple[int, ...], expected: int | list[int]
) -> None:
    assert match(packed(*chunks), len(chunks)) == expected


@pytest.mark.parametrize(
    "field", [name for name in HEADER.names or () if name != "sequence"]
)
@pytest.mark.parametrize("chunks", [(0, 1), (1, 0)], ids=str)
@pytest.mark.parametrize("place", [0, 1])
def test_one_wrong_field_in_one_header_and_nothing_matches(
    field: str, chunks: tuple[int, int], place: int
) -> None:
    data = packed(*chunks)
    headers_K = np.ndarray((2,), HEADER, memoryview(data), 0, (30,))
    headers_K[field][place] += 1

    assert match(data, 2) is None


@pytest.mark.parametrize("sequence", [3, 4, 2**32 - 1])
@pytest.mark.parametrize("place", [0, 1])
def test_a_number_past_the_full_chunks_matches_nothing(
    sequence: int, place: int
) -> None:
    data = packed(1, 2)
    data[30 * place + 16 : 30 * place + 20] = sequence.to_bytes(4, "big")

    assert match(data, 2) is None
    assert match(data[30 * place :], 1) is None


def test_a_table_turns_from_round_to_round() -> None:
    table = make_table(FOUR)
    data = packed(0, 1, 2)
    next_key = RoundKey(2**32 - 1, 1, Direction.BACK)

    table.set_round(next_key)
    assert table.key == next_key
    assert table.match(memoryview(data), 3, 30) is None
    assert table.headers_C["counter"].tolist() == [2**32 - 1] * 4
    assert table.headers_C["kind"].tolist() == [1] * 4

    table.set_round(KEY)
    assert table.match(memoryview(data), 3, 30) == 0


def test_headers_of_a_bucket_number_its_chunks_and_tell_their_bytes() -> None:
    headers_C = make_table(FOUR).headers_C

    assert headers_C["sequence"].tolist() == [0, 1, 2, 3]
    assert headers_C["length"].tolist() == [6, 6, 6, 2]
