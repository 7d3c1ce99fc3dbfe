"""What a UDP socket counted, as one frozen record."""

from collections.abc import Mapping
from dataclasses import dataclass

from tailbound.transport.addresses import Address


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
