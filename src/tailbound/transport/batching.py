"""What this kernel does with batches of datagrams, found by sending one.

Kernels advertise UDP_SEGMENT and UDP_GRO that containers, emulated kernels and some
interfaces do not carry out, so two segments are sent over loopback and compared.

Source: FIELD S12 to S14 and "Facts measured"; udp(7).
"""

import functools
import socket
import struct
from typing import Any, NamedTuple

MAX_SEGMENTS = 64
"""Of one batch. Kernels before 6.9 take 64, later ones 128."""

# Linux's numbers; the socket module of Python 3.11 has no names for these.
SOL_UDP, UDP_SEGMENT, UDP_GRO = 17, 103, 104
ANCILLARY_BYTES = 2 * socket.CMSG_SPACE(4)
"""Room for the segment size and the drop counter, 4 bytes each."""

Ancillary = tuple[tuple[int, int, bytes], ...]

# A short last segment, and contents that differ, so that a kernel which repeats,
# pads or swaps segments fails the test.
_FIRST, _LAST = bytes(range(1, 121)), bytes(range(200, 140, -1))
_ANSWER_S = 0.5


class Batching(NamedTuple):
    """What works here."""

    gso: bool
    """A batch is cut into datagrams on the way out (UDP_SEGMENT)."""
    gro: bool
    """Datagrams are joined into a batch on the way in (UDP_GRO)."""
    reason: str
    """Why not, in words; empty if both work."""


def probe_batching(host: str = "127.0.0.1") -> Batching:
    """Send two segments over loopback and compare; once per process and family.

    Args:
        host: any address of the family to test.
    """
    return _probe_once(socket.AF_INET6 if ":" in host else socket.AF_INET)


def segment_ancillary(segment_bytes: int) -> Ancillary:
    """The message that makes the kernel cut a batch up: a 2-byte size."""
    return ((SOL_UDP, UDP_SEGMENT, struct.pack("=H", segment_bytes)),)


def probe_loopback(family: socket.AddressFamily) -> Batching:
    """The same, each time anew."""
    try:
        with (
            socket.socket(family, socket.SOCK_DGRAM) as sender,
            socket.socket(family, socket.SOCK_DGRAM) as receiver,
        ):
            receiver.bind(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0))
            receiver.settimeout(_ANSWER_S)
            return self_test(sender, receiver)
    except OSError as error:
        return Batching(gso=False, gro=False, reason=f"no loopback socket: {error}")


_probe_once = functools.cache(probe_loopback)


def self_test(sender: socket.socket, receiver: socket.socket) -> Batching:
    """Send one batch to a plain receiver, then one to a joining receiver.

    Args:
        sender: an unconnected UDP socket.
        receiver: a bound UDP socket with a timeout; has UDP_GRO on afterwards.
    """
    gso = False
    try:
        _send_pair(sender, receiver)
        gso = receiver.recv(65535) == _FIRST and receiver.recv(65535) == _LAST
        if not gso:
            return Batching(False, False, "the two test segments arrived changed")
        receiver.setsockopt(SOL_UDP, UDP_GRO, 1)
        _send_pair(sender, receiver)
        data, ancillary, _, _ = receiver.recvmsg(65535, ANCILLARY_BYTES)
    except OSError as error:
        half = "UDP_GRO" if gso else "UDP_SEGMENT"
        return Batching(gso, False, f"{half}: {error.strerror or error}")
    gro = data == _FIRST + _LAST and _sizes(ancillary) == [len(_FIRST)]
    return Batching(True, gro, "" if gro else "the kernel does not join datagrams")


def _send_pair(sender: socket.socket, receiver: socket.socket) -> None:
    ancillary = segment_ancillary(len(_FIRST))
    sender.sendmsg((_FIRST, _LAST), ancillary, 0, receiver.getsockname())


def _sizes(ancillary: list[Any]) -> list[int]:
    return [
        struct.unpack("=I", value)[0]
        for level, kind, value in ancillary
        if level == SOL_UDP and kind == UDP_GRO
    ]
