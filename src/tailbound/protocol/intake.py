"""Sort datagrams of one size by their fate: of the open round, or useless and why."""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.protocol.chunks import ChunkLayout
from tailbound.protocol.wire import HEADER_BYTES, PING, PREFIX_BYTES, VERSION
from tailbound.reduction import WireFormat


@dataclass(slots=True)
class LinkCounters:
    """Datagrams of one link by fate; bytes are not counted here."""

    accepted: int = 0
    """Of the open round; duplicates are in the round's report."""
    stale: int = 0
    """Of another round or direction."""
    foreign: int = 0
    """Of another session, rank or source address."""
    malformed: int = 0
    """Too short, of another version, or with a wrong sequence or length."""

    def __add__(self, other: "LinkCounters") -> "LinkCounters":
        sums = (
            getattr(self, item.name) + getattr(other, item.name)
            for item in fields(LinkCounters)
        )
        return LinkCounters(*sums)


def sort_datagrams(
    data: memoryview,
    headers_K: NDArray[np.void],
    segment_bytes: int,
    expected: NDArray[np.void],
    layout: ChunkLayout,
    counters: LinkCounters,
) -> NDArray[np.bool_]:
    """Find the datagrams that carry a chunk of the open round, and count the others.

    Args:
        data: the datagrams, back to back.
        headers_K: their headers.
        segment_bytes: bytes of each.
        expected: any header of the open round.
        layout: how its bucket is cut.
        counters: added to.

    Returns:
        use_K: True where the chunk may be taken in. All of them are full chunks, or
        all are the short last one, since all datagrams have one size.
    """
    num = len(headers_K)
    prefix = np.frombuffer(expected.tobytes()[:PREFIX_BYTES], np.uint64)
    words_K2 = np.ndarray((num, 2), np.uint64, data, 0, (segment_bytes, 8))
    valid_K: NDArray[np.bool_] = (words_K2 == prefix).all(axis=1)
    valid_K &= headers_K["rank"] == expected["rank"]
    if not valid_K.all():
        ours_K = count_invalid(
            headers_K, int(expected["session"]), int(expected["rank"]), counters
        )
        counters.stale += int(np.count_nonzero(ours_K & ~valid_K))
    room = segment_bytes - HEADER_BYTES
    chunks_K = headers_K["sequence"]
    if 0 < room == layout.tail_bytes:
        fits_K = chunks_K == layout.num_full
    elif room == layout.chunk_bytes:
        fits_K = chunks_K < layout.num_full
    else:
        fits_K = np.zeros(num, np.bool_)
    use_K: NDArray[np.bool_] = valid_K & fits_K & (headers_K["length"] == room)
    counters.malformed += int(np.count_nonzero(valid_K & ~use_K))
    counters.accepted += int(np.count_nonzero(use_K))
    return use_K


def count_invalid(
    headers_K: NDArray[np.void], session: int, rank: int, counters: LinkCounters
) -> NDArray[np.bool_]:
    """Count what is of another version, session or rank.

    Returns:
        valid_K: False for those.
    """
    known_K = (headers_K["version"] == VERSION) & (headers_K["kind"] <= PING)
    ours_K: NDArray[np.bool_] = known_K & (headers_K["session"] == session)
    ours_K &= headers_K["rank"] == rank
    num_known = int(np.count_nonzero(known_K))
    counters.malformed += len(headers_K) - num_known
    counters.foreign += num_known - int(np.count_nonzero(ours_K))
    return ours_K


def rows_of(
    data: memoryview, num: int, segment_bytes: int, wire_format: WireFormat
) -> NDArray[Any]:
    """The chunks of equal datagrams, as rows of elements; a view."""
    dtype = wire_format.wire
    return np.ndarray(
        (num, (segment_bytes - HEADER_BYTES) // dtype.itemsize),
        dtype,
        data,
        HEADER_BYTES,
        (segment_bytes, dtype.itemsize),
    )
