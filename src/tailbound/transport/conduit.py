"""One link's sockets, and what waits to pass through them.

A conduit is one link's TCP connection and UDP socket. Control bytes that were read wait
until the datagram queue was seen empty (DESIGN decision 8); control bytes that were
written and may be lost are followed by a nudge (docs/design/0027).
"""

import contextlib
import fcntl
import logging
import socket
import struct
import termios
import time
from collections.abc import Callable
from typing import Any

from tailbound.protocol.endpoint import Endpoint
from tailbound.protocol.link import Link
from tailbound.protocol.messages import Nudge, Refuse
from tailbound.protocol.wire import encode_control
from tailbound.security.channel import Channel, Failure
from tailbound.security.sealing import TRAILER_BYTES, Sealing
from tailbound.testing.impaired_path import ImpairedPath
from tailbound.transport.batching import MAX_SEGMENTS
from tailbound.transport.datagrams import SegmentTooLargeError
from tailbound.transport.forks import close_in_forked_children
from tailbound.transport.udp import UdpSocket

_log = logging.getLogger("tailbound")

BUFFER_BYTES = 65536
TCP_READ_BYTES = 1 << 18
BATCHES_AT_ONCE = 4
"""Kernel batches packed in one go: half of a batch's cost is Python's, per call. More
would not stay in the second-level cache until the kernel has copied it."""
SEALED_BYTES = BATCHES_AT_ONCE * (BUFFER_BYTES + MAX_SEGMENTS * TRAILER_BYTES)
"""The same batches when they are sealed."""
MAX_GROUPS_PER_TURN = 4
"""Sent on one link before the others get their turn: 1 MiB."""
KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6),
)
"""A machine that lost power says nothing: the kernel finds out within 45 s."""
QUICK_REPAIR = ((16, 1), (45, 5000), (46, 5000))
"""TCP_THIN_LINEAR_TIMEOUTS, TCP_RTO_MIN_US and TCP_DELACK_MAX_US. A lost control
message is alone on its way, so TCP would notice after 200 ms only."""
FIRST_NUDGE_S = 0.004
"""After control bytes were written. What follows a lost segment makes the peer's kernel
ask for it at once; doubles each time."""
MAX_NUDGES = 5
NUDGE = encode_control(Nudge())
FLOOD = 1000
"""Datagrams of other sources on a link, each counted; a mistake sends a few at most."""
DEVICE_PAUSE_S = 0.001
"""A full device (ENOBUFS) has no event that says when it has room again."""


class Conduit:
    """One link's sockets and what waits to pass through them.

    Args:
        number: of the link at this station.
        tcp: its connection.
        udp: its socket.
        link: as the endpoint sees it.
        path: the bad network in front of it, if there is one.
        channel: what control bytes pass through.
        make_sealing: from the channel's salt, once it is open, and a batch's size;
            None: datagrams are not sealed.
    """

    def __init__(
        self,
        number: int,
        tcp: socket.socket,
        udp: UdpSocket,
        link: Link,
        path: ImpairedPath | None,
        channel: Channel,
        make_sealing: Callable[[bytes, int], Sealing] | None = None,
    ) -> None:
        self.number, self.tcp, self.udp, self.link, self.path = (
            number,
            tcp,
            udp,
            link,
            path,
        )
        self._channel = channel
        self._make_sealing = make_sealing
        self.is_sealed = make_sealing is not None
        """No datagram counts before there is ``sealing``."""
        self.sealing: Sealing | None = None
        self.outgoing = channel.outgoing
        """Bytes of the control stream that the kernel has not taken yet."""
        self.incoming: list[bytes] = []
        """Control bytes that were read and wait for the datagrams before them."""
        self.is_drained = True
        """The datagram queue was seen empty after ``incoming`` was read."""
        self.lost: str | None = None
        """Why the TCP connection ended, if it did."""
        self.told_lost = False
        self.nudge_s: float | None = None
        """When to look whether the peer's kernel has what was written."""
        self._num_nudges = 0
        self.retry_s: float | None = None
        """When to try a full device again."""
        self._peer_address: tuple[Any, ...] | None = None
        self._num_strangers = 0
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

    def count_strangers(self, endpoint: Endpoint, num: int) -> None:
        """Datagrams of another source; a flood of them is left to the kernel (0038)."""
        endpoint.count_foreign(self.number, num)
        is_first = self._num_strangers < FLOOD
        self._num_strangers += num
        if is_first and self._num_strangers >= FLOOD and self._peer_address is not None:
            with contextlib.suppress(OSError):  # no route: they go on being counted
                self.udp.connect(self._peer_address)
                _log.warning(
                    "%s: %d datagrams from other addresses than %s port %d; the kernel "
                    "drops them from now on",
                    self.link.name,
                    self._num_strangers,
                    *self._peer_address[:2],
                )

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
                self.lost = self._channel.closed
                return
            passed = self._channel.feed_untrusted(data)
            if self._channel.failure is not None:
                self._give_up(self._channel.failure)
                return
            if self._make_sealing is not None and self._channel.is_open:
                self.sealing = self._make_sealing(self._channel.salt, SEALED_BYTES)
                self._make_sealing = None
            if passed:
                self.incoming.append(passed)
            if len(data) < TCP_READ_BYTES:
                return

    def _give_up(self, failure: Failure) -> None:
        """The other end does not belong here: tell it, if it can be told."""
        if failure.peer_reads_frames:
            refuse = Refuse(
                # As it is read at the other end: here is there.
                failure.field,
                failure.theirs,
                failure.ours,
                failure.remedy,
            )
            self.outgoing += encode_control(refuse)
        with contextlib.suppress(OSError):
            self.tcp.send(self.outgoing)
        self.lost = failure.text
        _log.warning("%s: %s", self.link.name, failure.text)

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
            self._num_nudges = 0
            self.nudge_s = time.monotonic() + FIRST_NUDGE_S
        return True

    def nudge(self, now: float) -> None:
        """Write a word that says nothing, if what was written before may be lost."""
        if self.nudge_s is None or now < self.nudge_s:
            return
        self.nudge_s = None
        if self.lost is not None or self.outgoing or not self._unacknowledged_bytes():
            return
        if not self._channel.is_open:
            return  # a word of the protocol would come before the proof
        self._channel.send(NUDGE)
        with contextlib.suppress(OSError):
            del self.outgoing[: self.tcp.send(self.outgoing)]
        self._num_nudges += 1
        if self._num_nudges < MAX_NUDGES:
            self.nudge_s = now + FIRST_NUDGE_S * 2.0**self._num_nudges

    def _unacknowledged_bytes(self) -> int:
        raw = fcntl.ioctl(self.tcp.fileno(), termios.TIOCOUTQ, b"\0\0\0\0")
        (num,) = struct.unpack("=i", raw)
        return int(num)

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
                self._channel.send(data)
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
            if self.sealing is not None:
                sent_sealed = self.sealing.seal(self._batch, *sent)
                self._pending, self._pending_segment_bytes = sent_sealed
            else:
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
                    added = TRAILER_BYTES if self.is_sealed else 0
                    self.link.check.exclude(error.segment_bytes - added)
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


def make_quick(tcp: socket.socket) -> None:
    """Set up a control connection: no waiting, dead peers and lost bytes seen soon."""
    tcp.setblocking(False)
    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for level, option, value in KEEPALIVE:
        tcp.setsockopt(level, option, value)
    for option, value in QUICK_REPAIR:
        # Kernels before 6.15 know only the first; nudges do without.
        with contextlib.suppress(OSError):
            tcp.setsockopt(socket.IPPROTO_TCP, option, value)
