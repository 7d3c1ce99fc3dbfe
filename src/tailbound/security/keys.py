"""Keys from the job's secret: HKDF with SHA-256, and a label for each use.

Source: RFC 5869.
"""

import hashlib
import hmac
import struct
from typing import Final

DIGEST: Final = "sha256"
DIGEST_BYTES: Final = hashlib.new(DIGEST).digest_size
KEY_BYTES: Final = 16
"""AES-128: for keys that nobody could guess anyway, and a third faster than AES-256."""

_LINK = struct.Struct(">HHQ")


def derive_key(secret: bytes, *, salt: bytes, info: bytes, num_bytes: int) -> bytes:
    """HKDF-SHA256: a key for one use, from a secret for many.

    Args:
        secret: input keying material.
        salt: fresh for each job or link, need not be secret; may be empty.
        info: names the use; two uses never share one.
        num_bytes: of the key, 1 to 8160.

    Source: RFC 5869, sections 2.2 and 2.3.
    """
    extracted = hmac.digest(salt or bytes(DIGEST_BYTES), secret, DIGEST)
    key = block = b""
    for number in range(1, -(-num_bytes // DIGEST_BYTES) + 1):
        block = hmac.digest(extracted, block + info + bytes((number,)), DIGEST)
        key += block
    return key[:num_bytes]


def proof_key(secret: bytes) -> bytes:
    """The key of the handshake's proofs; the secret itself is used for nothing else."""
    info = b"tailbound proof"
    return derive_key(secret, salt=b"", info=info, num_bytes=DIGEST_BYTES)


def datagram_key(
    secret: bytes, *, salt: bytes, sender: int, receiver: int, period: int
) -> bytes:
    """The key of one direction of one link, for one period of its datagrams.

    Args:
        secret: of the job.
        salt: of this incarnation of the link, from ``proofs.Transcript.digest``: it
            holds both ends' random nonces.
        sender: rank that seals.
        receiver: rank that opens; swapped with ``sender`` it is another key.
        period: how many keys this direction has used up.
    """
    info = b"tailbound datagrams" + _LINK.pack(sender, receiver, period)
    return derive_key(secret, salt=salt, info=info, num_bytes=KEY_BYTES)
