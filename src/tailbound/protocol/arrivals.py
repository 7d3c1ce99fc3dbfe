"""Datagrams come in: find the round that they name, check them, hand the data on.

A batch that holds nothing but full chunks of one open round, as a good sender's
batches do, is checked as a whole; anything else is sorted one by one. Nothing from the
wire raises here: what is of no use is counted by kind.
"""

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from tailbound.errors import WireError
from tailbound.protocol.chunks import ChunkLayout
from tailbound.protocol.events import Direction, RoundKey
from tailbound.protocol.headers import HeaderTable
from tailbound.protocol.intake import count_invalid, rows_of, sort_datagrams
from tailbound.protocol.link import Link
from tailbound.protocol.messages import PingSeen
from tailbound.protocol.receiver import Receiver
from tailbound.protocol.wire import HEADER_BYTES, PING, headers_untrusted
from tailbound.reduction import WireFormat


class Arrivals(ABC):
    """The links of a process, as far as their datagrams are concerned."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.session = 0
        self.links: dict[int, Link] = {}
        self._is_touched = True
        """Something came in since ``settle`` last looked."""
        self._tables: dict[tuple[int, Direction, int, int], HeaderTable] = {}

    @property
    @abstractmethod
    def has_failed(self) -> bool:
        """True once nothing more is taken in."""

    @abstractmethod
    def _find_round(
        self, link: int, kind: int, bucket: int, counter: int
    ) -> RoundKey | None:
        """The round that these name, if it is open and this link may bring its data."""

    @abstractmethod
    def _layout(self, link: int, key: RoundKey) -> ChunkLayout:
        """How the data of an open round is cut, on this link."""

    @abstractmethod
    def _receiver(
        self, link: int, key: RoundKey, now: float
    ) -> tuple[Receiver, WireFormat]:
        """The receiver of a round that ``_find_round`` gave, made if need be."""

    def receive_datagrams(
        self,
        link: int,
        data: memoryview,
        num_bytes: int,
        segment_bytes: int,
        now: float,
    ) -> None:
        """Take in datagrams that lie back to back, the last possibly shorter."""
        if self.has_failed or num_bytes == 0:
            return
        self._is_touched = True
        num = num_bytes // segment_bytes
        rest = num_bytes - num * segment_bytes
        if num:
            self._receive_equal(link, data, num, segment_bytes, now)
        if rest:
            self._receive_equal(link, data[num * segment_bytes :], 1, rest, now)

    def _receive_equal(
        self, link: int, data: memoryview, num: int, segment_bytes: int, now: float
    ) -> None:
        """Take in ``num`` datagrams of one size: check them at once, then the data."""
        try:
            headers_K = headers_untrusted(data, num, segment_bytes)
        except WireError:
            self.links[link].counters.malformed += num
            return
        key = self._named_round(link, data)
        if key is not None and self._receive_full(
            link, key, data, num, segment_bytes, now
        ):
            return
        prefix_K = np.ndarray((num,), np.uint64, data, 0, (segment_bytes,))
        (cuts,) = np.nonzero(prefix_K[1:] != prefix_K[:-1])
        if len(cuts):
            # Rounds of one link may follow each other in one batch.
            start = 0
            for stop in (*(cuts + 1).tolist(), num):
                rest = data[start * segment_bytes :]
                self._receive_equal(link, rest, stop - start, segment_bytes, now)
                start = stop
        elif headers_K["kind"][0] == PING:
            self._receive_ping(link, headers_K, segment_bytes, now)
        elif key is None:
            self._count_useless(link, headers_K)
        else:
            self._receive_sorted(link, key, data, headers_K, segment_bytes, now)

    def _receive_full(
        self,
        link: int,
        key: RoundKey,
        data: memoryview,
        num: int,
        segment_bytes: int,
        now: float,
    ) -> bool:
        """Take in a batch that holds nothing but full chunks of one open round.

        This is what a good sender's batches look like from here; checking one costs a
        quarter of sorting datagrams one by one.
        """
        table = self._table(key, self.links[link].peer_rank, self._layout(link, key))
        if table.layout.segment_bytes != segment_bytes:
            return False
        chunks = table.match(data, num, segment_bytes)
        if chunks is None:
            return False
        receiver, wire_format = self._receiver(link, key, now)
        self.links[link].counters.accepted += num
        rows_KE = rows_of(data, num, segment_bytes, wire_format)
        if isinstance(chunks, int):
            receiver.receive_run(chunks, rows_KE)
        else:
            receiver.receive(chunks, rows_KE)
        return True

    def _receive_sorted(
        self,
        link: int,
        key: RoundKey,
        data: memoryview,
        headers_K: NDArray[np.void],
        segment_bytes: int,
        now: float,
    ) -> None:
        """Take in what of a batch is good; all of it names the same round."""
        state = self.links[link]
        table = self._table(key, state.peer_rank, self._layout(link, key))
        use_K = sort_datagrams(
            data,
            headers_K,
            segment_bytes,
            table.headers_C[0],
            table.layout,
            state.counters,
        )
        chunks_K = headers_K["sequence"][use_K].astype(np.int64)
        if not len(chunks_K):
            return
        # Only now: a bad datagram must not open the round, since what a worker sends
        # for the next one tells the server that it has the mean of the last.
        receiver, wire_format = self._receiver(link, key, now)
        rows_KE = rows_of(data, len(headers_K), segment_bytes, wire_format)[use_K]
        if segment_bytes - HEADER_BYTES == table.layout.chunk_bytes:
            receiver.receive(chunks_K, rows_KE)
        else:
            receiver.receive_tail(len(chunks_K), rows_KE[0])

    def _count_useless(self, link: int, headers_K: NDArray[np.void]) -> None:
        """Count datagrams of no open round."""
        state = self.links[link]
        if state.check is None:
            # Before the two have met, nothing says what is ours.
            state.counters.stale += len(headers_K)
            return
        ours_K = count_invalid(headers_K, self.session, state.peer_rank, state.counters)
        state.counters.stale += int(np.count_nonzero(ours_K))

    def _named_round(self, link: int, data: memoryview) -> RoundKey | None:
        """The open round that the first datagram names."""
        if self.links[link].peer_rank < 0:
            return None
        bucket, counter = data[2] << 8 | data[3], int.from_bytes(data[4:8], "big")
        return self._find_round(link, data[1], bucket, counter)

    def _table(self, key: RoundKey, rank: int, layout: ChunkLayout) -> HeaderTable:
        """The headers of this round's datagrams from this rank."""
        place = (key.bucket, key.direction, rank, layout.num_elements)
        table = self._tables.get(place)
        if table is None or (table.layout is not layout and table.layout != layout):
            table = self._tables[place] = HeaderTable(layout, key, self.session, rank)
        elif table.key is not key and table.key != key:
            table.set_round(key)
        return table

    def _receive_ping(
        self, link: int, headers_K: NDArray[np.void], segment_bytes: int, now: float
    ) -> None:
        state = self.links[link]
        if state.check is None:
            # Ahead of the welcome, which says what session is ours.
            state.counters.stale += len(headers_K)
            return
        valid_K = count_invalid(
            headers_K, self.session, state.peer_rank, state.counters
        )
        if valid_K.any() and state.check.receive_ping(segment_bytes):
            state.control.append(PingSeen(segment_bytes))
