"""An endpoint with its sockets: what the driver turns.

Datagrams of a conduit are handed on before control bytes that were read at the same
time (DESIGN decision 8).
"""

import errno
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from tailbound.config import Transport
from tailbound.errors import ConfigError, TailboundError
from tailbound.impairments import Impairments
from tailbound.protocol.endpoint import Endpoint
from tailbound.protocol.events import Event
from tailbound.protocol.link import Link
from tailbound.testing.impaired_path import Batch, ImpairedPath
from tailbound.transport.conduit import BUFFER_BYTES, Conduit, make_quick
from tailbound.transport.credentials import Credentials
from tailbound.transport.forks import close_in_forked_children
from tailbound.transport.udp import UdpSocket
from tailbound.transport.vector import DatagramVector, find_recvmmsg

IMPAIRED_BYTES = 1 << 19
"""How much an impaired path takes at once."""
JOINED_BYTES = 1 << 17
"""How much a plain path takes at once, for the same reasons as BATCHES_AT_ONCE."""
TURN_BYTES = 1 << 20
"""Read for one link before the others get their turn."""


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
        credentials: Credentials | None = None,
    ) -> None:
        self.endpoint, self.on_event = endpoint, on_event
        self.listener, self._accept = listener, accept
        self.conduits: dict[int, Conduit] = {}
        self.is_over = False
        self._impairments = impairments
        self._credentials = credentials or Credentials(Transport())
        self._rng: np.random.Generator | None = None
        if impairments is not None and not impairments.is_none:
            self._rng = np.random.default_rng(impairments.seed)
        self._numbers = 0
        joined = IMPAIRED_BYTES if self._rng is not None else JOINED_BYTES
        self._buffer = memoryview(bytearray(joined + BUFFER_BYTES))
        self._opened = self._buffer[:0]
        if self._credentials.is_sealed:
            self._opened = memoryview(bytearray(len(self._buffer)))
        recvmmsg = find_recvmmsg()
        self._vector = (
            None if recvmmsg is None else DatagramVector(self._buffer, recvmmsg)
        )
        if listener is not None:
            close_in_forked_children(listener)

    def add(
        self,
        tcp: socket.socket,
        udp: UdpSocket,
        link: Link,
        *,
        is_connecting: bool = True,
    ) -> Conduit:
        """Take over a connection and its UDP socket.

        Args:
            tcp: the connection.
            udp: the socket.
            link: as the endpoint sees it.
            is_connecting: this side opened it.
        """
        make_quick(tcp)
        path = None
        if self._rng is not None and self._impairments is not None:
            path = ImpairedPath(self._impairments, self._rng.spawn(1)[0])
        credentials = self._credentials
        channel = credentials.make_channel(is_connecting=is_connecting)
        make_sealing = None
        if credentials.is_sealed:
            make_sealing = partial(
                credentials.make_sealing, is_connecting=is_connecting
            )
        conduit = Conduit(self._numbers, tcp, udp, link, path, channel, make_sealing)
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
                self.endpoint.fail(TailboundError(f"no room for another rank: {error}"))
                break
            conduit = self.add(tcp, udp, link, is_connecting=False)
            accepted.append((conduit, link))
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
                conduit.count_strangers(self.endpoint, num)
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
                conduit.count_strangers(self.endpoint, filled.num_foreign)
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
        if conduit.is_sealed:
            if conduit.sealing is None:
                self.endpoint.count_foreign(conduit.number, -(-num_bytes // size))
                return
            num_bytes, size = conduit.sealing.opener.open_untrusted(
                data, num_bytes, size, self._opened
            )
            data = self._opened
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
            conduit.nudge(now)
        endpoint.settle(now)
        due_s = endpoint.timer()
        if due_s is not None and due_s <= now:
            endpoint.handle_timer(now)

    def next_due_s(self) -> float | None:
        """When something is due without any socket being ready."""
        times = [self.endpoint.timer()]
        for conduit in self.conduits.values():
            times.append(conduit.retry_s)
            times.append(conduit.nudge_s)
            if conduit.path is not None:
                times.append(conduit.path.next_due_s())
        return min((time for time in times if time is not None), default=None)

    def close(self) -> None:
        """Close every socket."""
        if self.listener is not None:
            self.listener.close()
        for conduit in self.conduits.values():
            conduit.close()
