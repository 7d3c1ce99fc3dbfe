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

from abc import abstractmethod
from collections import deque
from collections.abc import Sequence

from tailbound.errors import (
    PeerLostError,
    PeerProtocolError,
    RemoteError,
    TailboundError,
    WireError,
)
from tailbound.protocol.arrivals import Arrivals
from tailbound.protocol.events import Event, Failed, peer_name
from tailbound.protocol.headers import BucketBytes
from tailbound.protocol.intake import LinkCounters
from tailbound.protocol.messages import (
    Bitmap,
    Fail,
    Mark,
    MarkSeen,
    Message,
    Nudge,
    PingSeen,
    Probe,
    Stop,
)
from tailbound.protocol.receiver import Receiver
from tailbound.protocol.sender import Sender
from tailbound.protocol.session import LinkState
from tailbound.protocol.wire import encode_control


class Endpoint(Arrivals):
    """What all roles have in common. See the module's docstring."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.error: TailboundError | None = None
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
    def _senders(self, link: int) -> Sequence[tuple[Sender, BucketBytes]]:
        """The senders whose datagrams go to this link now, the most urgent first."""

    @abstractmethod
    def _handle(self, link: int, message: Message, now: float) -> None:
        """Take in a control message that is not of a round's machines."""

    @abstractmethod
    def _phase(self) -> str:
        """What is going on, for error messages."""

    # -- down: the network and the clock ---------------------------------------

    def receive_control(self, link: int, data: bytes | memoryview, now: float) -> None:
        """Take in bytes of a link's TCP stream."""
        self._is_touched = True
        state = self.links[link]
        try:
            for message in state.reader.feed_untrusted(data):
                if self.has_failed:
                    return
                self._take_message(link, message, now)
        except WireError as error:
            self._fail_wire(link, error)

    def _take_message(self, link: int, message: Message, now: float) -> None:
        """Act on one control message; what is wrong with it ends the job."""
        try:
            if isinstance(message, Fail):
                self._fail_remote(link, message)
            elif not isinstance(message, Nudge):
                self._dispatch(link, message, now)
        except WireError as error:
            self._fail_wire(link, error)
        except TailboundError as error:
            self.fail(error)

    def _fail_wire(self, link: int, error: WireError) -> None:
        state = self.links[link]
        self.fail(PeerProtocolError(state.name, state.state.value, str(error)))

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
        due = None if self.has_failed else self._due(link, now)
        if due is None:
            return None
        sender, rows, room_bytes = due
        layout = rows.layout
        per_batch = min(max_segments, max_bytes // layout.segment_bytes)
        chunks_K = sender.next_chunks(
            now, max_batches * per_batch, min(max_batches * max_bytes, room_bytes)
        )
        if chunks_K is None:
            return None
        table = self._table(sender.key, self.rank, layout)
        num_bytes = rows.pack(chunks_K, table, out, is_ascending=sender.is_ascending)
        return num_bytes, layout.segment_bytes

    def next_control(self, link: int) -> bytes | None:
        """Bytes to put into the link's TCP stream, after the batches taken so far."""
        state = self.links[link]
        if state.control:
            return encode_control(state.control.popleft())
        if self.error is not None:
            return None
        for sender, _ in self._senders(link):
            if (message := sender.next_control()) is not None:
                return encode_control(message)
        return None

    def has_datagrams(self, link: int, now: float) -> bool:
        """True if ``next_datagrams`` would give a batch for this link."""
        state = self.links.get(link)
        if state is None or not state.peer_udp_port:
            return False
        return bool(state.pings) or (
            self.error is None and self._due(link, now) is not None
        )

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

    def _due(self, link: int, now: float) -> tuple[Sender, BucketBytes, int] | None:
        """The first sender with something to send, and the bytes that may leave.

        What all senders of a link have on the way shares its receiver's queue.
        """
        senders = self._senders(link)
        if not senders:
            return None
        in_flight = sum(sender.window.in_flight_bytes for sender, _ in senders)
        for sender, rows in senders:
            room_bytes = sender.window.window_bytes - in_flight
            if room_bytes >= rows.layout.segment_bytes and sender.has_chunks(now):
                return sender, rows, room_bytes
        return None

    def _dispatch(self, link: int, message: Message, now: float) -> None:
        """Give a control message to the machine it belongs to."""
        if isinstance(message, PingSeen):
            check = self.links[link].check
            if check is not None:
                check.receive_seen_untrusted(message.num_bytes)
        elif isinstance(message, Bitmap | Stop | MarkSeen):
            # Answers of a round that is over are late, not wrong.
            for sender, _ in self._senders(link):
                if sender.key == message.key:
                    sender.receive_untrusted(message, now)
        elif isinstance(message, Probe | Mark):
            self._receive_question(link, message, now)
        else:
            self._handle(link, message, now)

    def _receive_question(self, link: int, message: Probe | Mark, now: float) -> None:
        key = self._find_round(link, message.direction, message.bucket, message.counter)
        if key is None:
            return
        receiver, _ = self._receiver(link, key, now)
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
