"""One process of the job: its links, and what passes between them and the machines.

The I/O side (a driver with sockets, or the fake network) calls down::

    receive_datagrams(link, data, num_bytes, segment_bytes, now)
    receive_control(link, data, now)      bytes of the TCP stream
    settle(now)                           after the datagram queues are drained
    handle_timer(now)                     at or after timer()
    lose_link(link, reason, now)          its TCP connection ended

and takes out::

    next_datagrams(link, out, now)        a batch, back to back in ``out``
    next_control(link)                    bytes for the TCP stream
    next_event()                          what happened

``receive_datagrams`` must come before the control messages that were read at the same
time, since TCP can deliver a probe before datagrams that were sent earlier (DESIGN
decision 8). Nothing from the wire raises: malformed, stale, duplicate and foreign
datagrams are counted, and a peer that breaks the protocol ends the job by a Failed.
"""

from abc import ABC, abstractmethod
from collections import deque

import numpy as np
from numpy.typing import NDArray

from tailbound.errors import (
    PeerLostError,
    PeerProtocolError,
    RemoteError,
    TailboundError,
    WireError,
)
from tailbound.protocol.events import Direction, Event, Failed, RoundKey, peer_name
from tailbound.protocol.headers import BucketBytes, HeaderTable
from tailbound.protocol.intake import (
    LinkCounters,
    count_invalid,
    rows_of,
    sort_datagrams,
)
from tailbound.protocol.link import Link
from tailbound.protocol.plan import Plan
from tailbound.protocol.receiver import Receiver
from tailbound.protocol.sender import Sender
from tailbound.protocol.session import LinkState
from tailbound.protocol.wire import (
    HEADER_BYTES,
    PING,
    Bitmap,
    Fail,
    Mark,
    MarkSeen,
    Message,
    PingSeen,
    Probe,
    Stop,
    encode_control,
    headers_untrusted,
)
from tailbound.reduction import WireFormat


class Endpoint(ABC):
    """What worker and server have in common. See the module's docstring."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.session = 0
        self.links: dict[int, Link] = {}
        self.plan: Plan | None = None
        """What all ranks agreed on; None before the start."""
        self.error: TailboundError | None = None
        self._is_touched = True
        """Something came in since ``settle`` last looked."""
        self._tables: dict[tuple[int, Direction, int], HeaderTable] = {}
        self._events: deque[Event] = deque()

    # -- what each side decides ------------------------------------------------

    @abstractmethod
    def timer(self) -> float | None:
        """When ``handle_timer`` has something to do next."""

    @abstractmethod
    def handle_timer(self, now: float) -> None:
        """Act on what is due."""

    @abstractmethod
    def settle(self, now: float) -> None:
        """Close what is within its bound; the datagram queues are drained."""

    @abstractmethod
    def _sender(self, link: int) -> tuple[Sender, BucketBytes] | None:
        """The sender whose datagrams go to this link now."""

    @abstractmethod
    def _receiver(self, link: int, now: float) -> tuple[Receiver, WireFormat]:
        """The receiver of the round that ``_expected`` names, made if need be."""

    @abstractmethod
    def _expected(self, link: int) -> RoundKey | None:
        """The round whose datagrams this link may carry now."""

    @abstractmethod
    def _handle(self, link: int, message: Message, now: float) -> None:
        """Take in a control message that is not of a round's machines."""

    @abstractmethod
    def _phase(self) -> str:
        """What is going on, for error messages."""

    # -- down: the network and the clock ---------------------------------------

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

    def receive_control(self, link: int, data: bytes | memoryview, now: float) -> None:
        """Take in bytes of a link's TCP stream."""
        self._is_touched = True
        state = self.links[link]
        try:
            for message in state.reader.feed_untrusted(data):
                if self.has_failed:
                    return
                if isinstance(message, Fail):
                    self._fail_remote(link, message)
                else:
                    self._dispatch(link, message, now)
        except WireError as error:
            self.fail(PeerProtocolError(state.name, state.state.value, str(error)))
        except TailboundError as error:
            self.fail(error)

    def lose_link(self, link: int, reason: str, now: float) -> None:
        """A link's TCP connection ended without a goodbye."""
        state = self.links[link]
        if self.error is None and state.state is not LinkState.CLOSED:
            self.fail(PeerLostError((state.name,), self._phase(), reason))

    def count_foreign(self, link: int, num: int) -> None:
        """Datagrams came from an address that is not the peer's."""
        self.links[link].counters.foreign += num

    @property
    def has_failed(self) -> bool:
        """True once a Failed was reported; nothing more is taken in."""
        return self.error is not None

    # -- up: what to send, what happened ---------------------------------------

    def next_datagrams(
        self,
        link: int,
        out: memoryview,
        now: float,
        *,
        max_segments: int,
        max_bytes: int,
        max_batches: int = 1,
    ) -> tuple[int, int] | None:
        """Write up to ``max_batches`` whole kernel batches for this link into ``out``.

        A kernel batch has at most ``max_segments`` datagrams and ``max_bytes`` bytes.

        Returns:
            Bytes written and bytes per datagram, or None if nothing may leave now.
        """
        state = self.links[link]
        if state.pings:
            ping = state.pings.popleft()
            out[: len(ping)] = ping
            return len(ping), len(ping)
        if (pair := None if self.has_failed else self._sender(link)) is None:
            return None
        sender, rows = pair
        per_batch = min(max_segments, max_bytes // rows.layout.segment_bytes)
        chunks_K = sender.next_chunks(
            now, max_batches * per_batch, max_batches * max_bytes
        )
        if chunks_K is None:
            return None
        table = self._table(sender.key, self.rank)
        num_bytes = rows.pack(chunks_K, table, out, is_ascending=sender.is_ascending)
        return num_bytes, rows.layout.segment_bytes

    def next_control(self, link: int) -> bytes | None:
        """Bytes to put into the link's TCP stream, after the batches taken so far."""
        state = self.links[link]
        if state.control:
            return encode_control(state.control.popleft())
        if self.error is not None:
            return None
        pair = self._sender(link)
        if pair is not None and (message := pair[0].next_control()) is not None:
            return encode_control(message)
        return None

    def has_datagrams(self, link: int, now: float) -> bool:
        """True if ``next_datagrams`` would give a batch for this link."""
        state = self.links.get(link)
        if state is None or not state.peer_udp_port:
            return False
        pair = self._sender(link) if self.error is None else None
        has_chunks = pair is not None and pair[0].has_chunks(now)
        return has_chunks or bool(state.pings)

    def is_checking(self, link: int) -> bool:
        """True while this link's UDP is under test and may lose large datagrams."""
        return self.links[link].state is LinkState.CHECKING

    def next_event(self) -> Event | None:
        """The next thing that happened, in order."""
        return self._events.popleft() if self._events else None

    def fail(self, error: TailboundError) -> None:
        """End the job: tell the peers, report Failed, go quiet. The first counts."""
        if self.error is not None:
            return
        self.error = error
        peers = error.peers if isinstance(error, PeerLostError) else ()
        if isinstance(error, RemoteError):
            told = Fail(error.peer, peers, self._phase(), error.message)
        else:
            told = Fail(peer_name(self.rank), peers, self._phase(), str(error))
        for state in self.links.values():
            if state.state is not LinkState.CLOSED:
                state.control.append(told)
        self._events.append(Failed(error))

    def counters(self) -> LinkCounters:
        """Datagrams by fate, over all links."""
        return sum((link.counters for link in self.links.values()), LinkCounters())

    # -- inside ----------------------------------------------------------------

    def _receive_equal(
        self, link: int, data: memoryview, num: int, segment_bytes: int, now: float
    ) -> None:
        """Take in ``num`` datagrams of one size: check them at once, then the data."""
        if self._receive_full(link, data, num, segment_bytes, now):
            return
        counters = self.links[link].counters
        try:
            headers_K = headers_untrusted(data, num, segment_bytes)
        except WireError:
            counters.malformed += num
            return
        if headers_K["kind"][0] == PING and (headers_K["kind"] == PING).all():
            self._receive_ping(link, headers_K, segment_bytes, now)
            return
        table = self._expected_table(link)
        if table is None:
            counters.stale += num
            return
        use_K = sort_datagrams(
            data, headers_K, segment_bytes, table.headers_C[0], table.layout, counters
        )
        chunks_K = headers_K["sequence"][use_K].astype(np.int64)
        if not len(chunks_K):
            return
        # Only now: a stale datagram must not open the round, since what a worker sends
        # for the next one tells the server that it has the mean of the last.
        receiver, wire_format = self._receiver(link, now)
        rows_KE = rows_of(data, num, segment_bytes, wire_format)[use_K]
        if segment_bytes - HEADER_BYTES == table.layout.chunk_bytes:
            receiver.receive(chunks_K, rows_KE)
        else:
            receiver.receive_tail(len(chunks_K), rows_KE[0])

    def _receive_full(
        self, link: int, data: memoryview, num: int, segment_bytes: int, now: float
    ) -> bool:
        """Take in a batch that holds nothing but full chunks of the open round.

        This is what a good sender's batches look like from here; checking one costs a
        quarter of sorting datagrams one by one.
        """
        table = self._expected_table(link)
        if table is None or table.layout.segment_bytes != segment_bytes:
            return False
        chunks = table.match(data, num, segment_bytes)
        if chunks is None:
            return False
        receiver, wire_format = self._receiver(link, now)
        self.links[link].counters.accepted += num
        rows_KE = rows_of(data, num, segment_bytes, wire_format)
        if isinstance(chunks, int):
            receiver.receive_run(chunks, rows_KE)
        else:
            receiver.receive(chunks, rows_KE)
        return True

    def _expected_table(self, link: int) -> HeaderTable | None:
        rank = self.links[link].peer_rank
        key = self._expected(link) if rank >= 0 else None
        return None if key is None else self._table(key, rank)

    def _table(self, key: RoundKey, rank: int) -> HeaderTable:
        """The headers of this round's datagrams from this rank."""
        place = (key.bucket, key.direction, rank)
        table = self._tables.get(place)
        if table is None:
            assert self.plan is not None
            layout = self.plan.layout(key.bucket)
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

    def _dispatch(self, link: int, message: Message, now: float) -> None:
        """Give a control message to the machine it belongs to."""
        if isinstance(message, PingSeen):
            check = self.links[link].check
            if check is not None:
                check.receive_seen_untrusted(message.num_bytes)
        elif isinstance(message, Bitmap | Stop | MarkSeen):
            # Answers of a round that is over are late, not wrong.
            pair = self._sender(link)
            if pair is not None and pair[0].key == message.key:
                pair[0].receive_untrusted(message, now)
        elif isinstance(message, Probe | Mark):
            self._receive_question(link, message, now)
        else:
            self._handle(link, message, now)

    def _receive_question(self, link: int, message: Probe | Mark, now: float) -> None:
        if self._expected(link) != message.key:
            return
        receiver, _ = self._receiver(link, now)
        if isinstance(message, Mark):
            receiver.receive_mark_untrusted(message.sent_bytes)
        else:
            # If what is here is enough, the stop answers the probe.
            receiver.settle(now)
            receiver.receive_probe()
        self._collect(link, receiver)

    def _collect(self, link: int, receiver: Receiver) -> None:
        """Queue a receiver's control messages on its link."""
        while (message := receiver.next_control()) is not None:
            self.links[link].control.append(message)

    def _queue_pings(self, now: float) -> None:
        for state in self.links.values():
            if state.check is not None and state.state is LinkState.CHECKING:
                state.pings.extend(state.check.due_pings(now))
                error = state.check.handle_timer(now)
                if error is not None:
                    self.fail(error)

    def _ping_timers(self) -> list[float]:
        return [
            state.check.timer()
            for state in self.links.values()
            if state.check is not None and state.state is LinkState.CHECKING
        ]

    def _fail_remote(self, link: int, told: Fail) -> None:
        name = self.links[link].name
        if told.peers:
            self.fail(PeerLostError(told.peers, told.phase, f"{name} says so"))
        else:
            self.fail(RemoteError(told.origin, told.message))
