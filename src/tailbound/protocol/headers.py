"""All headers of a bucket's datagrams, prepared: written and checked a batch at a time.

A round's headers are known in advance but for the counter. Sending copies a run of
them; receiving compares a run of them, which checks version, kind, bucket, counter,
session, sequence, length and rank in one operation.
"""

import numpy as np
from numpy.typing import NDArray

from tailbound.errors import ShapeError
from tailbound.protocol.chunks import ChunkLayout, is_run
from tailbound.protocol.events import RoundKey
from tailbound.protocol.wire import HEADER, HEADER_BYTES, make_header

_OPAQUE = np.dtype(f"V{HEADER_BYTES}")


class HeaderTable:
    """The headers of one bucket from one sender, set to one round at a time."""

    def __init__(
        self, layout: ChunkLayout, key: RoundKey, session: int, rank: int
    ) -> None:
        self.layout, self.key = layout, key
        self.headers_C = np.empty(layout.num_chunks, HEADER)
        self.headers_C[...] = make_header(key, session, rank)
        self.headers_C["sequence"] = np.arange(layout.num_chunks)
        self.headers_C["length"] = layout.chunk_bytes
        if layout.tail_bytes:
            self.headers_C["length"][-1] = layout.tail_bytes
        self._num_full = layout.num_full
        self._bytes = self.headers_C.tobytes()
        self._raw_CB = self.headers_C.view(np.uint8).reshape(
            layout.num_chunks, HEADER_BYTES
        )

    def set_round(self, key: RoundKey) -> None:
        """Turn to another round of the same bucket."""
        self.key = key
        self.headers_C["kind"] = key.direction
        self.headers_C["counter"] = key.counter
        self._bytes = self.headers_C.tobytes()

    def match(
        self, data: memoryview, num: int, segment_bytes: int
    ) -> int | NDArray[np.int64] | None:
        """Check that full datagrams are all this round's.

        Args:
            data: at least ``num`` datagrams back to back.
            num: datagrams, >= 1.
            segment_bytes: bytes of each, not less than a header.

        Returns:
            The first one's chunk number if they follow each other, their chunk numbers
            if they do not, or None if any header is not as expected.
        """
        # Comparing bytes takes a third of the time of comparing arrays this small.
        headers_K = np.ndarray((num,), _OPAQUE, data, 0, (segment_bytes,)).tobytes()
        first = int.from_bytes(data[16:20], "big")
        if (
            first + num <= self._num_full
            and headers_K
            == self._bytes[first * HEADER_BYTES : (first + num) * HEADER_BYTES]
        ):
            return first
        chunks_K = np.ndarray((num,), ">u4", data, 16, (segment_bytes,)).astype(
            np.int64
        )
        is_known = (
            num > 1
            and int(chunks_K.max()) < self._num_full
            and headers_K == self._raw_CB[chunks_K].tobytes()
        )
        return chunks_K if is_known else None

    def write(
        self,
        chunks_K: NDArray[np.int64] | slice,
        out_KB: NDArray[np.uint8],
    ) -> None:
        """Write the headers of these chunks into rows of HEADER_BYTES bytes."""
        out_KB[...] = self._raw_CB[chunks_K]


class BucketBytes:
    """A bucket's memory as rows of chunks, to be packed into datagrams."""

    def __init__(self, values_N: NDArray[np.generic], layout: ChunkLayout) -> None:
        if values_N.shape != (layout.num_elements,) or not values_N.flags.c_contiguous:
            raise ShapeError(
                f"the bucket is {layout.num_elements} contiguous elements, "
                f"not an array of shape {values_N.shape}"
            )
        if values_N.itemsize != layout.itemsize:
            raise ShapeError(
                f"elements have {layout.itemsize} bytes, not {values_N.itemsize}"
            )
        raw = values_N.view(np.uint8)
        cut = layout.num_full * layout.chunk_bytes
        self.layout = layout
        self._full_CB = raw[:cut].reshape(layout.num_full, layout.chunk_bytes)
        self._tail = raw[cut:]
        self._has_tail = layout.tail_bytes > 0

    def pack(
        self,
        chunks_K: NDArray[np.int64],
        table: HeaderTable,
        out: memoryview,
        *,
        is_ascending: bool = False,
    ) -> int:
        """Write datagrams for these chunks back to back.

        Args:
            chunks_K: chunk numbers; a short last chunk only at the end.
            table: the round's headers.
            out: room for them; at least K * segment_bytes.
            is_ascending: the numbers are known to grow, but for one wrap-around.

        Returns:
            Bytes written.
        """
        layout = self.layout
        num, segment = len(chunks_K), layout.segment_bytes
        has_tail = self._has_tail and int(chunks_K[-1]) == layout.num_full
        num_full = num - 1 if has_tail else num
        if num_full:
            full_K = chunks_K[:num_full] if has_tail else chunks_K
            rows: NDArray[np.int64] | slice = full_K
            first = int(full_K[0])
            spans = int(full_K[-1]) - first == num_full - 1
            if spans and (is_ascending or is_run(full_K)):
                rows = slice(first, first + num_full)
            out_KB = np.ndarray((num_full, segment), np.uint8, out)
            table.write(rows, out_KB[:, :HEADER_BYTES])
            self._write_full(rows, out_KB[:, HEADER_BYTES:])
        end = num_full * segment
        if has_tail:
            start, end = end, end + HEADER_BYTES + layout.tail_bytes
            tail_B = np.ndarray((1, end - start), np.uint8, out, start)
            table.write(chunks_K[-1:], tail_B[:, :HEADER_BYTES])
            self._write_tail(tail_B[0, HEADER_BYTES:])
        return end

    def _write_full(
        self, rows: NDArray[np.int64] | slice, out_KB: NDArray[np.uint8]
    ) -> None:
        out_KB[...] = self._full_CB[rows]

    def _write_tail(self, out_B: NDArray[np.uint8]) -> None:
        out_B[...] = self._tail


class MeanBytes(BucketBytes):
    """A sum over ranks that is divided on its way into the datagrams.

    The copy is bound by memory, so the division costs next to nothing there, while a
    pass of its own over the bucket would cost as much as a copy. Every time a chunk is
    packed, for whichever rank, the bits are the same.

    Args:
        sum_N: the sum, of a dtype that is its own on the wire.
        layout: how it is cut.
        total_weight: what is behind it, > 0.
    """

    def __init__(
        self, sum_N: NDArray[np.generic], layout: ChunkLayout, total_weight: float
    ) -> None:
        super().__init__(sum_N, layout)
        self._dtype = sum_N.dtype
        self._weight = sum_N.dtype.type(total_weight)
        cut = layout.num_full * layout.elements_per_chunk
        self._full_CE = sum_N[:cut].reshape(layout.num_full, layout.elements_per_chunk)
        self._tail_E = sum_N[cut:]

    @np.errstate(over="ignore", invalid="ignore")
    def _write_full(
        self, rows: NDArray[np.int64] | slice, out_KB: NDArray[np.uint8]
    ) -> None:
        np.divide(self._full_CE[rows], self._weight, out=out_KB.view(self._dtype))

    @np.errstate(over="ignore", invalid="ignore")
    def _write_tail(self, out_B: NDArray[np.uint8]) -> None:
        np.divide(self._tail_E, self._weight, out=out_B.view(self._dtype))
