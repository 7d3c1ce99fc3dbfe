"""The near end of an echo: time single datagrams, count what comes back of many."""

import secrets
import select
import socket
import time
from types import TracebackType

from tailbound.errors import TailboundError
from tailbound.transport.addresses import Address, host_of
from tailbound.transport.counters import UdpStatistics
from tailbound.transport.datagrams import SegmentTooLargeError
from tailbound.transport.echo import HEADER, LONGEST_LINE, QUEUE_BYTES
from tailbound.transport.udp import UdpSocket

# In flight at once: well below what every kernel queues.
_WINDOW_BYTES = 32 * 1024


class EchoUnavailableError(TailboundError):
    """No echo server answers at that address; ``kind`` says how it fails.

    ``refused``: nothing listens. ``silent``: no answer, as behind a firewall, or no
    route. ``foreign``: something else listens there.
    """

    def __init__(self, kind: str, host: str, port: int, reason: str) -> None:
        super().__init__(kind, host, port, reason)
        self.kind, self.host, self.port, self.reason = kind, host, port, reason

    def __str__(self) -> str:
        return (
            f"no tailbound doctor at {self.host} port {self.port} over TCP: "
            f"{self.reason}"
        )


class EchoClient:
    """A greeted connection to an echo server, and a UDP socket beside it.

    Args:
        host: name or address of the server.
        port: its TCP port.
        timeout_s: longest wait for the connection and for each answer over TCP.
        batching: as in :class:`UdpSocket`.

    Raises:
        EchoUnavailableError: no echo server answers there.
    """

    udp_address: Address
    """Where the server takes datagrams."""

    def __init__(
        self, host: str, port: int, timeout_s: float, *, batching: bool | None = None
    ) -> None:
        self._place = host, port
        self._token = secrets.token_bytes(16)
        self._sequence = 0
        self._buffer = memoryview(bytearray(65535))
        self._connection = self._connect(timeout_s)
        try:
            answer = self._ask(f"tailbound-doctor 1 {self._token.hex()}")
            word, _, number = answer.partition(" ")
            if word != "ok" or not number.isdecimal() or not 0 < int(number) < 65536:
                raise self._foreign(repr(answer))
            peer = self._connection.getpeername()
            self.udp_address = (peer[0], int(number), *peer[2:])
            self._udp = UdpSocket(
                host_of(self._connection.getsockname()),
                buffer_bytes=QUEUE_BYTES,
                batching=batching,
            )
        except BaseException:
            self._connection.close()
            raise

    def round_trip_s(self, payload_bytes: int, wait_s: float) -> float | None:
        """Send one datagram of this size and time its return.

        Args:
            payload_bytes: UDP payload, 20 to 65507.
            wait_s: longest wait for it.

        Returns:
            Seconds, or None if it does not come back or is too large to leave.
        """
        start_s = time.monotonic()
        try:
            came = self._exchange(1, payload_bytes, wait_s)
        except SegmentTooLargeError:
            return None
        return time.monotonic() - start_s if came else None

    def echoes(self, num_datagrams: int, payload_bytes: int, wait_s: float) -> int:
        """Send many, a few at a time, and count the different ones that come back.

        Args:
            num_datagrams: how many.
            payload_bytes: UDP payload of each, 20 to 65507.
            wait_s: longest wait for the last few; all waits together are bounded
                by ten times that.

        Raises:
            SegmentTooLargeError: this size does not leave the machine.
        """
        window = max(1, _WINDOW_BYTES // payload_bytes)
        give_up_s = time.monotonic() + 10 * wait_s
        came = 0
        for first in range(0, num_datagrams, window):
            left_s = max(0.0, min(wait_s, give_up_s - time.monotonic()))
            count = min(window, num_datagrams - first)
            came += self._exchange(count, payload_bytes, left_s)
        return came

    def received_by_server(self) -> int:
        """How many of our datagrams reached it since the connection began.

        Raises:
            EchoUnavailableError: the server is gone.
        """
        answer = self._ask("count")
        if not answer.isdecimal():
            raise self._foreign(repr(answer))
        return int(answer)

    def statistics(self) -> UdpStatistics:
        """The counters of the UDP socket."""
        return self._udp.statistics()

    def close(self) -> None:
        """Close both sockets."""
        self._udp.close()
        self._connection.close()

    def __enter__(self) -> "EchoClient":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _exchange(self, count: int, payload_bytes: int, wait_s: float) -> int:
        """Send some and wait until all are back or the time is over."""
        numbers = range(self._sequence, self._sequence + count)
        self._sequence += count
        padding = bytes(payload_bytes - HEADER.size)
        batch = b"".join(HEADER.pack(self._token, n) + padding for n in numbers)
        deadline_s = time.monotonic() + wait_s
        sent = 0
        missing = set(numbers)
        while missing:
            if sent < len(batch):
                rest = memoryview(batch)[sent:]
                sent += self._udp.send_batch(rest, payload_bytes, self.udp_address)
            self._take(missing, payload_bytes)
            left_s = deadline_s - time.monotonic()
            if not missing or left_s <= 0.0:
                break
            # Short while something waits to be sent, since a full device does not
            # show in select.
            select.select([self._udp], [], [], left_s if sent == len(batch) else 1e-3)
        return count - len(missing)

    def _take(self, missing: set[int], payload_bytes: int) -> None:
        """Strike off what came back."""
        while (received := self._udp.receive_batch(self._buffer)) is not None:
            if received.address[:2] != self.udp_address[:2]:
                continue
            for start in range(0, received.num_bytes, received.segment_bytes):
                end = min(start + received.segment_bytes, received.num_bytes)
                if end - start == payload_bytes:
                    token, number = HEADER.unpack_from(self._buffer, start)
                    if token == self._token:
                        missing.discard(number)

    def _connect(self, timeout_s: float) -> socket.socket:
        try:
            return socket.create_connection(self._place, timeout_s)
        except ConnectionRefusedError as error:
            raise EchoUnavailableError(
                "refused", *self._place, "the connection is refused"
            ) from error
        except OSError as error:
            reason = error.strerror or f"no answer within {timeout_s:g} s"
            raise EchoUnavailableError("silent", *self._place, reason) from error

    def _ask(self, line: str) -> str:
        """Say a line over TCP and return the answer, without its newline."""
        answer = b""
        try:
            self._connection.sendall(line.encode() + b"\n")
            while not answer.endswith(b"\n") and len(answer) < LONGEST_LINE:
                data = self._connection.recv(LONGEST_LINE)
                if not data:
                    raise self._foreign("the connection is closed")
                answer += data
        except OSError as error:
            reason = error.strerror or "it connects and then says nothing"
            raise self._foreign(reason) from error
        return answer[:-1].decode("ascii", "replace")

    def _foreign(self, reason: str) -> EchoUnavailableError:
        return EchoUnavailableError("foreign", *self._place, reason)
