"""Sinks: chunks go into a sum that starts empty or full, or into their place."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tailbound.protocol.chunks import ChunkLayout
from tailbound.protocol.sinks import StoreSink, SumSink
from tailbound.reduction import FORMATS

SEVEN = ChunkLayout(7, itemsize=4, room_bytes=8)
"""Chunks 0, 1, 2 of two float32 and chunk 3 of one."""
F32 = FORMATS["float32"]


@pytest.mark.parametrize(
    ("name", "wire_N", "expected"),
    [
        ("float32", np.array([1.5, -2, 4], "<f4"), [2.5, -1, 5]),
        ("float64", np.array([1.5, -2, 4], "<f8"), [2.5, -1, 5]),
        ("float16", np.array([1.5, -2, 4], "<f2"), [2.5, -1, 5]),
        ("bfloat16", np.array([0x3FC0, 0xC000, 0x4080], "<u2"), [2.5, -1, 5]),
    ],
)
def test_a_sum_sink_adds_what_the_wire_dtype_means(
    name: str, wire_N: NDArray[Any], expected: list[float]
) -> None:
    wire_format = FORMATS[name]
    layout = ChunkLayout(3, wire_format.wire.itemsize, wire_format.wire.itemsize * 2)
    sum_N = np.ones(3, wire_format.sum)
    sink = SumSink(sum_N, layout, wire_format, is_empty=False)

    sink.put_run(0, wire_N[:2].reshape(1, 2))
    sink.put_tail(wire_N[2:])

    assert sum_N.tolist() == expected


def test_a_sum_sink_adds_scattered_chunks_in_their_place() -> None:
    sum_N = np.full(7, 100, np.float32)

    SumSink(sum_N, SEVEN, F32, is_empty=False).put(
        np.array([0, 2]), np.array([[1, 2], [3, 4]], np.float32)
    )

    assert sum_N.tolist() == [101, 102, 100, 100, 103, 104, 100]


@pytest.mark.parametrize("name", ["float32", "float64", "float16"])
def test_a_sum_that_overflows_is_inf_without_a_warning(name: str) -> None:
    """The caller's loss scaler looks for it; mixed precision overflows at times."""
    wire_format = FORMATS[name]
    layout = ChunkLayout(4, wire_format.wire.itemsize, wire_format.wire.itemsize * 2)
    sum_N = np.array([np.finfo(wire_format.sum).max, np.inf] * 2, wire_format.sum)
    largest = np.finfo(wire_format.wire).max
    rows_KE = np.array([[largest, -np.inf]], wire_format.wire)
    sink = SumSink(sum_N, layout, wire_format, is_empty=False)

    sink.put_run(0, rows_KE)
    sink.put(np.array([1]), rows_KE)

    assert np.isnan(sum_N[[1, 3]]).all()
    assert (sum_N[[0, 2]] >= np.finfo(wire_format.sum).max).all()


def test_a_store_sink_replaces_what_was_there() -> None:
    values_N = np.full(7, 9, np.float32)
    sink = StoreSink(values_N, SEVEN)

    sink.put_run(1, np.array([[1, 2]], np.float32))
    sink.put(np.array([2, 0]), np.array([[3, 4], [5, 6]], np.float32))
    sink.put_tail(np.array([7], np.float32))

    assert values_N.tolist() == [5, 6, 1, 2, 3, 4, 7]


def rows(*values: float) -> NDArray[np.float32]:
    """Full chunks of SEVEN."""
    return np.array(values, np.float32).reshape(-1, 2)


def test_the_first_to_bring_a_chunk_overwrites_what_a_round_before_left() -> None:
    sum_N = np.full(7, np.nan, np.float32)
    sink = SumSink(sum_N, SEVEN, F32)

    sink.put_run(0, rows(1, 2, 3, 4))
    sink.put(np.array([2]), rows(5, 6))
    sink.put_tail(np.array([7], np.float32))

    assert sum_N.tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_a_run_of_chunks_of_which_some_are_new_is_added_to_the_others() -> None:
    sum_N = np.full(7, np.nan, np.float32)
    sink = SumSink(sum_N, SEVEN, F32)

    sink.put_run(1, rows(10, 20))
    sink.put_run(0, rows(1, 2, 3, 4, 5, 6))

    assert sum_N[:6].tolist() == [1, 2, 13, 24, 5, 6]


def test_scattered_chunks_of_which_some_are_new_are_added_to_the_others() -> None:
    sum_N = np.full(7, np.nan, np.float32)
    sink = SumSink(sum_N, SEVEN, F32)

    sink.put(np.array([2]), rows(10, 20))
    sink.put(np.array([2, 0]), rows(1, 2, 3, 4))

    assert sum_N[[0, 1, 4, 5]].tolist() == [3, 4, 11, 22]


@pytest.mark.parametrize(
    ("put_tail", "expected"),
    [(False, [0, 0, 8, 9, 0, 0, 0]), (True, [0, 0, 8, 9, 0, 0, 7])],
)
def test_what_nobody_brought_is_zero(put_tail: bool, expected: list[float]) -> None:
    sum_N = np.full(7, np.nan, np.float32)
    sink = SumSink(sum_N, SEVEN, F32)
    sink.put_run(1, rows(8, 9))
    if put_tail:
        sink.put_tail(np.array([7], np.float32))

    sink.fill_holes()

    assert sum_N.tolist() == expected


def test_a_sum_is_empty_again_after_its_holes_are_filled() -> None:
    sum_N = np.full(7, np.nan, np.float32)
    sink = SumSink(sum_N, SEVEN, F32)
    sink.put_run(0, rows(1, 2, 3, 4, 5, 6))
    sink.put_tail(np.array([7], np.float32))
    sink.fill_holes()

    sink.put_run(0, rows(10, 20))

    assert sum_N.tolist() == [10, 20, 3, 4, 5, 6, 7]


def test_a_sum_of_a_narrow_format_overwrites_in_the_wide_one() -> None:
    layout = ChunkLayout(2, 2, 4)
    sum_N = np.full(2, np.nan, np.float32)
    sink = SumSink(sum_N, layout, FORMATS["bfloat16"])

    sink.put_run(0, np.array([[0x3FC0, 0xC000]], "<u2"))

    assert sum_N.tolist() == [1.5, -2.0]
