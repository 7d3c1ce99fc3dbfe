"""Assemble the parts of an all-gather, which come in pieces over TCP."""

from collections import deque

from tailbound.errors import WireError
from tailbound.protocol.wire import GATHER_PIECE_BYTES, GatherPart

MAX_GATHER_BYTES = 1 << 32
"""A rank's contribution may not be longer; bounds what a peer can make us hold."""


def cut_pieces(rank: int, data: bytes) -> list[GatherPart]:
    """Cut a contribution into messages; an empty one is one empty message."""
    starts = range(0, max(len(data), 1), GATHER_PIECE_BYTES)
    return [
        GatherPart(rank, len(data), start, data[start : start + GATHER_PIECE_BYTES])
        for start in starts
    ]


class Gather:
    """All ranks' contributions, in rank order, one gather after the other.

    A fast rank may already send its next contribution, so complete ones queue up.
    """

    def __init__(self, world_size: int) -> None:
        self._partial = [bytearray() for _ in range(world_size)]
        self._complete: list[deque[bytes]] = [deque() for _ in range(world_size)]

    def receive_untrusted(self, part: GatherPart) -> None:
        """Take in a piece.

        Raises:
            WireError: rank, offset or length is not what must come next.
        """
        if not 0 <= part.rank < len(self._partial):
            raise WireError(f"a gather part of rank {part.rank}")
        partial = self._partial[part.rank]
        end = part.offset + len(part.data)
        if (
            part.offset != len(partial)
            or end > part.total_bytes
            or part.total_bytes > MAX_GATHER_BYTES
        ):
            raise WireError(
                f"gather bytes {part.offset} to {end} of {part.total_bytes}"
            )
        partial += part.data
        if end == part.total_bytes:
            self._complete[part.rank].append(bytes(partial))
            partial.clear()

    def pop(self) -> tuple[bytes, ...] | None:
        """The oldest complete gather, or None."""
        if not all(self._complete):
            return None
        return tuple(queue.popleft() for queue in self._complete)
