"""Many datagrams in one system call, where the kernel joins none (recvmmsg).

A path whose packets the kernel does not join (no GRO on the interface, a virtual
network) costs a call for each datagram otherwise, and a call from Python costs more
than the kernel's work. The C library's own function fills slots of one buffer, each as
long as a full datagram, so that full ones lie back to back as a joined batch does.

Source: recvmmsg(2); DESIGN, lesson (e) of the first mesh; docs/design/0028.
"""

import ctypes
import errno
import socket
import struct
import sys
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailbound.transport.addresses import Address

MAX_DATAGRAMS = 128
"""Of one call: 184 KiB of Ethernet packets, which stay in the second-level cache."""
SINGLES = 256
"""Datagrams in a row that came alone: the kernel joins none on this path."""
TRY_AGAIN = 1 << 14
"""Datagrams after which the kernel is asked once more to join them."""
NAME_BYTES = 28
"""A sockaddr_in6."""
CONTROL_BYTES = 64
SO_RXQ_OVFL = 40
"""Linux's number; the socket module of Python 3.11 has no name for it."""

_IOVEC = np.dtype([("base", "u8"), ("len", "u8")])
_MMSGHDR = np.dtype(
    {
        "names": [
            "name",
            "namelen",
            "iov",
            "iovlen",
            "control",
            "controllen",
            "flags",
            "len",
        ],
        "formats": ["u8", "u4", "u8", "u8", "u8", "u8", "i4", "u4"],
        "offsets": [0, 8, 16, 24, 32, 40, 48, 56],
        "itemsize": 64,
    }
)
"""struct mmsghdr of 64-bit Linux."""

Recvmmsg = Callable[[int, int, int, int, None], int]


def find_recvmmsg() -> Recvmmsg | None:
    """The C library's function; None where there is none or its layout is another."""
    if not sys.platform.startswith("linux") or struct.calcsize("P") != 8:
        return None
    try:
        function = ctypes.CDLL(None, use_errno=True).recvmmsg
    except (AttributeError, OSError):
        return None
    function.argtypes = (
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_uint,
        ctypes.c_int,
        ctypes.c_void_p,
    )
    function.restype = ctypes.c_int
    found: Recvmmsg = function
    return found


class Filled(NamedTuple):
    """What one call brought, slot by slot."""

    num: int
    """Slots that were filled, from the first on; all of them: there may be more."""
    length_K: NDArray[np.uint32]
    """Bytes of each datagram; 0 for one to leave out."""
    is_even: bool
    """Every slot is full to its end: the datagrams lie back to back."""
    num_foreign: int
    """From other addresses than expected."""
    num_cut: int
    """Longer than a slot, so their ends are lost."""
    drops: int | None
    """The kernel's count of datagrams that its full queue lost, if it told."""


class Joining:
    """Finds out whether the kernel joins the datagrams of a path."""

    def __init__(self) -> None:
        self.takes_many = False
        """It does not: many calls, or one for many, are needed."""
        self.largest_bytes = 0
        """Of a datagram that came alone."""
        self._in_a_row = 0

    def note_batch(self, num_bytes: int, segment_bytes: int) -> bool:
        """A call brought a batch; True: from now on take many in one call."""
        if num_bytes > segment_bytes:
            self._in_a_row = 0
            return False
        self._in_a_row += 1
        self.largest_bytes = max(self.largest_bytes, num_bytes)
        return self._turn(self._in_a_row > SINGLES, True)

    def note_many(self, filled: Filled) -> bool:
        """A call brought many; True: ask the kernel again to join them."""
        self._in_a_row += filled.num
        return self._turn(filled.num_cut > 0 or self._in_a_row > TRY_AGAIN, False)

    def _turn(self, is_time: bool, takes_many: bool) -> bool:
        if is_time:
            self.takes_many, self._in_a_row = takes_many, 0
        return is_time


class DatagramVector:
    """Slots of one buffer, and what the kernel needs to fill them in one call.

    Args:
        buffer: writable; where datagrams go.
        recvmmsg: called instead of the C library's.
    """

    def __init__(self, buffer: memoryview, recvmmsg: Recvmmsg) -> None:
        self._recvmmsg = recvmmsg
        self.buffer = buffer
        self._raw = np.frombuffer(buffer, np.uint8)
        self.slot_bytes = 0
        self.num_slots = 0
        self._iov_K = np.zeros(MAX_DATAGRAMS, _IOVEC)
        self._names_KB = np.zeros((MAX_DATAGRAMS, NAME_BYTES), np.uint8)
        self._control_KB = np.zeros((MAX_DATAGRAMS, CONTROL_BYTES), np.uint8)
        self._headers_K = np.zeros(MAX_DATAGRAMS, _MMSGHDR)
        number_K = np.arange(MAX_DATAGRAMS, dtype=np.uint64)
        self._headers_K["name"] = self._names_KB.ctypes.data + number_K * NAME_BYTES
        self._headers_K["iov"] = self._iov_K.ctypes.data + number_K * _IOVEC.itemsize
        self._headers_K["iovlen"] = 1
        self._headers_K["control"] = (
            self._control_KB.ctypes.data + number_K * CONTROL_BYTES
        )
        self._expected: Address | None = None
        self._expected_B = np.zeros(0, np.uint8)

    def aim(self, slot_bytes: int) -> None:
        """Cut the buffer into slots of so many bytes, as many as fit."""
        if slot_bytes == self.slot_bytes:
            return
        self.slot_bytes = slot_bytes
        self.num_slots = min(MAX_DATAGRAMS, len(self.buffer) // slot_bytes)
        number_K = np.arange(MAX_DATAGRAMS, dtype=np.uint64)
        self._iov_K["base"] = self._raw.ctypes.data + number_K * slot_bytes
        self._iov_K["len"] = slot_bytes

    def receive(self, fd: int, expected: Address) -> Filled | None:
        """Fill slots with what the queue holds, in one call; None: it is empty.

        Args:
            fd: a UDP socket.
            expected: where datagrams should come from; others are left out.

        Raises:
            OSError: the call failed.
        """
        self._headers_K["namelen"] = NAME_BYTES
        self._headers_K["controllen"] = CONTROL_BYTES
        num = self._recvmmsg(
            fd,
            self._headers_K.ctypes.data,
            self.num_slots,
            socket.MSG_DONTWAIT,
            None,
        )
        if num < 0:
            code = ctypes.get_errno()
            if code in (errno.EAGAIN, errno.EWOULDBLOCK):
                return None
            raise OSError(code, "recvmmsg failed")
        if num == 0:
            return None
        used_K = self._headers_K[:num]
        length_K = used_K["len"]
        is_cut_K = (used_K["flags"] & socket.MSG_TRUNC) != 0
        num_cut = int(np.count_nonzero(is_cut_K))
        if expected != self._expected:
            self._expected, self._expected_B = expected, _sockaddr(expected)
        names_KB = self._names_KB[:num, : len(self._expected_B)]
        is_ours_K = (names_KB == self._expected_B).all(axis=1)
        num_foreign = num - int(np.count_nonzero(is_ours_K))
        is_even = (
            not num_cut
            and not num_foreign
            and bool((length_K == self.slot_bytes).all())
        )
        if not is_even:
            length_K = np.where(is_ours_K & ~is_cut_K, length_K, 0).astype(np.uint32)
        return Filled(num, length_K, is_even, num_foreign, num_cut, self._drops(num))

    def _drops(self, num: int) -> int | None:
        """The drop counter beside the last datagram."""
        last = self._headers_K[num - 1]
        if last["controllen"] < 20:
            return None
        control = self._control_KB[num - 1].tobytes()
        _, level, kind, value = struct.unpack_from("=QiiI", control)
        return value if (level, kind) == (socket.SOL_SOCKET, SO_RXQ_OVFL) else None


def _sockaddr(address: Address) -> NDArray[np.uint8]:
    """The bytes by which the kernel names a source, as far as they are fixed."""
    host, port = address[0].partition("%")[0], address[1]
    if ":" in host:
        # Flow label and scope may differ between what was dialled and what is seen.
        head = struct.pack("=HHI", socket.AF_INET6, socket.htons(port), 0)
        raw = head + socket.inet_pton(socket.AF_INET6, host)
    else:
        head = struct.pack("=HH", socket.AF_INET, socket.htons(port))
        raw = head + socket.inet_pton(socket.AF_INET, host)
    return np.frombuffer(raw, np.uint8)
