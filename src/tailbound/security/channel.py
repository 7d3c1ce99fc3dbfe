"""What the control bytes of one connection pass through, by security level.

``Plain``: nothing. ``Guarded``: the gate, then nothing. ``Tls``: TLS 1.3 and, inside
it, the gate, whose proofs cover the accepting end's certificate: somebody between the
ends has another one, and the proof fails. So a certificate that an end made for itself
is as good as the secret; no authority is needed.

All are sans-IO: bytes of the stream in, bytes for the stream out. Where the levels of
the ends differ, each can tell from the other's first bytes, and says so.

Source: docs/design/0037; RFC 8446 (TLS 1.3).
"""

import hashlib
import ssl
from typing import Final, NamedTuple, Protocol

from tailbound.config import Security
from tailbound.security.gate import MAGICS, Gate, level_of
from tailbound.security.keys import DIGEST

CLOSED: Final = "its connection closed"
UNPROVED: Final = (
    "it did not prove that it knows this job's secret: set the same TAILBOUND_SECRET "
    "on every rank"
)
TLS_CONTENT_TYPES: Final = range(0x14, 0x18)
"""First byte of a TLS record. No frame and no gate begins so."""
READ_BYTES: Final = 1 << 16
SAME_LEVEL: Final = "give the same Transport(security=...) on every rank"
TLS_LEVEL: Final = "authenticated or encrypted"


class Failure(NamedTuple):
    """Why a channel will not open."""

    text: str
    field: str
    """What differs: ``secret`` or ``security``."""
    ours: str
    theirs: str
    remedy: str
    peer_reads_frames: bool
    """The other end has no channel: it can be told in the protocol's own words."""


class Channel(Protocol):
    """One end of a control connection, as the bytes of its stream see it."""

    outgoing: bytearray
    """For the stream; the caller takes it away."""
    is_open: bool
    """What was sent reaches the peer, and ``salt`` may be asked for."""
    failure: Failure | None

    @property
    def closed(self) -> str:
        """What it means if the stream ends now."""

    @property
    def salt(self) -> bytes:
        """32 bytes that no other connection has."""

    def feed_untrusted(self, data: bytes) -> bytes:
        """Take in bytes of the stream; returns what the peer said."""

    def send(self, data: bytes) -> None:
        """Say something to the peer, once it may be heard."""


class Plain:
    """No secret and no TLS."""

    is_open = True
    closed = CLOSED
    salt = b""

    def __init__(self) -> None:
        self.outgoing = bytearray()
        self.failure: Failure | None = None
        self._is_first = True

    def feed_untrusted(self, data: bytes) -> bytes:
        """See ``Channel``."""
        if self._is_first and data[0] in TLS_CONTENT_TYPES:
            self.failure = _another_level("session", TLS_LEVEL)
            self.outgoing += MAGICS["session"]
        self._is_first = False
        return b"" if self.failure else data

    def send(self, data: bytes) -> None:
        """See ``Channel``."""
        self.outgoing += data


class Guarded:
    """The gate, and nothing once it is open."""

    def __init__(self, gate: Gate) -> None:
        self._gate: Gate | None = gate
        self.outgoing = gate.outgoing
        self.failure: Failure | None = None
        self.is_open = False
        self.salt = b""
        self._held = bytearray()
        self._is_first = True

    @property
    def closed(self) -> str:
        """See ``Channel``."""
        return CLOSED if self.is_open else UNPROVED

    def feed_untrusted(self, data: bytes) -> bytes:
        """See ``Channel``."""
        gate = self._gate
        if gate is None or self.failure is not None:
            return data if gate is None else b""
        if self._is_first and data[0] in TLS_CONTENT_TYPES:
            self.failure = _another_level("session", TLS_LEVEL)
            self.outgoing += MAGICS["session"]
            return b""
        self._is_first = False
        passed = gate.feed_untrusted(data)
        if gate.is_open:
            self.is_open, self.salt, self._gate = True, gate.salt, None
            self.outgoing += self._held
        elif gate.has_failed:
            self.failure = _shut("session", gate)
        return passed

    def send(self, data: bytes) -> None:
        """See ``Channel``."""
        waiting = self.outgoing if self.is_open else self._held
        waiting += data


class Tls:
    """TLS 1.3 with the gate inside.

    Args:
        context: of this end; the connecting one may accept any certificate.
        level: of this end.
        secret: of the job; empty where the context checks certificates of both ends.
        nonce: NONCE_BYTES random bytes, never used before.
        is_connecting: whether this end opened the connection.
        certificate: DER of this end's own, if it accepts.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        *,
        level: Security,
        secret: bytes,
        nonce: bytes,
        is_connecting: bool,
        certificate: bytes,
    ) -> None:
        self._level, self._secret, self._nonce = level, secret, nonce
        self._is_connecting, self._certificate = is_connecting, certificate
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=not is_connecting)
        self._gate: Gate | None = None
        self._held = bytearray()
        self._is_first = True
        self.outgoing = bytearray()
        self.failure: Failure | None = None
        self.is_open = False
        self.salt = b""
        if is_connecting:
            self._shake_hands()

    @property
    def closed(self) -> str:
        """See ``Channel``."""
        if self.is_open:
            return CLOSED
        return (
            f"it closed the connection within the handshake of security="
            f"{self._level!r}: set the same secret or certificates, and the same "
            "security, on every rank"
        )

    def feed_untrusted(self, data: bytes) -> bytes:
        """See ``Channel``."""
        if self.failure is not None:
            return b""
        if self._is_first and data[0] not in TLS_CONTENT_TYPES:
            self._refuse(data)
            return b""
        self._is_first = False
        self._in.write(data)
        passed = b""
        try:
            if self._gate is None:
                self._shake_hands()
            if self._gate is not None:
                passed = self._read(self._gate)
        except ssl.SSLError as error:
            self._fail(error)
        self.outgoing += self._out.read()
        return passed

    def send(self, data: bytes) -> None:
        """See ``Channel``."""
        if not self.is_open:
            self._held += data
        elif data and self.failure is None:
            try:
                self._tls.write(data)
            except ssl.SSLError as error:  # the peer has ended TLS
                self._fail(error)
            self.outgoing += self._out.read()

    def _shake_hands(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self.outgoing += self._out.read()
            return
        certificate = self._certificate
        if self._is_connecting:
            certificate = self._tls.getpeercert(binary_form=True) or b""
        self._gate = Gate(
            self._secret,
            self._nonce,
            is_connecting=self._is_connecting,
            level=self._level,
            binding=hashlib.new(DIGEST, certificate).digest(),
        )
        self._write_gate(self._gate)

    def _read(self, gate: Gate) -> bytes:
        passed = bytearray()
        while self.failure is None:
            try:
                data = self._tls.read(READ_BYTES)
            except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
                break
            if self.is_open:
                passed += data
                continue
            passed += gate.feed_untrusted(data)
            self._write_gate(gate)
            if gate.is_open:
                self.is_open, self.salt = True, gate.salt
                self.send(bytes(self._held))
                self._held.clear()
            elif gate.has_failed:
                self.failure = _shut(self._level, gate)
        return bytes(passed)

    def _write_gate(self, gate: Gate) -> None:
        if gate.outgoing:
            self._tls.write(gate.outgoing)
            gate.outgoing.clear()

    def _refuse(self, data: bytes) -> None:
        """The other end speaks no TLS."""
        theirs = level_of(data)
        self.failure = _another_level(self._level, theirs or "session", theirs is None)
        if theirs is not None:
            self.outgoing += MAGICS[self._level]

    def _fail(self, error: ssl.SSLError) -> None:
        reason = getattr(error, "verify_message", None) or error.reason or str(error)
        self.failure = Failure(
            f"TLS failed: {reason}; set the same certificates, or the same secret, on "
            "every rank",
            "security",
            self._level,
            "another end",
            "",
            False,
        )


def _another_level(ours: str, theirs: str, peer_reads_frames: bool = False) -> Failure:
    return Failure(
        f"security differs: {ours} here, {theirs} there; {SAME_LEVEL}",
        "security",
        ours,
        theirs,
        SAME_LEVEL,
        peer_reads_frames,
    )


def _shut(level: Security, gate: Gate) -> Failure:
    if gate.their_level is not None:
        return _another_level(level, gate.their_level)
    return Failure(
        UNPROVED,
        "secret",
        "one that must be proved",
        "none, or another one",
        "set the same TAILBOUND_SECRET on every rank",
        True,
    )
