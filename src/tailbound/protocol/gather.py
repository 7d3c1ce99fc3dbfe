"""Assemble the parts of an all-gather, which come in pieces over TCP."""

from collections import deque

from tailbound.errors import WireError
from tailbound.protocol.messages import GatherPart
from tailbound.protocol.wire import GATHER_PIECE_BYTES

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
        end = check_piece_untrusted(part, len(partial))
        partial += part.data
        if end == part.total_bytes:
            self._complete[part.rank].append(bytes(partial))
            partial.clear()

    def pop(self) -> tuple[bytes, ...] | None:
        """The oldest complete gather, or None."""
        if not all(self._complete):
            return None
        return tuple(queue.popleft() for queue in self._complete)

    @property
    def late_ranks(self) -> list[int]:
        """Ranks whose contribution to the oldest gather is not complete."""
        return [rank for rank, queue in enumerate(self._complete) if not queue]


class GatherWatch:
    """What the server, which relays pieces and keeps none, knows of the gathers.

    It sees to it that none waits for ever for a rank that does not join.
    """

    def __init__(self, world_size: int) -> None:
        self._bytes_W = [0] * world_size
        """Of each rank's contribution that is under way."""
        self._complete_W = [0] * world_size
        """Contributions that each rank completed."""
        self.opened_s: float | None = None
        """Since when the oldest unfinished gather is the oldest; None: there is none.
        """

    def receive_untrusted(self, part: GatherPart, now: float) -> None:
        """Take note of a piece; its rank is in range already.

        Raises:
            WireError: offset or length is not what must come next.
        """
        before = min(self._complete_W)
        self._bytes_W[part.rank] = check_piece_untrusted(part, self._bytes_W[part.rank])
        if self._bytes_W[part.rank] == part.total_bytes:
            self._bytes_W[part.rank] = 0
            self._complete_W[part.rank] += 1
        oldest = min(self._complete_W)
        if not any(self._bytes_W) and oldest == max(self._complete_W):
            self.opened_s = None
        elif self.opened_s is None or oldest > before:
            self.opened_s = now

    @property
    def late_ranks(self) -> list[int]:
        """Ranks whose contribution to the oldest unfinished gather is not complete."""
        oldest = min(self._complete_W)
        return [rank for rank, num in enumerate(self._complete_W) if num == oldest]


def check_piece_untrusted(part: GatherPart, num_before: int) -> int:
    """Bytes of a contribution that are there with this piece.

    Raises:
        WireError: offset or length is not what must come next.
    """
    end = part.offset + len(part.data)
    if (
        part.offset != num_before
        or end > part.total_bytes
        or part.total_bytes > MAX_GATHER_BYTES
    ):
        raise WireError(f"gather bytes {part.offset} to {end} of {part.total_bytes}")
    return end
