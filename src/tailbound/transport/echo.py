"""Send back what arrives: the far end that `tailbound doctor` measures a path with.

Over TCP a client says ``tailbound-doctor 1 <token>`` and is told a UDP port; later
``count`` asks how many of its datagrams came in. A datagram is the 16-byte token, a
sequence number in network byte order and padding, and comes back as it is. Only a
datagram whose token belongs to a live TCP connection from the same host is answered,
so nobody can have the echo sent to someone else.
"""

import re
import selectors
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tailbound.errors import ConfigError
from tailbound.transport.addresses import host_of, listen
from tailbound.transport.datagrams import SegmentTooLargeError
from tailbound.transport.udp import UdpSocket

HEADER = struct.Struct("!16sI")
"""Token and sequence number, in front of the padding."""
LONGEST_LINE = 128
"""Bytes of a control line, newline included."""
QUEUE_BYTES = 212992
"""What every kernel grants without asking for more."""

_HELLO = re.compile(rb"tailbound-doctor 1 ([0-9a-f]{32})")
_MAX_CLIENTS = 32
_MAX_ECHOES = 10_000
_IDLE_S = 60.0
_POLL_S = 0.05
_DATAGRAMS_A_TURN = 256


@dataclass(slots=True)
class _Client:
    """One TCP connection and what it may still ask."""

    connection: socket.socket
    host: str
    last_heard_s: float
    line: bytearray = field(default_factory=bytearray)
    token: bytes | None = None
    echoes: int = 0


@dataclass(frozen=True, slots=True)
class EchoStatistics:
    """What an echo server did so far."""

    clients: int
    """Connections that said hello properly."""
    refused: int
    """Connections ended for a wrong line, for silence, or for being one too many."""
    echoes: int
    """Datagrams sent back."""
    ignored: int
    """Datagrams without a valid token, from another host, or past the limit."""


class EchoServer:
    """Serves up to 32 clients at a time, each for 10000 datagrams.

    Args:
        host: local address; ``0.0.0.0`` and ``::`` are every one of them.
        port: TCP port, 0 lets the kernel choose. UDP takes the same number if free.
        clock: seconds, monotonic.

    Raises:
        ConfigError: the address is not ours, or the port is in use.
    """

    address: tuple[str, int]
    """Where it listens: host and TCP port."""

    def __init__(
        self,
        host: str,
        port: int = 0,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listener = listen(host, port)
        self.address = (host, int(self._listener.getsockname()[1]))
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._clients: dict[socket.socket, _Client] = {}
        self._tokens: dict[bytes, _Client] = {}
        # One for each local address that a client reached us at, so that answers
        # leave from that address (FIELD A10).
        self._udp: dict[str, UdpSocket] = {}
        self._buffer = memoryview(bytearray(65535))
        self._greeted = self._refused = self._echoes = self._ignored = 0

    def serve(self, should_stop: Callable[[], bool]) -> None:
        """Answer until told to stop; asked at least ten times a second."""
        while not should_stop():
            for key, _ in self._selector.select(_POLL_S):
                ready = key.fileobj
                if isinstance(ready, UdpSocket):
                    self._echo(ready)
                elif ready is self._listener:
                    self._accept()
                elif isinstance(ready, socket.socket):
                    self._read(self._clients[ready])
            self._drop_idle()

    def statistics(self) -> EchoStatistics:
        """The counters so far."""
        return EchoStatistics(self._greeted, self._refused, self._echoes, self._ignored)

    def close(self) -> None:
        """End all connections and close all sockets."""
        for client in tuple(self._clients.values()):
            self._drop(client)
        for udp in self._udp.values():
            udp.close()
        self._listener.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError:  # it went away again
            return
        if len(self._clients) >= _MAX_CLIENTS:
            self._refused += 1
            connection.close()
            return
        connection.setblocking(False)
        client = _Client(connection, host_of(address), self._clock())
        self._clients[connection] = client
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, client: _Client) -> None:
        """Take in what a client says; a wrong word ends its connection."""
        try:
            data = client.connection.recv(LONGEST_LINE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(client)
            return
        client.line += data
        client.last_heard_s = self._clock()
        while (end := client.line.find(b"\n")) >= 0:
            line = bytes(client.line[:end])
            del client.line[: end + 1]
            answer = self._answer_untrusted(line, client)
            if answer is None:
                self._refuse(client)
                return
            try:
                client.connection.sendall(answer)
            except OSError:  # a client that does not read is not waited for
                self._refuse(client)
                return
        if len(client.line) >= LONGEST_LINE:
            self._refuse(client)

    def _answer_untrusted(self, line: bytes, client: _Client) -> bytes | None:
        """What to say to a line, or None if it is no line of ours."""
        if client.token is not None:
            return b"%d\n" % client.echoes if line == b"count" else None
        hello = _HELLO.fullmatch(line)
        if hello is None:
            return None
        token = bytes.fromhex(hello[1].decode())
        if token in self._tokens:
            return None
        udp = self._udp_at(host_of(client.connection.getsockname()))
        client.token = token
        self._tokens[token] = client
        self._greeted += 1
        return b"ok %d\n" % udp.port

    def _udp_at(self, host: str) -> UdpSocket:
        if host not in self._udp:
            try:
                udp = UdpSocket(
                    host,
                    port=self.address[1],
                    buffer_bytes=QUEUE_BYTES,
                    batching=False,
                )
            except ConfigError:
                udp = UdpSocket(host, buffer_bytes=QUEUE_BYTES, batching=False)
            self._udp[host] = udp
            self._selector.register(udp, selectors.EVENT_READ)
        return self._udp[host]

    def _echo(self, udp: UdpSocket) -> None:
        """Send back what is in the queue now; a flood waits for the next turn."""
        for _ in range(_DATAGRAMS_A_TURN):
            received = udp.receive_batch(self._buffer)
            if received is None:
                return
            datagram = self._buffer[: received.num_bytes]
            client = self._tokens.get(bytes(datagram[:16]))
            if (
                received.num_bytes < HEADER.size
                or client is None
                or client.host != host_of(received.address)
                or client.echoes >= _MAX_ECHOES
            ):
                self._ignored += 1
                continue
            client.echoes += 1
            client.last_heard_s = self._clock()
            try:
                udp.send_batch(datagram, len(datagram), received.address)
            except SegmentTooLargeError:  # our route back is narrower than theirs
                self._ignored += 1
                continue
            self._echoes += 1

    def _drop_idle(self) -> None:
        oldest_s = self._clock() - _IDLE_S
        for client in tuple(self._clients.values()):
            if client.last_heard_s < oldest_s:
                self._refuse(client)

    def _refuse(self, client: _Client) -> None:
        self._refused += 1
        self._drop(client)

    def _drop(self, client: _Client) -> None:
        if client.token is not None:
            del self._tokens[client.token]
        del self._clients[client.connection]
        self._selector.unregister(client.connection)
        client.connection.close()
