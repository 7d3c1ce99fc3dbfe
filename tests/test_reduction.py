"""Widen, add, divide, narrow, and norms."""

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailbound.errors import ConfigError, ShapeError
from tailbound.reduction import (
    FORMATS,
    WireFormat,
    add_into,
    chunk_norms,
    finish_mean,
    l2_norm,
    l2_norms,
    masked_mean,
    narrow,
    widen,
)

F32, F64 = FORMATS["float32"], FORMATS["float64"]
F16, BF16 = FORMATS["float16"], FORMATS["bfloat16"]
ALL = list(FORMATS.values())
NAMES = list(FORMATS)

BF16_CASES = [
    # float32 bits, bfloat16 bits
    (0x00000000, 0x0000),
    (0x80000000, 0x8000),
    (0x3F800000, 0x3F80),  # 1.0
    (0x3F807FFF, 0x3F80),  # just below half: down
    (0x3F808000, 0x3F80),  # half, even below: down
    (0x3F808001, 0x3F81),  # just above half: up
    (0x3F818000, 0x3F82),  # half, odd below: up to even
    (0x3FFF8000, 0x4000),  # carries into the exponent
    (0xBF808001, 0xBF81),
    (0x00000001, 0x0000),  # the smallest subnormal
    (0x7F7F7FFF, 0x7F7F),  # the largest that stays finite
    (0x7F7F8000, 0x7F80),  # half of the last step: inf
    (0x7F7FFFFF, 0x7F80),  # float32's largest: inf
    (0x7F800000, 0x7F80),  # inf
    (0xFF800000, 0xFF80),  # -inf
    (0x7F800001, 0x7FC0),  # signalling NaN: quiet, not inf
    (0x7FFFFFFF, 0x7FFF),  # NaN that would carry into -0.0
    (0xFFFFFFFF, 0xFFFF),  # NaN that would wrap to 0.0
]
F16_CASES = [
    (0x00000000, 0x0000),
    (0x80000000, 0x8000),
    (0x3F800000, 0x3C00),  # 1.0
    (0xC0000000, 0xC000),  # -2.0
    (0x3F801000, 0x3C00),  # 1 + 2**-11: half, to even below
    (0x3F801001, 0x3C01),
    (0x3F803000, 0x3C02),  # half, to even above
    (0x477FE000, 0x7BFF),  # 65504, the largest
    (0x477FEFFF, 0x7BFF),
    (0x477FF000, 0x7C00),  # 65520: inf
    (0x47800000, 0x7C00),  # 65536: inf
    (0x7F7FFFFF, 0x7C00),
    (0x7F800000, 0x7C00),
    (0xFF800000, 0xFC00),
    (0x7F800001, 0x7E00),  # NaN
    (0xFFC00000, 0xFE00),
    (0x38800000, 0x0400),  # 2**-14, the smallest normal
    (0x387FE000, 0x0400),  # half below it: up to even
    (0x387FC000, 0x03FF),  # the largest subnormal
    (0x33800000, 0x0001),  # 2**-24, the smallest
    (0x33000000, 0x0000),  # half of that: to even, 0
    (0x33000001, 0x0001),
    (0xB3800000, 0x8001),
    (0x00000001, 0x0000),
]


def between_headers(
    rows_RE: Any, *, offset: int = 24, stride: int = 1472, read_only: bool = True
) -> Any:
    """Lay rows into one buffer as a batch of datagrams does: strided, not copied."""
    num, size = rows_RE.shape[0], rows_RE.dtype.itemsize
    buffer = bytearray(offset + num * stride)
    view = np.ndarray(rows_RE.shape, rows_RE.dtype, buffer, offset, (stride, size))
    view[...] = rows_RE
    view.flags.writeable = not read_only
    return view


@pytest.mark.parametrize(
    ("name", "wire_bytes", "sum_bytes"),
    [("float32", 4, 4), ("float64", 8, 8), ("float16", 2, 4), ("bfloat16", 2, 4)],
)
def test_formats_sum_in_float32_or_wider(
    name: str, wire_bytes: int, sum_bytes: int
) -> None:
    fmt = FORMATS[name]

    assert (fmt.name, fmt.wire.itemsize, fmt.sum.itemsize) == (
        name,
        wire_bytes,
        sum_bytes,
    )


@pytest.mark.parametrize("fmt", ALL, ids=NAMES)
def test_widened_values_come_back_as_they_were(fmt: WireFormat) -> None:
    wire = narrow(np.array([0.0, -1.5, 2.0, 1024.0, -np.inf], dtype=fmt.sum), fmt)

    wide = widen(wire, fmt)

    assert wire.dtype == fmt.wire
    assert wide.dtype == fmt.sum
    assert wide.tolist() == [0.0, -1.5, 2.0, 1024.0, -math.inf]
    assert narrow(wide, fmt).tobytes() == wire.tobytes()


@pytest.mark.parametrize("fmt", [F32, F64], ids=["float32", "float64"])
def test_equal_dtypes_are_not_copied(fmt: WireFormat) -> None:
    values = np.arange(3, dtype=fmt.wire)

    assert widen(values, fmt) is values
    assert narrow(values, fmt) is values


@pytest.mark.parametrize(
    ("fmt", "cases"),
    [(BF16, BF16_CASES), (F16, F16_CASES)],
    ids=["bfloat16", "float16"],
)
def test_narrowing_rounds_to_nearest_even(
    fmt: WireFormat, cases: list[tuple[int, int]]
) -> None:
    wide = np.array([case[0] for case in cases], dtype=np.uint32).view(np.float32)

    bits = narrow(wide, fmt).view(np.uint16)

    assert [hex(b) for b in bits] == [hex(case[1]) for case in cases]


@pytest.mark.parametrize("fmt", [BF16, F16], ids=["bfloat16", "float16"])
def test_every_finite_16_bit_value_survives_a_round_trip(fmt: WireFormat) -> None:
    wire = np.arange(1 << 16, dtype=np.uint16).view(fmt.wire)

    wide = widen(wire, fmt)
    back = narrow(wide, fmt)

    is_nan = np.isnan(wide)
    same = back.view(np.uint16) == wire.view(np.uint16)
    assert same[~is_nan].all()
    assert np.isnan(widen(back, fmt))[is_nan].all()


def test_float16_widens_as_numpy_does() -> None:
    wire = np.array([0x0001, 0x03FF, 0x3555, 0x7BFF, 0xFC00], np.uint16)

    wide = widen(wire.view(np.float16), F16)

    expected = [2.0**-24, 1023 * 2.0**-24, 0.333251953125, 65504.0, -math.inf]
    assert wide.tolist() == expected


@settings(max_examples=25, derandomize=True, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1))
def test_float16_narrows_as_numpy_does(values: list[float]) -> None:
    wide = np.array(values, dtype=np.float32)

    with np.errstate(all="ignore"):
        expected = wide.astype(np.float16)
    assert narrow(wide, F16).tobytes() == expected.tobytes()


@settings(max_examples=25, derandomize=True, deadline=None)
@given(st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=1))
def test_bfloat16_is_at_most_half_a_step_away(values: list[float]) -> None:
    """8 bits of mantissa: 2**-8 of the value; the smallest step is 2**-133."""
    wide = np.array(values, dtype=np.float32)

    rounded = widen(narrow(wide, BF16), BF16)

    for exact, near in zip(values, rounded.tolist(), strict=True):
        assert abs(near - exact) <= max(abs(exact) * 2.0**-8, 2.0**-134)


@pytest.mark.parametrize("fmt", ALL, ids=NAMES)
@pytest.mark.parametrize("offset", [24, 25])
def test_rows_are_added_where_they_lie_in_the_datagrams(
    fmt: WireFormat, offset: int
) -> None:
    rows_RE = narrow(np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], fmt.sum), fmt)
    sum_RE = np.full((2, 3), 10.0, dtype=fmt.sum)

    add_into(sum_RE, between_headers(rows_RE, offset=offset, stride=49), fmt)

    assert sum_RE.tolist() == [[11.0, 12.0, 13.0], [14.0, 15.0, 16.0]]


def test_adding_reaches_the_accumulator_behind_a_view() -> None:
    accumulator_N = np.zeros(8, dtype=np.float32)

    add_into(accumulator_N[2:6].reshape(2, 2), np.ones((2, 2), dtype=np.float32), F32)

    assert accumulator_N.tolist() == [0, 0, 1, 1, 1, 1, 0, 0]


def test_float16_is_summed_beyond_its_own_range() -> None:
    """Two times 40000 overflows float16; the mean of the two does not."""
    sum_RE = np.zeros((1, 2), dtype=np.float32)
    rows_RE = np.full((1, 2), 40000.0, dtype=np.float16)

    add_into(sum_RE, rows_RE, F16)
    add_into(sum_RE, rows_RE, F16)

    assert sum_RE.tolist() == [[80000.0, 80000.0]]
    assert finish_mean(sum_RE[0], 2.0, F16).tolist() == [40000.0, 40000.0]


def test_an_overflow_becomes_inf_and_a_contradiction_nan_without_a_warning() -> None:
    sum_RE = np.array([[3e38, np.inf]], dtype=np.float32)

    add_into(sum_RE, np.array([[3e38, -np.inf]], dtype=np.float32), F32)

    assert sum_RE[0, 0] == math.inf
    assert math.isnan(sum_RE[0, 1])


@pytest.mark.parametrize(
    ("sum_RE", "rows_RE", "message"),
    [
        (np.zeros((2, 3), "f4"), np.zeros((1, 3), "f4"), r"sum is \(2, 3\), rows are"),
        (np.zeros((1, 3), "f4"), np.zeros((1, 3), "f2"), "not float16 to float32"),
        (np.zeros((1, 3), "f8"), np.zeros((1, 3), "f4"), "not float32 to float64"),
    ],
)
def test_rows_that_do_not_fit_the_sum_are_refused(
    sum_RE: Any, rows_RE: Any, message: str
) -> None:
    with pytest.raises(ShapeError, match=message):
        add_into(sum_RE, rows_RE, F32)


def test_mean_of_3_6_9_with_the_third_missing_counts_zero_for_it() -> None:
    sum_N = np.array([3.0 + 6.0], dtype=np.float32)

    assert finish_mean(sum_N, 3.0, F32).tolist() == [3.0]


def test_mean_of_3_6_9_with_the_third_missing_over_what_arrived() -> None:
    sum_N = np.array([3.0 + 6.0], dtype=np.float32)

    mean_N = finish_mean(
        sum_N, 3.0, F32, weight_C=np.array([2.0]), elements_per_chunk=1
    )

    assert mean_N.tolist() == [4.5]


@pytest.mark.parametrize("fmt", ALL, ids=NAMES)
def test_each_chunk_is_divided_by_its_own_weight(fmt: WireFormat) -> None:
    """Chunks of 2 elements, the last of 1; the third chunk reached nobody."""
    sum_N = np.array([2.0, 4.0, 6.0, 8.0, 0.0, 0.0, 12.0], dtype=fmt.sum)

    mean_N = finish_mean(
        sum_N,
        9.0,
        fmt,
        weight_C=np.array([2.0, 4.0, 0.0, 3.0]),
        elements_per_chunk=2,
    )

    assert mean_N.dtype == fmt.wire
    assert widen(mean_N, fmt).tolist() == [1.0, 2.0, 1.5, 2.0, 0.0, 0.0, 4.0]


@pytest.mark.parametrize("fmt", ALL, ids=NAMES)
def test_mean_of_many_elements_is_the_same_in_blocks(fmt: WireFormat) -> None:
    """70001 elements are more than two blocks; 362 do not divide a block."""
    sum_N = np.arange(70001).astype(fmt.sum) % 251
    weight_C = np.full(194, 2.0)

    zeros_N = finish_mean(sum_N, 2.0, fmt)
    own_N = finish_mean(sum_N, 9.0, fmt, weight_C=weight_C, elements_per_chunk=362)

    expected = [(n % 251) / 2 for n in range(70001)]
    assert widen(zeros_N, fmt).tolist() == expected
    assert widen(own_N, fmt).tolist() == expected


@pytest.mark.parametrize("fmt", ALL, ids=NAMES)
def test_mean_is_written_where_asked(fmt: WireFormat) -> None:
    out = np.empty(3, dtype=fmt.wire)

    mean_N = finish_mean(np.array([3.0, 6.0, 9.0], dtype=fmt.sum), 3.0, fmt, out=out)

    assert mean_N is out
    assert widen(out, fmt).tolist() == [1.0, 2.0, 3.0]


def test_mean_may_overwrite_the_sum() -> None:
    sum_N = np.array([3.0, 6.0, 9.0], dtype=np.float32)

    finish_mean(sum_N, 3.0, F32, out=sum_N)

    assert sum_N.tolist() == [1.0, 2.0, 3.0]


def test_mean_of_an_empty_bucket_is_empty() -> None:
    empty = np.empty(0, dtype=np.float32)

    assert finish_mean(empty, 1.0, BF16).shape == (0,)
    assert finish_mean(
        empty, 1.0, F32, weight_C=np.empty(0), elements_per_chunk=5
    ).shape == (0,)


def test_a_chunk_without_weight_is_zero_whatever_the_sum_says() -> None:
    mean_N = finish_mean(
        np.array([5.0, 5.0], dtype=np.float32),
        1.0,
        F32,
        weight_C=np.array([0.0, 1.0]),
        elements_per_chunk=1,
    )

    assert mean_N.tolist() == [0.0, 5.0]


@pytest.mark.parametrize("fmt", [F16, F32], ids=["float16", "float32"])
def test_values_that_are_not_finite_reach_the_mean_without_a_warning(
    fmt: WireFormat,
) -> None:
    sum_N = np.array([np.inf, np.nan, 3e38], dtype=np.float32)

    mean_N = finish_mean(sum_N, 0.5, fmt)

    assert mean_N[0] == math.inf
    assert math.isnan(mean_N[1])
    assert mean_N[2] == math.inf


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_total_weight_that_is_not_positive_is_refused(weight: float) -> None:
    with pytest.raises(ConfigError, match="total_weight is a positive number"):
        finish_mean(np.zeros(1, dtype=np.float32), weight, F32)


@pytest.mark.parametrize(
    ("sum_N", "options", "message"),
    [
        (np.zeros(2, "f8"), {}, "sum is flat and float32, not 1-d float64"),
        (np.zeros((2, 2), "f4"), {}, "not 2-d float32"),
        (np.zeros(2, "f4"), {"out": np.zeros(3, "f4")}, r"out is \(2,\) float32"),
        (np.zeros(2, "f4"), {"out": np.zeros(2, "f8")}, r"not \(2,\) float64"),
        (np.zeros(2, "f4"), {"weight_C": np.ones(2)}, "needs elements_per_chunk"),
        (
            np.zeros(2, "f4"),
            {"weight_C": np.ones(2), "elements_per_chunk": 0},
            "needs elements_per_chunk",
        ),
        (
            np.zeros(5, "f4"),
            {"weight_C": np.ones(2), "elements_per_chunk": 2},
            r"5 elements in chunks of 2 need \(3,\) weights, not \(2,\)",
        ),
    ],
)
def test_arrays_that_do_not_fit_the_mean_are_refused(
    sum_N: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ShapeError, match=message):
        finish_mean(sum_N, 1.0, F32, **options)


def test_masked_mean_weighs_what_arrived_and_never_reads_a_hole() -> None:
    grad_WN = np.array([[3.0, np.nan, 1.0], [6.0, 4.0, 9.0], [9.0, np.inf, 9.0]])
    arrived_WN = np.array(
        [[True, False, True], [True, True, False], [False, False, False]]
    )

    mean_N, total_N = masked_mean(grad_WN, arrived_WN, np.array([1.0, 2.0, 5.0]))

    assert mean_N.tolist() == [5.0, 4.0, 1.0]
    assert total_N.tolist() == [3.0, 2.0, 1.0]


def test_masked_mean_is_zero_with_weight_zero_where_nobody_delivered() -> None:
    mean_N, total_N = masked_mean(
        np.full((2, 1), np.nan), np.zeros((2, 1), dtype=bool), np.array([1.0, 1.0])
    )

    assert mean_N.tolist() == [0.0]
    assert total_N.tolist() == [0.0]


def test_masked_mean_leaves_out_a_worker_without_weight() -> None:
    mean_N, total_N = masked_mean(
        np.array([[np.inf], [2.0]]), np.ones((2, 1), dtype=bool), np.array([0.0, 4.0])
    )

    assert mean_N.tolist() == [2.0]
    assert total_N.tolist() == [4.0]


@pytest.mark.parametrize(
    ("grads", "arrived", "weights"),
    [((2, 3), (2, 2), (2,)), ((2, 3), (2, 3), (3,))],
)
def test_masked_mean_refuses_arrays_that_disagree(
    grads: tuple[int, ...], arrived: tuple[int, ...], weights: tuple[int, ...]
) -> None:
    with pytest.raises(ShapeError, match=r"they must be \(W, N\), \(W, N\), \(W,\)"):
        masked_mean(np.zeros(grads), np.zeros(arrived, dtype=bool), np.zeros(weights))


def test_summing_batches_and_dividing_equals_the_masked_mean() -> None:
    rng = np.random.default_rng(3)
    grad_WN = rng.standard_normal((3, 12)).astype(np.float32)
    weight_W = np.array([1.0, 2.0, 4.0])
    arrived_WC = np.array(
        [[True, False, True, False], [True, True, False, False], [True] * 3 + [False]]
    )

    sum_CE = np.zeros((4, 3), dtype=np.float32)
    weight_C = np.zeros(4)
    for grad_N, weight, arrived_C in zip(grad_WN, weight_W, arrived_WC, strict=True):
        for chunk in np.flatnonzero(arrived_C):
            row = (grad_N * np.float32(weight)).reshape(4, 3)[chunk : chunk + 1]
            add_into(sum_CE[chunk : chunk + 1], row, F32)
        weight_C += weight * arrived_C
    sum_N = sum_CE.reshape(-1)

    arrived_WN = np.repeat(arrived_WC, 3, axis=1)
    own_N, total_N = masked_mean(grad_WN, arrived_WN, weight_W)
    np.testing.assert_allclose(
        finish_mean(sum_N, 7.0, F32, weight_C=weight_C, elements_per_chunk=3),
        own_N,
        rtol=1e-6,
    )
    np.testing.assert_allclose(
        finish_mean(sum_N, 7.0, F32), own_N * total_N / 7.0, rtol=1e-6
    )


@pytest.mark.parametrize("fmt", ALL, ids=NAMES)
def test_each_tensor_has_its_norm(fmt: WireFormat) -> None:
    values_N = narrow(np.array([3.0, 4.0, 5.0, 5.0, 12.0], dtype=fmt.sum), fmt)

    assert l2_norms(values_N, [2, 2, 3, 5]).tolist() == [5.0, 0.0, 5.0, 13.0]
    assert l2_norm(values_N[:2]) == 5.0


def test_norm_of_nothing_is_zero() -> None:
    assert l2_norm(np.empty(0, dtype=np.float32)) == 0.0
    assert l2_norms(np.empty(0, dtype=np.float32), []).tolist() == []


def test_norms_are_summed_wider_than_float32() -> None:
    """The square of 1e30 overflows float32, and 1e-30 squared is 0 there."""
    values_N = np.array([3e30, 4e30, 3e-30, 4e-30], dtype=np.float32)

    norm_L = l2_norms(values_N, [2, 4])

    assert norm_L.tolist() == [pytest.approx(5e30), pytest.approx(5e-30)]


def test_the_norm_of_float32_is_exact_to_a_millionth() -> None:
    """20000 values of 0.1: the root of 200. float32 has 24 bits, 8192 terms a block."""
    values_N = np.full(20_000, 0.1, dtype=np.float32)

    assert l2_norm(values_N) == pytest.approx(14.142135623730951, rel=1e-6)


def test_norm_of_more_than_a_block() -> None:
    """100000 values of 2: the root of 400000."""
    values_N = np.full(100_000, 2.0, dtype=np.float16)

    assert l2_norm(values_N) == pytest.approx(632.4555320336759, rel=1e-12)


def test_norms_show_values_that_are_not_finite_without_a_warning() -> None:
    signalling_nan = np.array([0x7F800001], dtype=np.uint32).view(np.float32)
    values_N = np.concatenate(
        [np.array([1.0, np.inf, np.nan, 3.0], np.float32), signalling_nan]
    )

    norm_L = l2_norms(values_N, [1, 2, 3, 4, 5])

    assert norm_L[:2].tolist() == [1.0, math.inf]
    assert np.isnan(norm_L).tolist() == [False, False, True, False, True]


@pytest.mark.parametrize("ends", [[2], [3, 2, 4], [1, 5], [], [-1, 4]])
def test_tensors_that_do_not_fill_the_bucket_are_refused(ends: list[int]) -> None:
    with pytest.raises(ShapeError, match="the bucket at 4"):
        l2_norms(np.zeros(4, dtype=np.float32), ends)


@pytest.mark.parametrize(
    "values", [np.zeros(3, dtype=np.int32), np.zeros((2, 2), dtype=np.float32)]
)
def test_norms_of_what_is_not_flat_floats_are_refused(values: Any) -> None:
    with pytest.raises(ShapeError, match="norms are of flat floats"):
        l2_norm(values)


@pytest.mark.parametrize("fmt", ALL, ids=NAMES)
def test_each_chunk_has_its_norm_and_the_last_may_be_short(fmt: WireFormat) -> None:
    values_N = narrow(np.array([3.0, 4.0, 0.0, 0.0, 7.0], dtype=fmt.sum), fmt)

    assert chunk_norms(values_N, 2).tolist() == [5.0, 0.0, 7.0]


@pytest.mark.parametrize(
    ("num", "elements_per_chunk", "expected"),
    [
        (0, 4, []),
        (3, 4, [math.sqrt(12.0)]),
        (4, 4, [4.0]),
        (80_000, 40_000, [400.0, 400.0]),
        (100_000, 40_000, [400.0, 400.0, math.sqrt(80_000)]),
    ],
)
def test_chunk_norms_at_the_edges(
    num: int, elements_per_chunk: int, expected: list[float]
) -> None:
    values_N = np.full(num, 2.0, dtype=np.float32)

    assert chunk_norms(values_N, elements_per_chunk).tolist() == expected


def test_chunk_norms_of_many_blocks_keep_the_order_of_the_chunks() -> None:
    """Chunk c holds 4 values of c: norm 2 c."""
    values_N = np.repeat(np.arange(20_000, dtype=np.float32), 4)

    assert chunk_norms(values_N, 4).tolist() == [2.0 * c for c in range(20_000)]


def test_chunks_without_elements_are_refused() -> None:
    with pytest.raises(ShapeError, match="1 or more elements, not 0"):
        chunk_norms(np.zeros(2, dtype=np.float32), 0)


@pytest.mark.parametrize("fmt", ALL, ids=NAMES)
def test_a_format_works_after_pickling_and_copying(fmt: WireFormat) -> None:
    wire = narrow(np.array([1.5], dtype=fmt.sum), fmt)

    for twin in (pickle.loads(pickle.dumps(fmt)), copy.deepcopy(fmt)):
        assert twin == fmt
        assert widen(wire, twin).tolist() == [1.5]
