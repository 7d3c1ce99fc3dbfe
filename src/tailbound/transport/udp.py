"""UDP sockets whose unit is a batch: up to 64 KiB of datagrams in one system call.

A batch is datagrams of ``segment_bytes`` back to back, the last may be shorter. Where
the kernel can, it cuts the batch up on the way out (UDP_SEGMENT) and joins datagrams
on the way in (UDP_GRO); a self-test at start finds out, and a plain path of one
datagram a call does the same elsewhere. Nothing here waits: a full queue is an answer.

Source: DESIGN.md, decision 1; spec N2; docs.kernel.org, udp(7) and socket(7).
"""

import errno
import logging
import socket
import struct
import types
from collections.abc import Callable
from typing import Any

from tailbound.transport.addresses import Address, open_bound, port_choices
from tailbound.transport.batching import (
    ANCILLARY_BYTES,
    MAX_SEGMENTS,
    SOL_UDP,
    UDP_GRO,
    Ancillary,
    probe_batching,
    segment_ancillary,
)
from tailbound.transport.buffers import grant_buffers, warn_if_small
from tailbound.transport.counters import BLOCKED, LOST, NEWS, NOT_BATCHED, UdpStatistics
from tailbound.transport.datagrams import Received, SegmentTooLargeError, received
from tailbound.transport.forks import close_in_forked_children
from tailbound.transport.vector import SO_RXQ_OVFL, DatagramVector, Filled, Joining

Buffer = bytes | bytearray | memoryview

# A plain int: with the enum, `flags & _CUT` would cost a microsecond a batch.
_CUT = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)
_unpack_u32 = struct.Struct("=I").unpack
# A flood of useless datagrams must not keep the caller from its timers.
_DISCARDS_IN_A_ROW = 64

_log = logging.getLogger("tailbound")


class UdpSocket:
    """A bound UDP socket, not connected, that sends and receives batches.

    Non-blocking, closed on exec and in forked children, never shared
    (no SO_REUSEPORT), never fragmented by IP. One thread at a time.

    Args:
        host: local address, IPv4 or IPv6 (``fe80::1%eth0`` with its scope).
        port: local port; 0 lets the kernel choose.
        port_range: first and last port to try instead, in order.
        buffer_bytes: asked of the kernel for each of the two queues.
        send_buffer_bytes: asked for the send queue instead.
        batching: False turns kernel batches off, True on untested, None tests.
        sendmsg: called instead of ``socket.socket.sendmsg``, the socket first.
        recvmsg_into: the same for ``socket.socket.recvmsg_into``.

    Raises:
        ConfigError: the address is not ours, or no port is free.
    """

    requested_bytes: int
    """Queue size asked for, in bytes."""
    granted_receive_bytes: int
    """What the kernel says it gave. Linux doubles the number for its own
    bookkeeping, so at most half of it is data."""
    granted_send_bytes: int
    """The same for the send queue."""
    gso: bool
    """Batches leave in one call."""
    gro: bool
    """Batches arrive in one call."""
    address: Address
    """Where the socket is bound, as the kernel says it."""
    max_batch_bytes: int
    """Largest batch of one call: what an IP packet carries."""
    blocked_by_device: bool
    """The last short send met a full device (ENOBUFS), not a full queue. The
    selector then says writable at once, so wait a millisecond instead."""

    def __init__(
        self,
        host: str,
        *,
        port: int = 0,
        port_range: tuple[int, int] | None = None,
        buffer_bytes: int = 8 << 20,
        send_buffer_bytes: int | None = None,
        batching: bool | None = None,
        sendmsg: Callable[..., int] | None = None,
        recvmsg_into: Callable[..., tuple[int, list[Any], int, Any]] | None = None,
    ) -> None:
        self._socket = open_bound(
            host, socket.SOCK_DGRAM, port_choices(port, port_range)
        )
        self.address = self._socket.getsockname()
        is_ipv6 = self._socket.family == socket.AF_INET6
        self._socket.setsockopt(socket.SOL_SOCKET, SO_RXQ_OVFL, 1)
        # 65535 less the UDP header and, over IPv4, the IP header; extension headers
        # of IPv6 count too, so 20 bytes stay free there.
        self.max_batch_bytes = 65487 if is_ipv6 else 65507
        self.blocked_by_device = False
        self._joining = Joining()
        self.requested_bytes = buffer_bytes
        self.granted_receive_bytes, self.granted_send_bytes = grant_buffers(
            self._socket, buffer_bytes, send_buffer_bytes
        )
        warn_if_small("rmem", self.granted_receive_bytes, buffer_bytes)
        warn_if_small(
            "wmem", self.granted_send_bytes, send_buffer_bytes or buffer_bytes
        )
        if batching is None:
            self.gso, self.gro, _ = probe_batching(self.address[0])
        else:
            self.gso = self.gro = batching
        if self.gro:
            self._socket.setsockopt(SOL_UDP, UDP_GRO, 1)
        self._sendmsg: Callable[..., int] = (
            types.MethodType(sendmsg, self._socket) if sendmsg else self._socket.sendmsg
        )
        self._recvmsg_into: Callable[..., tuple[int, list[Any], int, Any]] = (
            types.MethodType(recvmsg_into, self._socket)
            if recvmsg_into
            else self._socket.recvmsg_into
        )
        self._ancillary: Ancillary = ()
        self._ancillary_segment_bytes = 0
        self._unbatched: dict[Address, None] = {}
        self._send_errors: dict[str, int] = {}
        self._receive_errors: dict[str, int] = {}
        self._batches_sent = self._datagrams_sent = self._bytes_sent = 0
        self._batches_received = self._datagrams_received = self._bytes_received = 0
        self._blocked = self._truncated = self._empty = 0
        self._overflow = self._drops_seen = 0
        close_in_forked_children(self)

    def connect(self, address: Address) -> None:
        """Let the kernel drop what others send.

        Raises:
            OSError: there is no route to that address now.
        """
        self._socket.connect(address)

    def send_batch(self, batch: Buffer, segment_bytes: int, address: Address) -> int:
        """Hand datagrams to the kernel without waiting.

        A batch above the kernel's limits goes out in several calls. One that the
        path refuses as a batch goes out again one datagram a call, as does all that
        follows to that address; nothing of it is lost.

        Args:
            batch: datagrams of ``segment_bytes`` back to back, the last may be
                shorter; items of one byte.
            segment_bytes: payload of each datagram, >= 1.
            address: destination, as ``socket`` takes it.

        Returns:
            Bytes that went, whole datagrams. Fewer than ``len(batch)``: the queue or
            the device is full (``blocked_by_device`` tells which), go on from there
            later. Datagrams lost to a firewall or an unreachable host count as gone
            and stand in ``statistics().send_errors``.

        Raises:
            SegmentTooLargeError: a single datagram is larger than the path takes.
            OSError: the socket is closed or the address is none.
        """
        num_bytes = len(batch)
        segments = self.max_batch_bytes // segment_bytes
        limit = segment_bytes * max(1, min(segments, MAX_SEGMENTS))
        if num_bytes <= limit:
            return self._send_part(batch, num_bytes, segment_bytes, address)
        view = memoryview(batch)
        sent = 0
        while sent < num_bytes:
            part = view[sent : sent + limit]
            try:
                went = self._send_part(part, len(part), segment_bytes, address)
            except SegmentTooLargeError as error:
                sent += error.sent_bytes
                raise SegmentTooLargeError(segment_bytes, address, sent) from error
            sent += went
            if went < len(part):
                break
        return sent

    def receive_batch(self, buffer: memoryview) -> Received | None:
        """Take the next batch from the queue into the buffer, in one call.

        Args:
            buffer: writable, 65535 bytes or more. What does not fit is lost: the
                batch is thrown away and counted as truncated.

        Returns:
            What arrived, or None if the queue is empty.

        Raises:
            OSError: the socket is closed.
        """
        for _ in range(_DISCARDS_IN_A_ROW):
            try:
                num_bytes, ancillary, flags, address = self._recvmsg_into(
                    (buffer,), ANCILLARY_BYTES
                )
            except BlockingIOError:
                return None
            except OSError as error:
                if error.errno not in NEWS:
                    raise
                _count(self._receive_errors, error)
                continue
            segment_bytes = num_bytes
            for level, kind, data in ancillary:
                if level == SOL_UDP and kind == UDP_GRO:
                    segment_bytes = _unpack_u32(data)[0]
                elif level == socket.SOL_SOCKET and kind == SO_RXQ_OVFL:
                    self._note_drops(_unpack_u32(data)[0])
            if flags & _CUT:
                self._truncated += 1
                continue
            if not num_bytes:
                self._empty += 1
                continue
            self._batches_received += 1
            self._datagrams_received += -(-num_bytes // segment_bytes)
            self._bytes_received += num_bytes
            if self._joining.note_batch(num_bytes, segment_bytes):
                self._join(False)
            return received((num_bytes, segment_bytes, address))
        return None

    def receive_many(self, vector: DatagramVector, expected: Address) -> Filled | None:
        """Take datagrams from the queue in one call, while ``takes_many``.

        Args:
            vector: where they go.
            expected: the peer's address; datagrams from others are left out.

        Returns:
            What arrived, or None if the queue is empty.

        Raises:
            OSError: the socket is closed.
        """
        vector.aim(self._joining.largest_bytes)
        try:
            filled = vector.receive(self.fileno(), expected)
        except OSError as error:
            if error.errno not in NEWS:
                raise
            _count(self._receive_errors, error)
            return None
        if filled is None:
            return None
        self._batches_received += 1
        self._datagrams_received += filled.num
        self._bytes_received += int(filled.length_K.sum())
        self._truncated += filled.num_cut
        if filled.drops is not None:
            self._note_drops(filled.drops)
        if self._joining.note_many(filled):
            self._join(True)
        return filled

    def _join(self, joins: bool) -> None:
        """Ask the kernel to join datagrams, or take them as they come."""
        if self.gro:
            self._socket.setsockopt(SOL_UDP, UDP_GRO, joins)

    def statistics(self) -> UdpStatistics:
        """The counters so far."""
        return UdpStatistics(
            batches_sent=self._batches_sent,
            datagrams_sent=self._datagrams_sent,
            bytes_sent=self._bytes_sent,
            batches_received=self._batches_received,
            datagrams_received=self._datagrams_received,
            bytes_received=self._bytes_received,
            blocked=self._blocked,
            unbatched=tuple(self._unbatched),
            send_errors=dict(self._send_errors),
            receive_errors=dict(self._receive_errors),
            truncated=self._truncated,
            empty=self._empty,
            overflow=self._overflow,
        )

    @property
    def takes_many(self) -> bool:
        """The kernel joins nothing on this path: use ``receive_many``."""
        return self._joining.takes_many

    @property
    def port(self) -> int:
        """The local port."""
        return int(self.address[1])

    def fileno(self) -> int:
        """The file descriptor, for a selector; -1 once closed."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the socket. Closing twice is fine."""
        self._socket.close()

    def _send_part(
        self, part: Buffer, num_bytes: int, segment_bytes: int, address: Address
    ) -> int:
        """Send what fits in one call, or datagram by datagram where that fails."""
        if (
            num_bytes <= segment_bytes
            or not self.gso
            or (self._unbatched and address in self._unbatched)
        ):
            return self._send_plain(part, num_bytes, segment_bytes, address)
        if segment_bytes != self._ancillary_segment_bytes:
            self._ancillary = segment_ancillary(segment_bytes)
            self._ancillary_segment_bytes = segment_bytes
        try:
            self._sendmsg((part,), self._ancillary, 0, address)
        except OSError as error:
            if error.errno in NOT_BATCHED:
                return self._fall_back(part, num_bytes, segment_bytes, address, error)
            return num_bytes if self._is_lost(error) else 0
        self._batches_sent += 1
        self._datagrams_sent += -(-num_bytes // segment_bytes)
        self._bytes_sent += num_bytes
        return num_bytes

    def _send_plain(
        self, part: Buffer, num_bytes: int, segment_bytes: int, address: Address
    ) -> int:
        """Send one datagram a call until all went or the queue is full."""
        view = memoryview(part)
        for start in range(0, num_bytes, segment_bytes):
            datagram = view[start : start + segment_bytes]
            try:
                self._sendmsg((datagram,), (), 0, address)
            except OSError as error:
                if error.errno == errno.EMSGSIZE:
                    _count(self._send_errors, error)
                    raise SegmentTooLargeError(len(datagram), address, start) from error
                if not self._is_lost(error):
                    return start
                continue
            self._batches_sent += 1
            self._datagrams_sent += 1
            self._bytes_sent += len(datagram)
        return num_bytes

    def _fall_back(
        self,
        part: Buffer,
        num_bytes: int,
        segment_bytes: int,
        address: Address,
        refusal: OSError,
    ) -> int:
        """Resend a refused batch unbatched, and remember it if that helps."""
        _count(self._send_errors, refusal)
        # Too large a segment is refused with the same errors; the plain path raises
        # for it, and the destination then keeps its batches.
        sent = self._send_plain(part, num_bytes, segment_bytes, address)
        if sent:
            self._unbatched[address] = None
            _log.warning(
                "batched sends to %s port %d fail (%s); sending one datagram a call "
                "there, which costs about ten times the CPU (ethtool -K DEVICE "
                "tx-checksumming on may help)",
                address[0],
                address[1],
                refusal.strerror or refusal,
            )
        return sent

    def _is_lost(self, error: OSError) -> bool:
        """Count a failed send. False: it was only blocked. Raise what is neither."""
        if error.errno in BLOCKED:
            self._blocked += 1
            self.blocked_by_device = error.errno != errno.EAGAIN
            return False
        _count(self._send_errors, error)
        if error.errno not in LOST:
            raise error
        return True

    def _note_drops(self, drops: int) -> None:
        """Follow the kernel's 32-bit drop counter across its wrap-around."""
        self._overflow += (drops - self._drops_seen) & 0xFFFFFFFF
        self._drops_seen = drops


def _count(counters: dict[str, int], error: OSError) -> None:
    name = errno.errorcode.get(error.errno or 0, str(error))
    counters[name] = counters.get(name, 0) + 1
