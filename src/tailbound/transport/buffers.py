"""How much a socket's two queues may hold: asked for, and really given.

The kernel clamps a request to a limit without an error, and in a container that limit
often cannot be changed, so the granted size is read back and said (FIELD S15).
"""

import functools
import logging
import socket

# Linux's numbers; the socket module of Python 3.11 has no names for these.
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33

_log = logging.getLogger("tailbound")


def grant_buffers(
    opened: socket.socket, receive_bytes: int, send_bytes: int | None = None
) -> tuple[int, int]:
    """Ask for queues of this size, past the limit where privileges allow it.

    Args:
        opened: any socket.
        receive_bytes: bytes of data that the receive queue should hold.
        send_bytes: the same for the send queue; None: as much.

    Returns:
        What the kernel says it gave to receive and to send, in bytes. Linux doubles
        the number for its own bookkeeping, so half of it is data.
    """
    granted = []
    for force, option, wanted in (
        (_SO_RCVBUFFORCE, socket.SO_RCVBUF, receive_bytes),
        (_SO_SNDBUFFORCE, socket.SO_SNDBUF, send_bytes or receive_bytes),
    ):
        try:
            opened.setsockopt(socket.SOL_SOCKET, force, wanted)
        except OSError:
            opened.setsockopt(socket.SOL_SOCKET, option, wanted)
        granted.append(opened.getsockopt(socket.SOL_SOCKET, option))
    return granted[0], granted[1]


def is_enough(granted: int, wanted: int) -> bool:
    """True if a queue with this grant holds that many bytes of data."""
    return granted // 2 >= wanted


def raise_command(name: str, wanted: int) -> str:
    """The command that lifts the limit of ``rmem`` or ``wmem`` to ``wanted`` bytes."""
    return f"sysctl -w net.core.{name}_max={wanted}"


@functools.cache
def warn_if_small(name: str, granted: int, wanted: int) -> None:
    """Log how to get the queue that was asked for; once per process for each size.

    Args:
        name: ``rmem`` or ``wmem``, as in the limit's name.
        granted: what the kernel says, in bytes.
        wanted: what was asked for, in bytes.
    """
    if not is_enough(granted, wanted):
        _log.warning(
            "UDP %s queue: asked for %d bytes, the kernel gives %d (half of it data); "
            "bursts may overflow it. To raise it: %s",
            "receive" if name == "rmem" else "send",
            wanted,
            granted,
            raise_command(name, wanted),
        )
