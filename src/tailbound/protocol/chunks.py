"""How a bucket is cut into chunks, in which order they leave, and packing a batch.

Axes: N elements of the bucket, C chunks, K chunks of one batch, E elements a chunk.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tailbound.config import Order
from tailbound.errors import ShapeError
from tailbound.protocol.wire import HEADER_BYTES, MAX_SEQUENCE

GOLDEN_RATIO = 0.6180339887498949
"""Multiples of it modulo 1 are spread evenly, so starts do not repeat soon."""


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """A bucket of ``num_elements`` cut into datagram-sized chunks.

    An element is never split: a chunk holds as many whole elements as fit, and the
    last one may be shorter. Chunk i is elements [i * E, (i + 1) * E).
    """

    num_elements: int
    itemsize: int
    """Bytes of an element on the wire: 2, 4 or 8."""
    room_bytes: int
    """Bytes of data that a datagram has room for."""

    elements_per_chunk: int = field(init=False, repr=False, compare=False)
    """E, of every chunk but possibly the last."""
    num_chunks: int = field(init=False, repr=False, compare=False)
    """C."""
    num_full: int = field(init=False, repr=False, compare=False)
    """Chunks that have all E elements: C or C - 1."""
    chunk_bytes: int = field(init=False, repr=False, compare=False)
    """Data bytes of a full chunk."""
    tail_bytes: int = field(init=False, repr=False, compare=False)
    """Data bytes of the short last chunk, 0 if there is none."""
    segment_bytes: int = field(init=False, repr=False, compare=False)
    """Bytes of a full datagram, header included."""

    def __post_init__(self) -> None:
        if self.num_elements < 1:
            raise ShapeError("a bucket has at least one element")
        if self.itemsize not in (2, 4, 8):
            raise ShapeError(f"elements have 2, 4 or 8 bytes, not {self.itemsize}")
        if self.room_bytes < self.itemsize:
            raise ShapeError(f"no element fits into {self.room_bytes} bytes")
        per_chunk = self.room_bytes // self.itemsize
        full, rest = divmod(self.num_elements, per_chunk)
        # Stored, not computed on demand: the hot path asks five times a batch.
        for name, value in (
            ("elements_per_chunk", per_chunk),
            ("num_chunks", full + (rest > 0)),
            ("num_full", full),
            ("chunk_bytes", per_chunk * self.itemsize),
            ("tail_bytes", rest * self.itemsize),
            ("segment_bytes", HEADER_BYTES + per_chunk * self.itemsize),
        ):
            object.__setattr__(self, name, value)
        if self.num_chunks - 1 > MAX_SEQUENCE:
            raise ShapeError(
                f"{self.num_chunks} chunks do not fit the 32-bit sequence number; "
                "use smaller buckets or a larger MTU"
            )

    def num_bytes(self, chunks_K: NDArray[np.int64]) -> int:
        """Data bytes of these chunks."""
        total = len(chunks_K) * self.chunk_bytes
        if self.tail_bytes:
            short = int(np.count_nonzero(chunks_K == self.num_full))
            total -= short * (self.chunk_bytes - self.tail_bytes)
        return total


def allowed_missing(p: float, num_chunks: int) -> int:
    """Chunks that may be missing when a round closes: floor(p * C), never all.

    Source: spec N5 and its worked values; "never all": DESIGN decision 9.
    """
    # 0.29 * 100 is 28.999999999999996 in floats: 1e-9 restores the exact floor and
    # is far below 1/C for any bucket that fits the sequence number's practical range.
    return min(int(p * num_chunks + 1e-9), num_chunks - 1)


def beyond_bound(missing: int, p: float, num_chunks: int) -> int:
    """Chunks that are missing beyond what the bound allows: a deadline gave them up."""
    return max(0, missing - allowed_missing(p, num_chunks))


def send_order(
    order: Order,
    num_chunks: int,
    *,
    counter: int,
    share: float,
    norm_C: NDArray[np.float64] | None = None,
) -> NDArray[np.int64]:
    """The order in which chunks leave (DESIGN decision 6).

    Args:
        order: ``fixed`` 0..C-1; ``rotate`` the same from another start each round;
            ``norm`` the largest norm first.
        num_chunks: C.
        counter: the round's counter.
        share: in [0, 1), shifts this sender's start against the other senders'.
        norm_C: a norm per chunk, for ``norm``.

    Returns:
        A permutation of 0..C-1.
    """
    if order == "norm":
        if norm_C is None or norm_C.shape != (num_chunks,):
            raise ShapeError(f"order 'norm' needs {num_chunks} norms")
        # NaN sorts last in ascending order; -norm puts the largest first, NaN last.
        return np.argsort(-norm_C, kind="stable").astype(np.int64)
    chunks_C = np.arange(num_chunks, dtype=np.int64)
    if order == "fixed":
        return chunks_C
    start = int(((counter * GOLDEN_RATIO + share) % 1.0) * num_chunks)
    return np.roll(chunks_C, -start)


def is_run(chunks_K: NDArray[np.int64]) -> bool:
    """True if the numbers grow by one from each to the next."""
    num = len(chunks_K)
    if int(chunks_K[-1]) - int(chunks_K[0]) != num - 1:
        return False
    return bool((chunks_K[1:] - chunks_K[:-1] == 1).all())
