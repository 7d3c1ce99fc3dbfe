"""An endpoint with its sockets: what the driver turns.

A conduit is one link's TCP connection and UDP socket. Datagrams of a conduit are
handed on before control bytes that were read at the same time, and control bytes wait
until the datagram queue was seen empty (DESIGN decision 8).
"""

import errno
import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tailbound.errors import ConfigError, TailboundError
from tailbound.impairments import Impairments
from tailbound.protocol.endpoint import Endpoint
from tailbound.protocol.events import Event
from tailbound.protocol.link import Link
from tailbound.testing.impaired_path import Batch, ImpairedPath
from tailbound.transport.batching import MAX_SEGMENTS
from tailbound.transport.forks import close_in_forked_children
from tailbound.transport.udp import SegmentTooLargeError, UdpSocket
from tailbound.transport.vector import DatagramVector, find_recvmmsg

BUFFER_BYTES = 65536
TCP_READ_BYTES = 1 << 18
BATCHES_AT_ONCE = 4
"""Kernel batches packed in one go: half of a batch's cost is Python's, per call. More
would not stay in the second-level cache until the kernel has copied it."""
MAX_GROUPS_PER_TURN = 4
"""Sent on one link before the others get their turn: 1 MiB."""
KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6),
)
"""A machine that lost power says nothing: the kernel finds out within 45 s."""
IMPAIRED_BYTES = 1 << 19
"""How much an impaired path takes at once."""
JOINED_BYTES = 1 << 17
"""How much a plain path takes at once, for the same reasons as BATCHES_AT_ONCE."""
TURN_BYTES = 1 << 20
"""Read for one link before the others get their turn."""
DEVICE_PAUSE_S = 0.001
"""A full device (ENOBUFS) has no event that says when it has room again."""


class Conduit:
    """One link's sockets and what waits to pass through them."""

    def __init__(
        self,
        number: int,
        tcp: socket.socket,
        udp: UdpSocket,
        link: Link,
        path: ImpairedPath | None,
    ) -> None:
        self.number, self.tcp, self.udp, self.link, self.path = (
            number,
            tcp,
            udp,
            link,
            path,
        )
        self.outgoing = bytearray()
        """Control bytes that the kernel has not taken yet."""
        self.incoming: list[bytes] = []
        """Control bytes that were read and wait for the datagrams before them."""
        self.is_drained = True
        """The datagram queue was seen empty after ``incoming`` was read."""
        self.lost: str | None = None
        """Why the TCP connection ended, if it did."""
        self.told_lost = False
        self.retry_s: float | None = None
        """When to try a full device again."""
        self._peer_address: tuple[Any, ...] | None = None
        self._batch = memoryview(bytearray(BATCHES_AT_ONCE * BUFFER_BYTES))
        self._pending = self._batch[:0]
        self._pending_segment_bytes = 1
        close_in_forked_children(self)

    def peer_address(self) -> tuple[Any, ...] | None:
        """Where this link's datagrams go; None until the peer said it."""
        port = self.link.peer_udp_port
        if self._peer_address is None and port:
            self._peer_address = (self.link.address, port, *self.link.scope)
        return self._peer_address

    def read_control(self) -> None:
        """Take what the TCP stream has."""
        while self.lost is None:
            try:
                data = self.tcp.recv(TCP_READ_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                self.lost = error.strerror or str(error)
                return
            if not data:
                self.lost = "its connection closed"
                return
            self.incoming.append(data)
            if len(data) < TCP_READ_BYTES:
                return

    def write_control(self) -> bool:
        """Give the TCP stream what waits; False if it takes no more."""
        while self.outgoing and self.lost is None:
            try:
                sent = self.tcp.send(self.outgoing)
            except BlockingIOError:
                return False
            except OSError as error:
                # The peer's last words may lie in our queue: why it left.
                self.read_control()
                self.lost = self.lost or error.strerror or str(error)
                return True
            del self.outgoing[:sent]
        return True

    def send_datagrams(self, endpoint: Endpoint) -> bool:
        """Send what the endpoint has for this link; False if the socket is full."""
        number = self.number
        self.retry_s = None
        if endpoint.has_failed:
            # The word about the failure must not wait behind a full device.
            self._pending = self._batch[:0]
        address = self.peer_address()
        for turn in range(MAX_GROUPS_PER_TURN + 1):
            now = time.monotonic()
            if not self._send_pending(endpoint, address, now):
                return False
            # After the datagrams before it, or a probe would overtake them.
            while (data := endpoint.next_control(number)) is not None:
                self.outgoing += data
            if address is None or turn == MAX_GROUPS_PER_TURN:
                break
            sent = endpoint.next_datagrams(
                number,
                self._batch,
                now,
                max_segments=MAX_SEGMENTS,
                max_bytes=self.udp.max_batch_bytes,
                max_batches=BATCHES_AT_ONCE,
            )
            if sent is None:
                break
            self._pending = self._batch[: sent[0]]
            self._pending_segment_bytes = sent[1]
        return True

    def _send_pending(
        self, endpoint: Endpoint, address: tuple[Any, ...] | None, now: float
    ) -> bool:
        while self._pending and address is not None:
            try:
                sent = self.udp.send_batch(
                    self._pending, self._pending_segment_bytes, address
                )
            except SegmentTooLargeError as error:
                if not endpoint.is_checking(self.number):
                    endpoint.fail(error)
                    return True
                sent = len(self._pending)
                if self.link.check is not None:
                    self.link.check.exclude(error.segment_bytes)
            self._pending = self._pending[sent:]
            if self._pending:
                if self.udp.blocked_by_device:
                    self.retry_s = now + DEVICE_PAUSE_S
                return False
        return True

    @property
    def holds_control(self) -> bool:
        """Control bytes were read that the endpoint does not have yet."""
        delayed = self.path is not None and self.path.holds_control
        return bool(self.incoming) or delayed

    @property
    def is_blocked(self) -> bool:
        """A batch waits for room in the socket."""
        return bool(self._pending)

    def close(self) -> None:
        """Close both sockets. Closing twice is fine."""
        self.tcp.close()
        self.udp.close()


class Station:
    """An endpoint, its listener if it has one, and its conduits."""

    def __init__(
        self,
        endpoint: Endpoint,
        on_event: Callable[[Event], None],
        *,
        listener: socket.socket | None = None,
        accept: Callable[[socket.socket], tuple[UdpSocket, Link]] | None = None,
        impairments: Impairments | None = None,
    ) -> None:
        self.endpoint, self.on_event = endpoint, on_event
        self.listener, self._accept = listener, accept
        self.conduits: dict[int, Conduit] = {}
        self.is_over = False
        self._impairments = impairments
        self._rng: np.random.Generator | None = None
        if impairments is not None and not impairments.is_none:
            self._rng = np.random.default_rng(impairments.seed)
        self._numbers = 0
        joined = IMPAIRED_BYTES if self._rng is not None else JOINED_BYTES
        self._buffer = memoryview(bytearray(joined + BUFFER_BYTES))
        recvmmsg = find_recvmmsg()
        self._vector = (
            None if recvmmsg is None else DatagramVector(self._buffer, recvmmsg)
        )
        if listener is not None:
            close_in_forked_children(listener)

    def add(self, tcp: socket.socket, udp: UdpSocket, link: Link) -> Conduit:
        """Take over a connection and its UDP socket."""
        tcp.setblocking(False)
        tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for level, option, value in KEEPALIVE:
            tcp.setsockopt(level, option, value)
        path = None
        if self._rng is not None and self._impairments is not None:
            path = ImpairedPath(self._impairments, self._rng.spawn(1)[0])
        conduit = Conduit(self._numbers, tcp, udp, link, path)
        self.conduits[conduit.number] = conduit
        self._numbers += 1
        return conduit

    def accept_all(self) -> list[tuple[Conduit, Link]]:
        """Accept every connection that waits."""
        accepted: list[tuple[Conduit, Link]] = []
        while self.listener is not None and self._accept is not None:
            try:
                tcp, _ = self.listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                break
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    break
                raise
            try:
                udp, link = self._accept(tcp)
            except OSError:
                tcp.close()  # gone before it was accepted
                continue
            except ConfigError as error:
                tcp.close()
                self.endpoint.fail(TailboundError(f"no room for a worker: {error}"))
                break
            accepted.append((self.add(tcp, udp, link), link))
        return accepted

    def drain(self, conduit: Conduit, now: float) -> None:
        """Read the datagram queue, up to a turn's share, into endpoint or path."""
        conduit.is_drained = False
        expected = conduit.peer_address()
        if self._vector is not None and expected and conduit.udp.takes_many:
            self._drain_many(conduit, self._vector, expected, now)
            return
        buffer, used, size, taken = self._buffer, 0, 0, 0
        while taken < TURN_BYTES:
            received = conduit.udp.receive_batch(buffer[used:] if used else buffer)
            if received is None:
                conduit.is_drained = True
                break
            num_bytes, segment_bytes, address = received
            taken += num_bytes
            if expected is not None and address != expected:
                num = -(-num_bytes // segment_bytes)
                self.endpoint.count_foreign(conduit.number, num)
                continue
            # Neighbours of one size are joined: checking and adding cost per call,
            # and where the kernel joins nothing a call brings one datagram.
            if used and segment_bytes != size:
                self._take(conduit, used, size, now)
                buffer[:num_bytes] = buffer[used : used + num_bytes]
                used = 0
            size = segment_bytes
            used += num_bytes
            if num_bytes % size or len(buffer) - used < BUFFER_BYTES:
                self._take(conduit, used, size, now)
                used = 0
        if used:
            self._take(conduit, used, size, now)

    def _drain_many(
        self,
        conduit: Conduit,
        vector: DatagramVector,
        expected: tuple[Any, ...],
        now: float,
    ) -> None:
        """The same where the kernel joins nothing: many datagrams in one call."""
        taken = 0
        while taken < TURN_BYTES:
            filled = conduit.udp.receive_many(vector, expected)
            if filled is None:
                conduit.is_drained = True
                return
            size, num = vector.slot_bytes, filled.num
            taken += num * size
            if filled.is_even:
                self._take(conduit, num * size, size, now)
            else:
                self.endpoint.count_foreign(conduit.number, filled.num_foreign)
                lengths = filled.length_K.tolist()
                start = 0
                while start < num:
                    # Full ones next to each other are one batch; others go alone.
                    stop = start + 1
                    while lengths[start] == size and lengths[stop : stop + 1] == [size]:
                        stop += 1
                    if lengths[start]:
                        num_bytes = (stop - start - 1) * size + lengths[start]
                        data = self._buffer[start * size :]
                        self._take(conduit, num_bytes, lengths[start], now, data)
                    start = stop
            if num < vector.num_slots or not conduit.udp.takes_many:
                conduit.is_drained = num < vector.num_slots
                return

    def _take(
        self,
        conduit: Conduit,
        num_bytes: int,
        size: int,
        now: float,
        data: memoryview | None = None,
    ) -> None:
        """Give what stands in the buffer to the endpoint, or to the bad network."""
        data = self._buffer if data is None else data
        if conduit.path is not None:
            conduit.path.push_datagrams(Batch(data, num_bytes, size), now)
        else:
            self.endpoint.receive_datagrams(conduit.number, data, num_bytes, size, now)

    def hand_on(self, now: float) -> None:
        """Give the endpoint what is due: datagrams, then control, then deadlines."""
        endpoint = self.endpoint
        ready: list[tuple[Conduit, list[bytes]]] = []
        for conduit in self.conduits.values():
            messages = conduit.incoming if conduit.is_drained else []
            if messages:
                conduit.incoming = []
            path = conduit.path
            if path is not None:
                for data in messages:
                    path.push_control(data, now)
                messages = path.pop_control(now)
                for batch in path.pop_datagrams(now):
                    endpoint.receive_datagrams(conduit.number, *batch, now)
            if messages:
                ready.append((conduit, messages))
        endpoint.settle(now)
        for conduit, messages in ready:
            for data in messages:
                endpoint.receive_control(conduit.number, data, now)
        for conduit in self.conduits.values():
            if conduit.lost and not conduit.told_lost and not conduit.holds_control:
                conduit.told_lost = True
                if conduit.number in endpoint.links:
                    endpoint.lose_link(conduit.number, conduit.lost, now)
        endpoint.settle(now)
        due_s = endpoint.timer()
        if due_s is not None and due_s <= now:
            endpoint.handle_timer(now)

    def next_due_s(self) -> float | None:
        """When something is due without any socket being ready."""
        times = [self.endpoint.timer()]
        for conduit in self.conduits.values():
            times.append(conduit.retry_s)
            if conduit.path is not None:
                times.append(conduit.path.next_due_s())
        return min((time for time in times if time is not None), default=None)

    def close(self) -> None:
        """Close every socket."""
        if self.listener is not None:
            self.listener.close()
        for conduit in self.conduits.values():
            conduit.close()
