"""Where the data of a receiver's new chunks goes: into a sum, or into its place.

Axes: N elements of the bucket, C chunks, K chunks of one batch, E elements a chunk.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tailbound.protocol.chunks import ChunkLayout
from tailbound.reduction import WireFormat, add_into, widen

ONES = b"\1" * 65536
"""As many as the datagrams of the largest batch."""


class Sink(Protocol):
    """Takes each chunk exactly once from each receiver."""

    def put_run(self, first: int, rows_KE: NDArray[np.generic]) -> None:
        """Full chunks first, first + 1, ..."""
        ...

    def put(self, chunks_K: NDArray[np.int64], rows_KE: NDArray[np.generic]) -> None:
        """Full chunks in any order."""
        ...

    def put_tail(self, row_E: NDArray[np.generic]) -> None:
        """The short last chunk."""
        ...


class _RowSink:
    """The rows of an array of N elements, C - 1 or C full ones and a tail."""

    def __init__(self, values_N: NDArray[np.generic], layout: ChunkLayout) -> None:
        cut = layout.num_full * layout.elements_per_chunk
        self._rows_CE = values_N[:cut].reshape(
            layout.num_full, layout.elements_per_chunk
        )
        self._tail_E = values_N[cut:]


class SumSink(_RowSink):
    """One sum of all ranks' chunks, added while they are hot (no copy per rank).

    The first to bring a chunk overwrites what stands there, so that a sum need not be
    cleared before a round; :meth:`fill_holes` clears what nobody brought.

    Args:
        sum_N: the accumulator, in ``wire_format.sum``.
        layout: how the bucket is cut.
        wire_format: of what arrives.
        is_empty: False: what stands in ``sum_N`` is the first contribution.
    """

    def __init__(
        self,
        sum_N: NDArray[np.generic],
        layout: ChunkLayout,
        wire_format: WireFormat,
        *,
        is_empty: bool = True,
    ) -> None:
        super().__init__(sum_N, layout)
        self._format = wire_format
        self._touched = bytearray(layout.num_chunks)
        self._touched_C: NDArray[np.bool_] = np.frombuffer(self._touched, np.bool_)
        if not is_empty:
            self._touched_C[:] = True

    def put_run(self, first: int, rows_KE: NDArray[np.generic]) -> None:
        """See Sink."""
        stop = first + len(rows_KE)
        place_KE = self._rows_CE[first:stop]
        if self._touched.find(1, first, stop) < 0:
            place_KE[...] = widen(rows_KE, self._format)
        else:
            if self._touched.find(0, first, stop) >= 0:
                place_KE[~self._touched_C[first:stop]] = 0
            add_into(place_KE, rows_KE, self._format)
        self._touched[first:stop] = ONES[: stop - first]

    def put(self, chunks_K: NDArray[np.int64], rows_KE: NDArray[np.generic]) -> None:
        """See Sink."""
        is_touched_K = self._touched_C[chunks_K]
        if is_touched_K.any():
            picked_KE = self._rows_CE[chunks_K]
            picked_KE[~is_touched_K] = 0
            add_into(picked_KE, rows_KE, self._format)
            self._rows_CE[chunks_K] = picked_KE
        else:
            self._rows_CE[chunks_K] = widen(rows_KE, self._format)
        self._touched_C[chunks_K] = True

    def put_tail(self, row_E: NDArray[np.generic]) -> None:
        """See Sink."""
        if not self._touched_C[-1]:
            self._tail_E[...] = 0
            self._touched_C[-1] = True
        add_into(self._tail_E, row_E, self._format)

    def fill_holes(self) -> None:
        """Clear what nobody brought, and be empty for the next round."""
        if self._touched.find(0) >= 0:
            full = len(self._rows_CE)
            self._rows_CE[~self._touched_C[:full]] = 0
            if len(self._touched_C) > full and not self._touched_C[-1]:
                self._tail_E[...] = 0
        self._touched_C[:] = False


class StoreSink(_RowSink):
    """Puts chunks into their place."""

    def put_run(self, first: int, rows_KE: NDArray[np.generic]) -> None:
        """See Sink."""
        self._rows_CE[first : first + len(rows_KE)] = rows_KE

    def put(self, chunks_K: NDArray[np.int64], rows_KE: NDArray[np.generic]) -> None:
        """See Sink."""
        self._rows_CE[chunks_K] = rows_KE

    def put_tail(self, row_E: NDArray[np.generic]) -> None:
        """See Sink."""
        self._tail_E[...] = row_E

    def clear(self, missing_C: NDArray[np.bool_]) -> None:
        """Put zeros where nothing came."""
        full = len(self._rows_CE)
        self._rows_CE[missing_C[:full]] = 0
        if missing_C[full:].any():
            self._tail_E[...] = 0
