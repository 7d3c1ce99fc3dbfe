"""The control messages, as structures; ``wire`` turns them into bytes and back."""

import msgspec

from tailbound.config import LossBound
from tailbound.protocol.events import Direction, RoundKey


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class BucketSpec(msgspec.Struct, frozen=True, array_like=True):
    """What both sides must know of a bucket (spec N1)."""

    dtype: str
    """``float32``, ``float64``, ``float16`` or ``bfloat16``."""
    names: tuple[str, ...]
    """Of its tensors, in the order in which they lie in the bucket."""
    shapes: tuple[tuple[int, ...], ...]

    @property
    def num_elements(self) -> int:
        """Elements of all tensors together."""
        total = 0
        for shape in self.shapes:
            size = 1
            for length in shape:
                size *= length
            total += size
        return total


class Hello(_Message, frozen=True):
    """Worker to server, first: who I am and what I will send (spec N1)."""

    version: int
    rank: int
    world_size: int
    """Workers of the job, the server not counted."""
    byte_order: str
    """``little`` or ``big``."""
    buckets: tuple[BucketSpec, ...]
    """In the order in which they take turns."""
    bound: LossBound
    mtu: int
    """Bytes of an IP packet on my route to the server, 576 to 65536."""
    udp_port: int
    """Where I receive."""
    window_bytes: int
    """What my queue of datagrams holds."""


class Welcome(_Message, frozen=True):
    """Server to worker, when all are here: your UDP port; now check UDP."""

    session: int
    """64 bits that every datagram of the job carries."""
    udp_port: int
    """Where the server receives from this worker."""
    ping_bytes: tuple[int, ...]
    """UDP payload sizes to try, the largest first."""


class Refuse(_Message, frozen=True):
    """Server to worker: we do not agree."""

    field: str
    ours: str
    theirs: str
    remedy: str


class PingSeen(_Message, frozen=True):
    """Either way: the largest reachability datagram that came through so far."""

    num_bytes: int


class Start(_Message, frozen=True):
    """Server to worker: all links work; these are the agreed sizes."""

    payload_bytes: int
    """Data of a full datagram: the largest ping of all links, less the header."""
    window_bytes: int
    """The smallest queue of all ranks."""


class Begin(_Message, frozen=True):
    """Worker to server: my gradient of this round is on its way."""

    counter: int
    bucket: int
    weight: float
    """0: I have nothing, no datagram follows. Else 1e-30 to 1e30."""
    learning_rate: float | None
    """For the detector's rule; None if it is not known."""
    loss_scale: float
    """Factor that the gradient carries, 1e-30 to 1e30."""
    computed: float = 1.0
    """Micro-batches that are in the gradient, 0 to planned."""
    planned: int = 1
    """Micro-batches that were to be, 0 to 1e9."""

    @property
    def is_in_range(self) -> bool:
        """True if sums and quotients with these numbers fit float32."""
        return are_counts_in_range(self)


class Mean(_Message, frozen=True):
    """Server to worker: the mean of this round is on its way; what holds next."""

    counter: int
    bucket: int
    total_weight: float
    """0: nobody had anything, no datagram follows."""
    p: float
    """Loss bound of the bucket's next round, a share in [0, 1)."""
    critical: bool
    """Regime of that round."""
    norm: float
    """L2 norm of this mean as the detector saw it; NaN if it was not finite."""
    ratio: float | None
    """Relative change that was compared with eta; None: no check."""
    verdict: str
    """What the detector decided, for people."""
    total_computed: float = 0.0
    """``computed`` of all workers."""
    total_planned: int = 0
    """``planned`` of all workers."""

    @property
    def is_in_range(self) -> bool:
        """True if p is a share, and the weight and the counts are numbers."""
        return (
            0.0 <= self.p < 1.0
            and 0.0 <= self.total_weight < float("inf")
            and 0.0 <= self.total_computed <= self.total_planned
        )


class _RoundMessage(_Message, frozen=True):
    counter: int
    bucket: int
    direction: Direction

    @property
    def key(self) -> RoundKey:
        """The round that this message names."""
        return RoundKey(self.counter, self.bucket, self.direction)


class Probe(_RoundMessage, frozen=True):
    """Sender to receiver: all that I had to send is sent; what is missing?"""


class Bitmap(_RoundMessage, frozen=True):
    """Receiver to sender: what has arrived, one bit a chunk, most significant first."""

    bits: bytes
    allowed: int = 0
    """Chunks that may be missing when the round closes."""


class Stop(_RoundMessage, frozen=True):
    """Receiver to sender: enough has arrived; the final bitmap."""

    bits: bytes


class Mark(_RoundMessage, frozen=True):
    """Sender to receiver: this many bytes of the round are sent; answer when read."""

    sent_bytes: int


class MarkSeen(_RoundMessage, frozen=True):
    """Receiver to sender: so many of your bytes have left my queue."""

    sent_bytes: int


class GatherPart(_Message, frozen=True):
    """A piece of a rank's contribution to an all-gather, relayed by the server."""

    rank: int
    """Whose contribution."""
    total_bytes: int
    """Of the whole contribution."""
    offset: int
    """Bytes of it that came before."""
    data: bytes


class Fail(_Message, frozen=True):
    """Either way: the job cannot go on."""

    origin: str
    """Who found out: ``rank 1``, ``the server``."""
    peers: tuple[str, ...]
    """The lost ranks, if any is lost."""
    phase: str
    """What was going on, such as ``the mean of round 3, bucket 0``."""
    message: str


class Bye(_Message, frozen=True):
    """Either way: the job is over for me, in good order."""


class Nudge(_Message, frozen=True):
    """Either way, at any time: TCP then notices that bytes before it are lost."""


class MeshHello(_Message, frozen=True):
    """Either way, first on a link of a mesh: who I am and what I will send."""

    version: int
    rank: int
    world_size: int
    byte_order: str
    """``little`` or ``big``."""
    session: int
    """Of this job, from where the ranks met; every datagram carries it."""
    bound: LossBound
    mtu: int
    """Bytes of an IP packet on my route to the peer, 576 to 65536."""
    udp_port: int
    """Where I receive from this peer."""
    window_bytes: int
    """What my queue of datagrams holds."""


class Ready(_Message, frozen=True):
    """Either way: all my links work; the smallest of all ranks' numbers are agreed."""

    payload_bytes: int
    """Data of a full datagram that gets through on all my links."""
    window_bytes: int
    """The smallest queue on them."""


class ShardBegin(_Message, frozen=True):
    """To every rank of a mesh: my gradient of this round is on its way."""

    counter: int
    bucket: int
    """Order of the call within its step."""
    step: int
    is_last: bool
    """The step has no round after this one."""
    dtype: str
    num_elements: int
    """Of the whole bucket."""
    num_norms: int
    """Tensors whose norms are told apart; 1: none are."""
    weight: float
    """0: I have nothing, no datagram follows. Else 1e-30 to 1e30."""
    learning_rate: float | None
    loss_scale: float
    computed: float
    planned: int

    @property
    def is_in_range(self) -> bool:
        """True if sums and quotients with these numbers fit float32."""
        return are_counts_in_range(self)


class ShardMean(_Message, frozen=True):
    """To every rank of a mesh: the mean of my shard is on its way."""

    counter: int
    bucket: int
    squares: tuple[float, ...]
    """Sum of squares of the mean within my shard, of each of ``num_norms`` tensors."""
    num_chunks: int
    """Of all ranks that had a gradient, my own included."""
    missing: int
    """Those that were missing when their rounds closed."""


Message = (
    Hello
    | Welcome
    | Refuse
    | PingSeen
    | Start
    | Begin
    | Mean
    | Probe
    | Bitmap
    | Stop
    | Mark
    | MarkSeen
    | GatherPart
    | Fail
    | Bye
    | Nudge
    | MeshHello
    | Ready
    | ShardBegin
    | ShardMean
)


def are_counts_in_range(begin: "Begin | ShardBegin") -> bool:
    """True if sums and quotients with a rank's numbers fit float32."""
    return (
        (begin.weight == 0 or 1e-30 <= begin.weight <= 1e30)
        and 1e-30 <= begin.loss_scale <= 1e30
        and 0.0 <= begin.computed <= begin.planned <= 10**9
    )
