"""Meeting: the handshake, the metadata both sides must share, and the UDP check (N1).

One link is one worker and the server. Both ends walk the same states::

    CONNECTED --agreed--> CHECKING --start--> RUNNING --bye--> CLOSED

In CHECKING each side sends UDP pings of several sizes and tells over TCP the largest
that came through, so a blocked port or a path that cannot carry full packets is found
before training and not as packet loss.
"""

from collections.abc import Sequence
from enum import Enum

from tailbound.errors import (
    PeerProtocolError,
    TailboundError,
    UnreachableError,
    WireError,
)
from tailbound.protocol.messages import BucketSpec, Hello, Refuse, Start, Welcome
from tailbound.protocol.wire import (
    HEADER_BYTES,
    MAX_BUCKET_BYTES,
    MAX_UDP_BYTES,
    VERSION,
    WIRE_BYTE_ORDER,
    make_ping,
)
from tailbound.reduction import FORMATS


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
"""Between two series of pings, while a link is checked."""
PING_GRACE_S = 0.2
"""How long the largest size may take once a smaller one came through both ways."""
CHECK_TIMEOUT_S = 5.0
"""UDP that lets nothing through for so long counts as blocked (FIELD S16)."""
FALLBACK_DATAGRAM_BYTES = (1232, 548)
"""Tried below the MTU's size: IPv6's and IPv4's guaranteed minimum packets."""
MIN_ROOM_BYTES = 8
"""Data that every datagram has room for: one element of the widest dtype."""
MTU_RANGE = (576, 65536)
"""IPv4's guaranteed minimum packet, and Linux's loopback device."""
MAX_DIMENSIONS = 64
MAX_WINDOW = 1 << 20
"""Rounds that the regime detector may average: bounds what it holds."""


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
    if ours.bound != theirs.bound:
        return Refuse(
            "bound",
            f"{ours.bound} ({here})",
            f"{theirs.bound} ({there})",
            "give every rank the same LossBound",
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
    if hello.byte_order != WIRE_BYTE_ORDER:
        return Refuse(
            "byte order",
            f"{WIRE_BYTE_ORDER} (the wire)",
            f"{hello.byte_order} (rank {hello.rank})",
            "run all ranks on little-endian machines",
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
    return check_metadata(hello)


def check_metadata(hello: Hello) -> Refuse | None:
    """What a server checks of a worker's numbers before it computes with them."""
    there = f"rank {hello.rank}"
    for field, value, (low, high) in (
        ("number of buckets", len(hello.buckets), (1, 65536)),
        ("mtu", hello.mtu, MTU_RANGE),
        ("UDP port", hello.udp_port, (0, 65535)),
        ("LossBound window", hello.bound.window, (1, MAX_WINDOW)),
    ):
        if not low <= value <= high:
            return Refuse(
                field,
                f"{low} to {high} (the server)",
                f"{value} ({there})",
                "change it on every rank",
            )
    for bucket in hello.buckets:
        refusal = check_bucket(bucket, there)
        if refusal is not None:
            return refusal
    return None


def check_bucket(bucket: BucketSpec, there: str) -> Refuse | None:
    """Whether a bucket can be cut, summed and named in a bitmap."""
    if bucket.dtype not in FORMATS:
        return Refuse(
            "dtype",
            f"{', '.join(FORMATS)} (the server)",
            f"{bucket.dtype} ({there})",
            "train in one of these",
        )
    if len(bucket.names) != len(bucket.shapes):
        return Refuse(
            "metadata",
            "a shape per tensor (the server)",
            f"{len(bucket.names)} names, {len(bucket.shapes)} shapes ({there})",
            "report this",
        )
    # One by one first: the product of absurd lengths would take hours.
    for name, shape in zip(bucket.names, bucket.shapes, strict=True):
        if len(shape) > MAX_DIMENSIONS or not all(
            0 <= length <= MAX_BUCKET_BYTES for length in shape
        ):
            return Refuse(
                "shape",
                f"{MAX_DIMENSIONS} lengths of 0 to {MAX_BUCKET_BYTES} (the server)",
                f"{name} {list(shape[:MAX_DIMENSIONS])} ({there})",
                "report this",
            )
    num_bytes = bucket.num_elements * FORMATS[bucket.dtype].sum.itemsize
    if not 0 < num_bytes <= MAX_BUCKET_BYTES:
        return Refuse(
            "bytes of a bucket",
            f"1 to {MAX_BUCKET_BYTES} (the server)",
            f"{num_bytes} ({there})",
            "use smaller buckets, each with an element",
        )
    return None


def check_welcome_untrusted(welcome: Welcome) -> None:
    """What a worker checks of the server's answer.

    Raises:
        WireError: a number that no server says.
    """
    low, high = HEADER_BYTES + MIN_ROOM_BYTES, MAX_UDP_BYTES[4]
    sizes = welcome.ping_bytes
    if not sizes or list(sizes) != sorted(set(sizes), reverse=True):
        raise WireError(f"ping sizes {list(sizes)}, not falling")
    if sizes[0] > high or sizes[-1] < low:
        raise WireError(f"ping sizes {list(sizes)}, not {low} to {high}")
    if len(sizes) > 1 + len(FALLBACK_DATAGRAM_BYTES):
        raise WireError(f"{len(sizes)} ping sizes")
    if not 0 <= welcome.udp_port <= 65535:
        raise WireError(f"UDP port {welcome.udp_port}")
    if welcome.session < 0:
        raise WireError(f"session {welcome.session}")


def check_start_untrusted(start: Start, largest_bytes: int) -> None:
    """What a worker checks of the agreed size, given the largest ping's.

    Raises:
        WireError: no element fits, or a full datagram is larger than that ping.
    """
    high = largest_bytes - HEADER_BYTES
    if not MIN_ROOM_BYTES <= start.payload_bytes <= high:
        raise WireError(
            f"payload of {start.payload_bytes} bytes, not {MIN_ROOM_BYTES} to {high}"
        )


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
        self._sizes = sizes
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

    def exclude(self, num_bytes: int) -> None:
        """A ping of this size cannot even leave here: no use in waiting for it."""
        self._pings = [ping for ping in self._pings if len(ping) < num_bytes]
        self._largest = max(map(len, self._pings), default=self._largest)

    @property
    def largest_bytes(self) -> int:
        """The largest ping that is tried."""
        return self._sizes[0]

    def receive_ping(self, num_bytes: int) -> bool:
        """Note a ping; True if it is larger than those before and must be told.

        A size that is not tried is not noted, for the agreed size is one of these.
        """
        if num_bytes <= self.seen_bytes or num_bytes not in self._sizes:
            return False
        self.seen_bytes = num_bytes
        return True

    def receive_seen_untrusted(self, num_bytes: int) -> None:
        """The peer told the largest ping that it got.

        Raises:
            WireError: no ping has this size.
        """
        if num_bytes not in self._sizes:
            raise WireError(f"a ping of {num_bytes} bytes, not {list(self._sizes)}")
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
        if self.seen_bytes and self.peer_seen_bytes:
            return self._next_s
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
