"""Meeting: the handshake, the metadata both sides must share, and the UDP check (N1).

One link is one worker and the server. Both ends walk the same states::

    CONNECTED --agreed--> CHECKING --start--> RUNNING --bye--> CLOSED

In CHECKING each side sends UDP pings of several sizes and tells over TCP the largest
that came through, so a blocked port or a path that cannot carry full packets is found
before training and not as packet loss.
"""

from collections.abc import Sequence
from enum import Enum

from tailbound.errors import PeerProtocolError, TailboundError, UnreachableError
from tailbound.protocol.wire import VERSION, Hello, Refuse, make_ping


class LinkState(Enum):
    """What a link waits for."""

    CONNECTED = "connected"
    """For hello (server) or welcome (worker)."""
    CHECKING = "checking UDP"
    """For pings both ways, then start."""
    RUNNING = "running"
    """For rounds."""
    CLOSED = "closed"
    """For nothing."""


TRANSITIONS: dict[tuple[LinkState, str], LinkState] = {
    (LinkState.CONNECTED, "agreed"): LinkState.CHECKING,
    (LinkState.CHECKING, "start"): LinkState.RUNNING,
    (LinkState.RUNNING, "bye"): LinkState.CLOSED,
}
"""Every legal (state, input) and the state after it; anything else is an error."""

PING_INTERVAL_S = 0.02
PING_GRACE_S = 0.2
"""How long the largest size may take once a smaller one came through both ways."""
CHECK_TIMEOUT_S = 5.0
"""UDP that lets nothing through for so long counts as blocked (FIELD S16)."""
FALLBACK_DATAGRAM_BYTES = (1232, 548)
"""Tried below the MTU's size: IPv6's and IPv4's guaranteed minimum packets."""


def next_state(state: LinkState, event: str, *, peer: str) -> LinkState:
    """Look up a transition.

    Raises:
        PeerProtocolError: the event is illegal in this state.
    """
    after = TRANSITIONS.get((state, event))
    if after is None:
        raise PeerProtocolError(peer, state.value, event)
    return after


def ping_sizes(largest_bytes: int) -> tuple[int, ...]:
    """Datagram sizes to try, the largest first."""
    smaller = (size for size in FALLBACK_DATAGRAM_BYTES if size < largest_bytes)
    return (largest_bytes, *smaller)


def find_mismatch(ours: Hello, theirs: Hello) -> Refuse | None:
    """Compare two ranks' metadata, the first rank's being ``ours``.

    Returns:
        What differs, with both values, or None if they agree.
    """
    here, there = f"rank {ours.rank}", f"rank {theirs.rank}"
    for field, remedy in (
        ("byte_order", "all ranks need machines of one byte order"),
        ("bound", "give every rank the same LossBound"),
    ):
        if getattr(ours, field) != getattr(theirs, field):
            return Refuse(
                field,
                f"{getattr(ours, field)} ({here})",
                f"{getattr(theirs, field)} ({there})",
                remedy,
            )
    remedy = "build the same model on every rank"
    if len(ours.buckets) != len(theirs.buckets):
        return Refuse(
            "number of buckets",
            f"{len(ours.buckets)} ({here})",
            f"{len(theirs.buckets)} ({there})",
            remedy,
        )
    for bucket, other in zip(ours.buckets, theirs.buckets, strict=True):
        if bucket.dtype != other.dtype:
            return Refuse(
                "dtype", f"{bucket.dtype} ({here})", f"{other.dtype} ({there})", remedy
            )
        if len(bucket.names) != len(other.names):
            return Refuse(
                "number of tensors",
                f"{len(bucket.names)} ({here})",
                f"{len(other.names)} ({there})",
                remedy,
            )
        pairs = zip(bucket.names, other.names, bucket.shapes, other.shapes, strict=True)
        for name, other_name, shape, other_shape in pairs:
            if (name, shape) != (other_name, other_shape):
                return Refuse(
                    "tensor",
                    f"{name} {list(shape)} ({here})",
                    f"{other_name} {list(other_shape)} ({there})",
                    remedy,
                )
    return None


def check_hello(
    hello: Hello, *, world_size: int, taken: Sequence[int]
) -> Refuse | None:
    """What a server checks of each worker before it compares them with each other."""
    there = f"{hello.rank} of {hello.world_size}"
    if hello.version != VERSION:
        return Refuse(
            "protocol version",
            f"{VERSION} (the server)",
            f"{hello.version} (a worker)",
            "install the same tailbound version everywhere",
        )
    if hello.world_size != world_size:
        return Refuse(
            "number of workers",
            f"{world_size} (the server)",
            f"{hello.world_size} (rank {hello.rank})",
            "start the server with the job's world size",
        )
    if not 0 <= hello.rank < world_size:
        return Refuse(
            "rank", f"0 to {world_size - 1} (the server)", there, "check RANK"
        )
    if hello.rank in taken:
        return Refuse(
            "rank",
            f"{hello.rank} is taken (the server)",
            there,
            "give every worker its own RANK, or its own server to every job",
        )
    for bucket in hello.buckets:
        if len(bucket.names) != len(bucket.shapes) or not bucket.names:
            return Refuse(
                "metadata", "a shape per tensor (the server)", there, "report this"
            )
        if any(length < 0 for shape in bucket.shapes for length in shape):
            return Refuse("metadata", "shapes >= 0 (the server)", there, "report this")
    return None


class UdpCheck:
    """One end of the reachability check of one link."""

    def __init__(
        self,
        *,
        session: int,
        rank: int,
        sizes: tuple[int, ...],
        peer: str,
        address: str,
        now: float,
        timeout_s: float,
    ) -> None:
        self.peer, self.address = peer, address
        self._pings = [make_ping(session, rank, size) for size in sizes]
        self._largest = sizes[0]
        self._next_s = now
        self._deadline_s = now + min(timeout_s, CHECK_TIMEOUT_S)
        self._both_s: float | None = None
        self.seen_bytes = 0
        """Largest ping that came through to us."""
        self.peer_seen_bytes = 0
        """Largest ping that came through to the peer."""

    def due_pings(self, now: float) -> list[bytes]:
        """The datagrams to send now."""
        if now < self._next_s:
            return []
        self._next_s = now + PING_INTERVAL_S
        return self._pings

    def receive_ping(self, num_bytes: int) -> bool:
        """Note a ping; True if it is larger than those before and must be told."""
        if num_bytes <= self.seen_bytes:
            return False
        self.seen_bytes = num_bytes
        return True

    def receive_seen(self, num_bytes: int) -> None:
        """The peer told the largest ping that it got."""
        self.peer_seen_bytes = max(self.peer_seen_bytes, num_bytes)

    def settled_bytes(self, now: float) -> int | None:
        """The datagram size that works both ways, or None while undecided."""
        both = min(self.seen_bytes, self.peer_seen_bytes)
        if not both:
            return None
        if self._both_s is None:
            self._both_s = now
        if both < self._largest and now < self._both_s + PING_GRACE_S:
            return None
        return both

    def timer(self) -> float:
        """When something is due next."""
        return min(self._next_s, self._deadline_s)

    def handle_timer(self, now: float) -> TailboundError | None:
        """Returns the error that ends the check if its deadline has passed."""
        if now < self._deadline_s or (self.seen_bytes and self.peer_seen_bytes):
            return None
        ways = [
            way
            for way, seen in (
                ("from there to here", self.seen_bytes),
                ("from here to there", self.peer_seen_bytes),
            )
            if not seen
        ]
        return UnreachableError(
            "UDP",
            self.peer,
            self.address,
            f"TCP works, but no datagram came {' nor '.join(ways)}; open UDP for this "
            "port in the firewall, or set Transport(port_range=...) to open ports",
        )
