"""What stands before a control connection where the job has a secret.

::

    connecting end    MAGIC (8)  nonce (32)
    accepting end     MAGIC (8)  nonce (32)  proof (32)
    connecting end    proof (32)
    both              the control messages of the protocol

Neither lets anything through before it has the other's proof. The accepting end is
silent until it is greeted, so that one without a secret, which begins with a control
message, can be told in its own language. No frame begins with those bytes, which name
the security level too: ends that differ in it can say so.

Source: docs/design/0032, 0037.
"""

from typing import Final

from tailbound.config import Security
from tailbound.security.keys import DIGEST_BYTES, proof_key
from tailbound.security.proofs import (
    NONCE_BYTES,
    Transcript,
    is_proof_untrusted,
    prove,
)

MAGICS: Final[dict[Security, bytes]] = {
    "session": b"\xfftbgate1",
    "authenticated": b"\xfftbauth1",
    "encrypted": b"\xfftbencr1",
}
"""As the length of a frame each would be beyond what any may have."""
MAGIC_BYTES: Final = 8
VERSION: Final = 1
GREETING_BYTES: Final = MAGIC_BYTES + NONCE_BYTES


class Gate:
    """One end of a connection: shut, then open or failed.

    Args:
        secret: of the job.
        nonce: NONCE_BYTES random bytes, never used before.
        is_connecting: whether this end opened the connection.
        level: of this end; the other must have the same.
        binding: see ``Transcript``.
    """

    def __init__(
        self,
        secret: bytes,
        nonce: bytes,
        *,
        is_connecting: bool,
        level: Security = "session",
        binding: bytes = b"",
    ) -> None:
        self._key, self._nonce = proof_key(secret), nonce
        self._is_connecting, self._binding = is_connecting, binding
        self._magic = MAGICS[level]
        self._received = bytearray()
        self._transcript: Transcript | None = None
        self.outgoing = bytearray(self._magic + nonce if is_connecting else b"")
        """To be sent; the caller takes it away."""
        self.is_open = False
        self.has_failed = False
        """The other end did not prove that it knows the secret."""
        self.their_level: Security | None = None
        """If that is because its security level is another one."""

    @property
    def salt(self) -> bytes:
        """32 bytes that no other connection has, once it is open."""
        assert self._transcript is not None, "the gate is shut"
        return self._transcript.digest()

    def feed_untrusted(self, data: bytes) -> bytes:
        """Take in bytes of the other end; returns what came after its proof."""
        if self.has_failed:
            return b""
        received = self._received
        received += data
        if self._transcript is None:
            if not self._magic.startswith(received[:MAGIC_BYTES]):
                self._refuse(bytes(received))
            if self.has_failed or len(received) < GREETING_BYTES:
                return b""
            self._greet(bytes(received[MAGIC_BYTES:GREETING_BYTES]))
            del received[:GREETING_BYTES]
        if self.has_failed or len(received) < DIGEST_BYTES:
            return b""
        assert self._transcript is not None  # both nonces are there
        self.is_open = is_proof_untrusted(
            bytes(received[:DIGEST_BYTES]),
            self._key,
            self._transcript,
            is_connecting=not self._is_connecting,
        )
        self.has_failed = not self.is_open
        return bytes(received[DIGEST_BYTES:]) if self.is_open else b""

    def _refuse(self, received: bytes) -> None:
        """The other end is none of ours: was it made for another level?"""
        self.has_failed = True
        self.their_level = level_of(received)
        if self.their_level is not None and not self._is_connecting:
            self.outgoing += self._magic  # which tells it ours

    def _greet(self, their_nonce: bytes) -> None:
        """Both nonces are known: say our proof."""
        if their_nonce == self._nonce:
            self.has_failed = True  # our own words, sent back
            return
        nonces = (self._nonce, their_nonce)
        connecting, accepting = nonces if self._is_connecting else nonces[::-1]
        self._transcript = Transcript(VERSION, connecting, accepting, self._binding)
        if not self._is_connecting:
            self.outgoing += self._magic + self._nonce
        self.outgoing += prove(
            self._key, self._transcript, is_connecting=self._is_connecting
        )


def level_of(received: bytes) -> Security | None:
    """The level whose gate says these first bytes, if it is one's."""
    for level, magic in MAGICS.items():
        if received[:MAGIC_BYTES] == magic:
            return level
    return None
