"""The arithmetic of a round: widen what arrived, add it up, divide, and take norms.

Gradients travel in the dtype of the model and are summed in a wider one. NumPy knows
no bfloat16, so its values are here uint16, the upper half of a float32's bits.

A rank sends its gradient ALREADY multiplied by its weight (the sum over its samples),
so that the mean is the sum over ranks divided by the total weight.

Axes: R rows (chunks of one batch), C chunks, E elements of a chunk, N elements of a
bucket, L tensors, W workers. An overflow gives inf, silently: the loss scaler of the
caller looks for it.

Source: spec N6; DESIGN, 5 and 12.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tailbound.errors import ConfigError, ShapeError

Values = NDArray[Any]
F64 = NDArray[np.float64]
Mask = NDArray[np.bool_]

BLOCK_ELEMENTS = 1 << 15
"""Elements that are converted at once: temporaries stay in the second-level cache."""
DOT_ELEMENTS = 1 << 13
"""Elements of one dot product. Above 10 000 OpenBLAS wakes threads that then spin,
which took the core of the worker beside us and made a round three times slower."""


SAFE_SQUARE = (1e-20, 1e38)
"""Sums of squares that float32 holds without overflow or a loss to underflow."""


@dataclass(frozen=True, slots=True)
class WireFormat:
    """How the elements of a bucket look on the wire and in the sum."""

    name: str
    """Such as ``bfloat16``; the name that ranks compare in the handshake."""
    wire: np.dtype[Any]
    """Dtype of the bytes on the wire, little-endian. bfloat16: uint16."""
    sum: np.dtype[Any]
    """Dtype of the accumulator."""


FORMATS: dict[str, WireFormat] = {
    name: WireFormat(name, np.dtype(wire), np.dtype(wide))
    for name, wire, wide in (
        ("float32", "<f4", "<f4"),
        ("float64", "<f8", "<f8"),
        ("float16", "<f2", "<f4"),
        ("bfloat16", "<u2", "<f4"),
    )
}
BY_WIRE = {fmt.wire: fmt for fmt in FORMATS.values()}


def widen(values: Values, fmt: WireFormat) -> Values:
    """Convert from the wire to the accumulator's dtype; a view where they are equal."""
    if fmt.name == "bfloat16":
        bits = values.astype(np.uint32)
        bits <<= 16
        return bits.view(fmt.sum)
    if fmt.name == "float16":
        # NumPy's own conversion takes three times as long as this table.
        return float16_table().take(values.view(np.uint16), mode="clip")
    return values.astype(fmt.sum, copy=False)


def narrow(values: Values, fmt: WireFormat) -> Values:
    """Convert from the accumulator's to the wire dtype, to nearest, ties to even.

    NaN stays NaN and inf stays inf; a value out of range becomes inf. A view where
    the two are equal.
    """
    if fmt.name == "bfloat16":
        return narrow_bfloat16(values).astype(fmt.wire)
    if fmt.name == "float16":
        return narrow_float16(values).astype(np.uint16).view(fmt.wire)
    return values.astype(fmt.wire, copy=False)


# As a decorator errstate costs half of what the with statement costs here.
@np.errstate(over="ignore", invalid="ignore")
def add_into(sum_RE: Values, rows_RE: Values, fmt: WireFormat) -> None:
    """Add a batch of chunks to the sum, in place: the hot path of the receiver.

    Args:
        sum_RE: part of the accumulator, in ``fmt.sum``.
        rows_RE: the chunks' data, in ``fmt.wire``; may be strided, unaligned and
            read-only, as it lies between the headers of a batch of datagrams.
        fmt: the bucket's format.

    Raises:
        ShapeError: shapes or dtypes differ from that.
    """
    if sum_RE.shape != rows_RE.shape:
        raise ShapeError(f"sum is {sum_RE.shape}, rows are {rows_RE.shape}")
    if sum_RE.dtype != fmt.sum or rows_RE.dtype != fmt.wire:
        raise ShapeError(
            f"{fmt.name} adds {fmt.wire} rows to a {fmt.sum} sum, "
            f"not {rows_RE.dtype} to {sum_RE.dtype}"
        )
    np.add(sum_RE, widen(rows_RE, fmt), out=sum_RE)


def finish_mean(
    sum_N: Values,
    total_weight: float,
    fmt: WireFormat,
    *,
    weight_C: F64 | None = None,
    elements_per_chunk: int | None = None,
    out: Values | None = None,
) -> Values:
    """Divide the sum over ranks by the weight behind it, and narrow it for the wire.

    Without ``weight_C`` a missing chunk counts as zero (the paper). With it, each
    chunk is the mean of what arrived, and one that nobody delivered is 0.

    Args:
        sum_N: gradients, each already multiplied by its rank's weight, in ``fmt.sum``.
        total_weight: sum of the weights of all ranks, > 0.
        fmt: the bucket's format.
        weight_C: the weight that arrived per chunk, >= 0.
        elements_per_chunk: E, needed with ``weight_C``; the last chunk may be short.
        out: where to write, N elements in ``fmt.wire``; ``sum_N`` itself is allowed.

    Returns:
        ``out``, or a new array of N elements in ``fmt.wire``.

    Raises:
        ConfigError: total_weight is not a positive number.
        ShapeError: an array does not have the length or the dtype stated above.

    Source: DBLP, algorithm 3; DESIGN, 5 and 12.
    """
    if not (total_weight > 0.0 and math.isfinite(total_weight)):
        raise ConfigError(f"total_weight is a positive number, not {total_weight}")
    if sum_N.dtype != fmt.sum or sum_N.ndim != 1:
        raise ShapeError(f"sum is flat and {fmt.sum}, not {sum_N.ndim}-d {sum_N.dtype}")
    if out is None:
        out = np.empty(len(sum_N), dtype=fmt.wire)
    elif out.shape != sum_N.shape or out.dtype != fmt.wire:
        raise ShapeError(
            f"out is {sum_N.shape} {fmt.wire}, not {out.shape} {out.dtype}"
        )
    if weight_C is None:
        divide_into(out, sum_N, fmt.sum.type(total_weight), fmt)
        return out
    for chunks, first, stop in chunk_blocks(len(sum_N), elements_per_chunk, weight_C):
        weight_R = weight_C[chunks, None].astype(fmt.sum)
        shape = (len(weight_R), -1)
        divide_into(
            out[first:stop].reshape(shape),
            sum_N[first:stop].reshape(shape),
            np.where(weight_R > 0.0, weight_R, np.inf),
            fmt,
        )
    return out


def masked_mean(grad_WN: Values, arrived_WN: Mask, weight_W: F64) -> tuple[F64, F64]:
    """Average, element by element, what arrived: the reference of the tests.

    An element that nobody delivered is 0.0 with weight 0.0. What stands in a hole
    is never read, NaN included. Unlike in :func:`finish_mean`, the gradients are not
    yet multiplied by the weights.

    Args:
        grad_WN: one mean gradient per worker.
        arrived_WN: True where the element arrived.
        weight_W: samples, tokens or micro-batches that each worker finished, >= 0.

    Returns:
        mean_N, and total_N: the weight behind each element.

    Raises:
        ShapeError: the three do not agree on W and N.

    Source: Giladi et al. 2023 (arXiv:2306.10598); DESIGN, 5 and 12.
    """
    if grad_WN.shape != arrived_WN.shape or grad_WN.shape[:1] != weight_W.shape:
        raise ShapeError(
            f"gradients are {grad_WN.shape}, arrived is {arrived_WN.shape}, "
            f"weights are {weight_W.shape}; they must be (W, N), (W, N), (W,)"
        )
    counts_WN = arrived_WN & (weight_W[:, None] > 0.0)
    total_N = weight_W @ counts_WN.astype(np.float64)
    sum_N = weight_W @ np.where(counts_WN, grad_WN, 0.0).astype(np.float64)
    return sum_N / np.where(total_N > 0.0, total_N, 1.0), total_N


def l2_norms(values_N: Values, ends_L: ArrayLike) -> F64:
    """L2 norm of each tensor of a flat bucket, its blocks summed in float64.

    Args:
        values_N: floats of any width; uint16 is read as bfloat16.
        ends_L: where each tensor ends, ascending; the last is N.

    Returns:
        norm_L: not finite for a tensor with a value that is not finite.

    Raises:
        ShapeError: ends_L does not ascend to N, or values_N is not flat floats.
    """
    bounds = [0, *np.asarray(ends_L, dtype=np.int64).tolist()]
    spans = list(itertools.pairwise(bounds))
    if bounds[-1] != len(values_N) or any(stop < start for start, stop in spans):
        raise ShapeError(f"tensors end at {bounds[1:]}, the bucket at {len(values_N)}")
    return np.array([l2_norm(values_N[start:stop]) for start, stop in spans])


@np.errstate(over="ignore", invalid="ignore")
def l2_norm(values_N: Values) -> float:
    """L2 norm of a flat array; see :func:`l2_norms`.

    Blocks of float32 are squared in float32, which is exact to about 1e-6 and takes a
    third of the time; a block that comes near its range is squared in float64.
    """
    total = 0.0
    if values_N.dtype != np.float32 or values_N.ndim != 1:
        for block in float64_blocks(values_N, DOT_ELEMENTS):
            total += float(np.dot(block, block))
        return math.sqrt(total)
    for start in range(0, len(values_N), DOT_ELEMENTS):
        narrow_block = values_N[start : start + DOT_ELEMENTS]
        square = float(np.dot(narrow_block, narrow_block))
        if not SAFE_SQUARE[0] < square < SAFE_SQUARE[1]:
            (block,) = float64_blocks(narrow_block, DOT_ELEMENTS)
            square = float(np.dot(block, block))
        total += square
    return math.sqrt(total)


def chunk_norms(values_N: Values, elements_per_chunk: int) -> F64:
    """L2 norm of each chunk, for the order that sends the largest first.

    Args:
        values_N: floats of any width; uint16 is read as bfloat16.
        elements_per_chunk: E; the last chunk may be short.

    Returns:
        norm_C.

    Raises:
        ShapeError: E is not positive, or values_N is not flat floats.
    """
    if elements_per_chunk < 1:
        raise ShapeError(f"a chunk has 1 or more elements, not {elements_per_chunk}")
    rows = max(1, BLOCK_ELEMENTS // elements_per_chunk)
    parts = []
    for block in float64_blocks(values_N, rows * elements_per_chunk):
        full = len(block) // elements_per_chunk * elements_per_chunk
        full_RE, short = block[:full].reshape(-1, elements_per_chunk), block[full:]
        parts.append(np.einsum("re,re->r", full_RE, full_RE))
        if len(short):
            parts.append(np.array([np.dot(short, short)]))
    return np.sqrt(np.concatenate(parts)) if parts else np.empty(0)


def divide_into(out: Values, total: Values, weight: Any, fmt: WireFormat) -> None:
    """Write total / weight in the wire dtype; the quotient is never held as a whole."""
    with np.errstate(over="ignore", invalid="ignore"):
        if fmt.wire == fmt.sum:
            np.divide(total, weight, out=out)
        elif total.ndim == 2:
            out[...] = narrow(np.divide(total, weight), fmt)
        else:
            for start in range(0, len(total), BLOCK_ELEMENTS):
                part = slice(start, start + BLOCK_ELEMENTS)
                out[part] = narrow(np.divide(total[part], weight), fmt)


def chunk_blocks(
    num_elements: int, elements_per_chunk: int | None, weight_C: F64
) -> Iterator[tuple[slice, int, int]]:
    """Yield (chunks, first element, end) of blocks of whole chunks, then a short one.

    Raises:
        ShapeError: elements_per_chunk is missing, or weight_C has another length.
    """
    if elements_per_chunk is None or elements_per_chunk < 1:
        raise ShapeError("weight_C needs elements_per_chunk, 1 or more")
    chunks = -(-num_elements // elements_per_chunk)
    if weight_C.shape != (chunks,):
        raise ShapeError(
            f"{num_elements} elements in chunks of {elements_per_chunk} need "
            f"({chunks},) weights, not {weight_C.shape}"
        )
    full = num_elements // elements_per_chunk
    rows = max(1, BLOCK_ELEMENTS // elements_per_chunk)
    for first in range(0, full, rows):
        stop = min(full, first + rows)
        yield (
            slice(first, stop),
            first * elements_per_chunk,
            stop * elements_per_chunk,
        )
    if full < chunks:
        yield slice(full, chunks), full * elements_per_chunk, num_elements


def float64_blocks(values_N: Values, num: int) -> Iterator[F64]:
    """Yield consecutive blocks of ``num`` elements as float64.

    Raises:
        ShapeError: values_N is not flat, or neither float nor uint16 (bfloat16).
    """
    fmt = BY_WIRE.get(values_N.dtype)
    if values_N.ndim != 1 or fmt is None:
        raise ShapeError(
            "norms are of flat floats or bfloat16 bits, "
            f"not {values_N.ndim}-d {values_N.dtype}"
        )
    for start in range(0, len(values_N), num):
        # A signalling NaN would warn when it is converted.
        with np.errstate(invalid="ignore"):
            block = widen(values_N[start : start + num], fmt).astype(np.float64)
        yield block


def narrow_bfloat16(values: Values) -> Values:
    """Round float32 to the bits of bfloat16."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    # Just under half of what is cut off, and one more if the kept part is odd, carries
    # into the kept part exactly when it must be rounded up.
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    # A NaN may have carried into inf or wrapped: keep its upper half, made quiet.
    is_nan = np.isnan(values)
    if is_nan.any():
        rounded[is_nan] = (bits[is_nan] >> 16) | 0x40
    return rounded


def narrow_float16(values: Values) -> Values:
    """Round float32 to the bits of float16.

    NumPy's own conversion takes 100 ns for each value below float16's normal range,
    since it raises a floating-point exception; small gradients are such values.

    Source: F. Giesen, "float->half variants", 2012 (round to nearest even).
    """
    bits: Values = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    sign = bits >> 16
    sign &= 0x8000
    bits = bits & 0x7FFFFFFF
    # Normal: as for bfloat16, and the exponent's bias goes from 127 to 15.
    half = bits >> 13
    half &= 1
    half += bits
    half += (0xFFF - (112 << 23)) & 0xFFFFFFFF
    half >>= 13
    # Below: adding 0.5 leaves the float16 mantissa, rounded, in the lowest bits.
    is_small = bits < 113 << 23
    if is_small.any():
        small = bits[is_small].view(np.float32)
        small += np.float32(0.5)
        half[is_small] = small.view(np.uint32) - (126 << 23)
    # Above: what rounds past 65504 is inf, and NaN becomes the quiet one.
    is_large = bits >= 143 << 23
    if is_large.any():
        half[is_large] = np.where(bits[is_large] > 255 << 23, 0x7E00, 0x7C00)
    half |= sign
    return half


@functools.cache
def float16_table() -> NDArray[np.float32]:
    """The float32 value of each of the 65536 float16 bit patterns, 256 KiB."""
    with np.errstate(invalid="ignore"):
        return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
