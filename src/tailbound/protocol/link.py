"""What an endpoint keeps of one TCP connection and the UDP path beside it."""

from collections import deque
from dataclasses import dataclass, field

from tailbound.protocol.intake import LinkCounters
from tailbound.protocol.messages import Message
from tailbound.protocol.session import LinkState, UdpCheck
from tailbound.protocol.wire import ControlReader


@dataclass(slots=True)
class Link:
    """One TCP connection with its UDP path, as the endpoint sees it."""

    peer_rank: int
    """-1 until the peer said it."""
    name: str
    """For messages: ``rank 2``, or the address while the rank is unknown."""
    address: str
    """The peer's host, as its datagrams' source names it."""
    scope: tuple[int, ...] = ()
    """Flow and scope of an IPv6 address."""
    udp_port: int = 0
    """Ours, for this link."""
    peer_udp_port: int = 0
    """Theirs; 0 until known. The I/O side reads it to address datagrams."""
    mtu: int = 1500
    window_bytes: int = 1 << 20
    ip_version: int = 4
    state: LinkState = LinkState.CONNECTED
    check: UdpCheck | None = None
    reader: ControlReader = field(default_factory=ControlReader)
    control: deque[Message] = field(default_factory=deque)
    pings: deque[bytes] = field(default_factory=deque)
    counters: LinkCounters = field(default_factory=LinkCounters)
