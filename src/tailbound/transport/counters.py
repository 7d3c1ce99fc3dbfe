"""What a UDP socket counted, and how its errors are sorted for that."""

import errno
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from tailbound.transport.addresses import Address

# The kernel or the device is full for a moment; the same call works later.
BLOCKED = frozenset({errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM})
# The batch is refused as a batch: this interface cannot cut it up.
NOT_BATCHED = frozenset(
    {errno.EIO, errno.EINVAL, errno.EMSGSIZE, errno.EOPNOTSUPP, errno.ENOPROTOOPT}
)
# The datagram is gone, or news (ICMP) about an earlier one came in. Whether the peer
# still lives is for the control channel and the silence timer to say.
LOST = frozenset(
    {
        errno.ECONNREFUSED,
        errno.EHOSTUNREACH,
        errno.EHOSTDOWN,
        errno.ENETUNREACH,
        errno.ENETDOWN,
        errno.EPERM,
        errno.EACCES,
        errno.EPROTO,
        errno.ENONET,
    }
)
# On the receiving side it is all news about what was sent.
NEWS = LOST | {errno.EMSGSIZE, errno.EOPNOTSUPP, errno.ENOPROTOOPT}


@dataclass(frozen=True, slots=True)
class UdpStatistics:
    """What one socket did since it was made. A batch is one system call."""

    batches_sent: int
    datagrams_sent: int
    bytes_sent: int
    batches_received: int
    datagrams_received: int
    bytes_received: int
    blocked: int
    """Calls that met a full queue (EAGAIN) or a full device (ENOBUFS)."""
    unbatched: tuple[Address, ...]
    """Destinations whose path refused a batch; they get one datagram a call."""
    send_errors: Mapping[str, int]
    """Failed calls by errno name, blocked ones left out."""
    receive_errors: Mapping[str, int]
    """ICMP news that came up while receiving, by errno name."""
    truncated: int
    """Batches cut off by a small buffer and thrown away."""
    empty: int
    """Datagrams without a byte, thrown away."""
    overflow: int
    """Dropped here because the receive queue was full: not the network's loss. As
    far as the last receive knew; older kernels count a joined batch once."""


def add_statistics(parts: Iterable[UdpStatistics]) -> UdpStatistics:
    """What several sockets of one process did together."""
    all_parts = list(parts)
    total: dict[str, Any] = {}
    for item in fields(UdpStatistics):
        values = [getattr(part, item.name) for part in all_parts]
        if item.name == "unbatched":
            total[item.name] = tuple(address for value in values for address in value)
        elif item.name.endswith("_errors"):
            total[item.name] = dict(sum(map(Counter, values), Counter()))
        else:
            total[item.name] = sum(values)
    return UdpStatistics(**total)
