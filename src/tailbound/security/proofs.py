"""Proofs that both ends of a connection know the job's secret, which neither tells.

Each end draws a nonce. Then each sends an HMAC over the protocol version and both
nonces. A proof is good for one connection, since its nonces are; and for one end, since
the label says which, so that it cannot be sent back to who made it.
"""

import hashlib
import hmac
import struct
from typing import Final, NamedTuple

from tailbound.security.keys import DIGEST

NONCE_BYTES: Final = 32
"""Random bytes that each end adds: a proof that was overheard fits no other."""

_HEAD = struct.Struct(">H")


class Transcript(NamedTuple):
    """What both ends of a connection said before either is trusted."""

    version: int
    """Of the protocol, 0 to 65535."""
    connecting_nonce: bytes
    accepting_nonce: bytes
    """Each NONCE_BYTES."""
    binding: bytes = b""
    """Names what the connection runs through, such as a certificate's digest: the same
    for both ends unless somebody sits between them."""

    def pack(self) -> bytes:
        """As bytes, such that no two transcripts look alike: only the last varies."""
        head = _HEAD.pack(self.version)
        return head + self.connecting_nonce + self.accepting_nonce + self.binding

    def digest(self) -> bytes:
        """32 bytes that no other connection has: the salt of this link's keys."""
        return hashlib.new(DIGEST, self.pack()).digest()


def prove(key: bytes, transcript: Transcript, *, is_connecting: bool) -> bytes:
    """The proof of one end, 32 bytes.

    Args:
        key: from ``keys.proof_key``.
        transcript: of the connection.
        is_connecting: of which end.
    """
    label = b"connecting" if is_connecting else b"accepting"
    return hmac.digest(key, label + transcript.pack(), DIGEST)


def is_proof_untrusted(
    proof: bytes, key: bytes, transcript: Transcript, *, is_connecting: bool
) -> bool:
    """True if these bytes are that end's proof; takes as long whatever is wrong."""
    expected = prove(key, transcript, is_connecting=is_connecting)
    return hmac.compare_digest(proof, expected)
