"""Bytes: the datagram header (spec N2) and the control messages.

A datagram is a 24-byte header in network byte order, then the chunk::

    0        1      2        4         8         16         20       22     24
    version  kind   bucket   counter   session   sequence   length   rank   data...

``kind`` is the direction of the round, or PING in the reachability check. ``length``
counts the bytes of data. Data is little-endian, as nearly every machine has it in
memory; the handshake refuses a rank of another byte order.

A control message is a 4-byte length in network order, then msgpack.
"""

from collections.abc import Iterator
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from tailbound.config import LossBound
from tailbound.errors import WireError
from tailbound.protocol.events import Direction, RoundKey

VERSION: Final = 1
"""Bumped with every change of the bytes; peers of other versions are refused."""

PING: Final = 2
"""``kind`` of a reachability datagram."""

HEADER: Final = np.dtype(
    [
        ("version", "u1"),
        ("kind", "u1"),
        ("bucket", ">u2"),
        ("counter", ">u4"),
        ("session", ">u8"),
        ("sequence", ">u4"),
        ("length", ">u2"),
        ("rank", ">u2"),
    ]
)
HEADER_BYTES: Final = HEADER.itemsize
PREFIX_BYTES: Final = 16
"""Version, kind, bucket, counter and session: equal in all datagrams of a round."""

WIRE_BYTE_ORDER: Final = "little"
"""Of the data; the header is in network order."""
MAX_SEQUENCE: Final = 2**32 - 1
COUNTER_PERIOD: Final = 2**32
MAX_FRAME_BYTES: Final = 8 << 20
"""A longer control message is malformed; bounds what a peer can make us hold."""
GATHER_PIECE_BYTES: Final = 1 << 20
"""A longer contribution to an all-gather comes in pieces of this size."""
IP_UDP_BYTES: Final = {4: 28, 6: 48}
"""IP and UDP header bytes, by IP version."""
MAX_UDP_BYTES: Final = {4: 65507, 6: 65487}
MAX_BUCKET_BYTES: Final = 1 << 34
"""Cut into the smallest datagrams, its bitmap still fits a control message."""


def datagram_bytes(mtu: int, ip_version: int) -> int:
    """UDP payload that fills an IP packet of ``mtu`` bytes (spec N2)."""
    return min(mtu - IP_UDP_BYTES[ip_version], MAX_UDP_BYTES[ip_version])


def make_header(key: RoundKey, session: int, rank: int) -> NDArray[np.void]:
    """A header of this round as a structured scalar; sequence and length are 0."""
    return np.array(
        (VERSION, key.direction, key.bucket, key.counter, session, 0, 0, rank),
        dtype=HEADER,
    )


def make_ping(session: int, rank: int, num_bytes: int) -> bytes:
    """A reachability datagram of exactly ``num_bytes``."""
    room = num_bytes - HEADER_BYTES
    header = np.array((VERSION, PING, 0, 0, session, 0, room, rank), dtype=HEADER)
    return header.tobytes() + bytes(room)


def headers_untrusted(
    data: memoryview, num_segments: int, segment_bytes: int
) -> NDArray[np.void]:
    """View the headers of equal datagrams that lie back to back.

    Args:
        data: at least ``num_segments * segment_bytes`` bytes.
        num_segments: datagrams, at least 1.
        segment_bytes: bytes of each, header included.

    Raises:
        WireError: a datagram is shorter than the header.
    """
    if segment_bytes < HEADER_BYTES or num_segments * segment_bytes > len(data):
        raise WireError(f"{num_segments} datagrams of {segment_bytes} bytes")
    return np.ndarray((num_segments,), HEADER, data, 0, (segment_bytes,))


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
        return (
            (self.weight == 0 or 1e-30 <= self.weight <= 1e30)
            and 1e-30 <= self.loss_scale <= 1e30
            and 0.0 <= self.computed <= self.planned <= 10**9
        )


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
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode_control(message: Message) -> bytes:
    """One control message as bytes, its length in front."""
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "big") + body


def decode_control_untrusted(body: bytes | memoryview) -> Message:
    """Parse the bytes behind a length.

    Raises:
        WireError: the bytes are no control message, or a field is out of range.
    """
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        # ValueError: LossBound checks its own ranges when it is made. RecursionError:
        # arrays nested thousands deep in a field that the decoder skips.
        raise WireError(f"not a control message: {error}") from error


class ControlReader:
    """Cuts a byte stream into control messages."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed_untrusted(self, data: bytes | memoryview) -> Iterator[Message]:
        """Take bytes in as they come and yield each message that is complete.

        Raises:
            WireError: the stream cannot be read on; close the connection.
        """
        self._pending += data
        while len(self._pending) >= 4:
            end = 4 + int.from_bytes(self._pending[:4], "big")
            if end > 4 + MAX_FRAME_BYTES:
                raise WireError(f"a control message of {end - 4} bytes")
            if len(self._pending) < end:
                break
            body = bytes(self._pending[4:end])
            # Before the yield: the caller may stop here and feed again later.
            del self._pending[:end]
            yield decode_control_untrusted(body)


def pack_bits(arrived_C: NDArray[np.bool_]) -> bytes:
    """One bit a chunk, most significant bit first."""
    return np.packbits(arrived_C).tobytes()


def unpack_bits_untrusted(bits: bytes, num_chunks: int) -> NDArray[np.bool_]:
    """Read a bitmap.

    Raises:
        WireError: it is not as long as ``num_chunks`` needs.
    """
    if len(bits) != (num_chunks + 7) // 8:
        raise WireError(f"a bitmap of {len(bits)} bytes for {num_chunks} chunks")
    raw = np.frombuffer(bits, dtype=np.uint8)
    return np.unpackbits(raw, count=num_chunks).view(np.bool_)
