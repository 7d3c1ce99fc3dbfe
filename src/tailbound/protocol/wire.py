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

from tailbound.errors import WireError
from tailbound.protocol.events import RoundKey
from tailbound.protocol.messages import Message

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
