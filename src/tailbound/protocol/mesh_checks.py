"""What the ranks of a mesh check of each other's words."""

from tailbound.errors import ConfigError, HandshakeError, WireError
from tailbound.protocol.events import peer_name
from tailbound.protocol.messages import MeshHello, Ready, Refuse, ShardBegin
from tailbound.protocol.session import MAX_WINDOW, MIN_ROOM_BYTES, MTU_RANGE
from tailbound.protocol.wire import (
    MAX_BUCKET_BYTES,
    MAX_UDP_BYTES,
    WIRE_BYTE_ORDER,
)
from tailbound.reduction import FORMATS

MAX_NORMS = 1 << 20
"""Tensors of one bucket whose norms may be told apart."""


def compare_hellos(ours: MeshHello, theirs: MeshHello) -> Refuse | None:
    """What two ranks of a mesh do not agree on, with both values; None: they agree."""
    here, there = peer_name(ours.rank), peer_name(theirs.rank)
    same = "give every rank the same LossBound"
    for field, our_value, their_value, remedy in (
        (
            "protocol version",
            ours.version,
            theirs.version,
            "install the same tailbound version everywhere",
        ),
        ("session", ours.session, theirs.session, "start every rank of the job anew"),
        (
            "number of ranks",
            ours.world_size,
            theirs.world_size,
            "start every rank with the job's world size",
        ),
        (
            "byte order",
            WIRE_BYTE_ORDER,
            theirs.byte_order,
            "run all ranks on little-endian machines",
        ),
        ("bound", ours.bound, theirs.bound, same),
    ):
        if our_value != their_value:
            return Refuse(
                field, f"{our_value} ({here})", f"{their_value} ({there})", remedy
            )
    for field, value, (low, high) in (
        ("rank", theirs.rank, (0, ours.world_size - 1)),
        ("mtu", theirs.mtu, MTU_RANGE),
        ("UDP port", theirs.udp_port, (1, 65535)),
        ("LossBound window", theirs.bound.window, (1, MAX_WINDOW)),
    ):
        if not low <= value <= high:
            return Refuse(
                field, f"{low} to {high} ({here})", f"{value} ({there})", "report this"
            )
    return None


def check_ready_untrusted(ready: Ready) -> None:
    """What a rank checks of another's word that its links work.

    Raises:
        WireError: a size that no datagram has, or a queue of less than nothing.
    """
    if not MIN_ROOM_BYTES <= ready.payload_bytes <= MAX_UDP_BYTES[4]:
        raise WireError(f"payload of {ready.payload_bytes} bytes")
    if ready.window_bytes < 0:
        raise WireError(f"a queue of {ready.window_bytes} bytes")


def check_begin(begin: ShardBegin) -> None:
    """Refuse what this rank's own caller may not announce.

    Raises:
        ConfigError: a number is out of range.
    """
    if not begin.is_in_range:
        raise ConfigError(
            "weight is 0 or 1e-30 to 1e30, loss_scale 1e-30 to 1e30, and computed 0 to "
            f"planned, not {begin.weight}, {begin.loss_scale}, and {begin.computed} of "
            f"{begin.planned}"
        )


def check_begin_untrusted(begin: ShardBegin) -> None:
    """What a rank checks of another's announcement before it cuts the bucket.

    Raises:
        WireError: a number is out of range.
    """
    fmt = FORMATS.get(begin.dtype)
    if (
        fmt is None
        or not begin.is_in_range
        or not 0 < begin.num_elements * fmt.sum.itemsize <= MAX_BUCKET_BYTES
        or not 1 <= begin.num_norms <= MAX_NORMS
        or not 0 <= begin.bucket <= 0xFFFF
    ):
        raise WireError(f"an announcement of {begin}")


def compare_begins(rank: int, ours: ShardBegin, other: int, theirs: ShardBegin) -> None:
    """Whether two ranks mean the same round.

    Raises:
        HandshakeError: they do not; names both sides' values.
    """
    remedy = "build the same model on every rank, and make the same calls in each step"
    for field, value, other_value in (
        ("order in the step", ours.bucket, theirs.bucket),
        ("step", ours.step, theirs.step),
        ("dtype", ours.dtype, theirs.dtype),
        ("elements of a bucket", ours.num_elements, theirs.num_elements),
        ("last bucket of the step", ours.is_last, theirs.is_last),
        ("tensors of a bucket", ours.num_norms, theirs.num_norms),
    ):
        if value != other_value:
            raise HandshakeError(
                field,
                f"{value} ({peer_name(rank)})",
                f"{other_value} ({peer_name(other)})",
                remedy,
            )
