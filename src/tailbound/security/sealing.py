"""Seal datagrams in place, a batch at a time, and open them at the other end.

A sealed datagram has 24 bytes more than a plain one::

    header ...  data ...  tag (16)  number (8)

``number`` counts the datagrams of one direction of one link, repairs included, from 0.
It is the nonce, with four zero bytes before it: AES-GCM breaks if a key meets a nonce
twice, and this one never repeats under its keys. Who restarts has another session and
other handshake nonces, so other keys. A number that was changed on the way makes the
tag wrong, so it needs no other protection.

After KEY_PERIOD datagrams both ends go on to the next key by themselves.

Replay: the opener remembers no single numbers. A datagram that comes twice names the
same round and chunk, under the tag, and the round's bitmap drops the second; one of a
round that is over is stale; one of another link, direction or job has another key. The
round's counter wraps after 2**32 rounds; by then the key is another one too.

Source: NIST SP 800-38D, section 8.2.1 (deterministic nonces).
"""

import struct
from typing import TYPE_CHECKING, Any, Final, Literal

from tailbound.errors import MissingExtraError
from tailbound.security.keys import datagram_key

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

Level = Literal["authenticated", "encrypted"]

TAG_BYTES: Final = 16
NUMBER_BYTES: Final = 8
TRAILER_BYTES: Final = TAG_BYTES + NUMBER_BYTES
"""What sealing adds to a datagram."""
KEY_PERIOD: Final = 1 << 22
"""Datagrams of one key. Of 65507 bytes they are 2**34 blocks, so that an attacker tells
the cipher from chance with probability 2**-61; TLS 1.3 stops at 2**-57."""
PERIODS_AHEAD: Final = 4
"""Keys that an opener may skip: all that was sealed with one may be lost."""

_nonce = struct.Struct(">IQ").pack
_number = struct.Struct(">Q")


def load_cipher() -> Any:
    """The AES-GCM of the ``cryptography`` package, imported when first needed.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise MissingExtraError(
            "sealed datagrams need the cryptography package: "
            "pip install 'tailbound[security]'"
        ) from error
    return AESGCM


class LinkKeys:
    """The keys of one direction of one link, by period.

    Args:
        secret: of the job.
        salt: of this incarnation of the link, from ``proofs.Transcript.digest``.
        sender: rank that seals.
        receiver: rank that opens.

    Raises:
        MissingExtraError: the ``cryptography`` package is not installed.
    """

    def __init__(
        self, secret: bytes, *, salt: bytes, sender: int, receiver: int
    ) -> None:
        self._secret, self._salt = secret, salt
        self._sender, self._receiver = sender, receiver
        self._make = load_cipher()

    def cipher(self, period: int) -> "AESGCM":
        """The cipher of one period."""
        key = datagram_key(
            self._secret,
            salt=self._salt,
            sender=self._sender,
            receiver=self._receiver,
            period=period,
        )
        cipher: AESGCM = self._make(key)
        return cipher


class Sealer:
    """Seals what one end of a link sends.

    Args:
        keys: of this direction.
        level: ``authenticated`` leaves the data readable, ``encrypted`` does not.
        header_bytes: that stay readable in any case; the tag covers them.
        first_number: of the first datagram, to test what happens later.
    """

    def __init__(
        self, keys: LinkKeys, level: Level, *, header_bytes: int, first_number: int = 0
    ) -> None:
        self._keys, self._header_bytes = keys, header_bytes
        self._is_encrypted = level == "encrypted"
        self._next_number = first_number
        self._cipher = keys.cipher(first_number // KEY_PERIOD)

    def seal(self, batch: memoryview, num_bytes: int, segment_bytes: int) -> None:
        """Seal datagrams that lie back to back, in place.

        Args:
            batch: room for each datagram and, behind its data, TRAILER_BYTES more.
            num_bytes: in use; the last datagram may be shorter than the others.
            segment_bytes: of each datagram, trailer included.
        """
        header_bytes, is_encrypted = self._header_bytes, self._is_encrypted
        number, cipher = self._next_number, self._cipher
        for start in range(0, num_bytes, segment_bytes):
            stop = min(start + segment_bytes, num_bytes)
            tag, tail = stop - TRAILER_BYTES, stop - NUMBER_BYTES
            if number % KEY_PERIOD == 0:
                cipher = self._cipher = self._keys.cipher(number // KEY_PERIOD)
            # Counted before it is used: whatever goes wrong, never used again.
            self._next_number = number + 1
            nonce, data = _nonce(0, number), start + header_bytes
            if is_encrypted:
                cipher.encrypt_into(
                    nonce, batch[data:tag], batch[start:data], batch[data:tail]
                )
            else:
                cipher.encrypt_into(nonce, b"", batch[start:tag], batch[tag:tail])
            _number.pack_into(batch, tail, number)
            number += 1


class Opener:
    """Opens what the other end of a link sealed.

    Args:
        keys: of that direction.
        level: as the sealer's.
        header_bytes: as the sealer's.
        first_number: of the first datagram, to test what happens later.
    """

    def __init__(
        self, keys: LinkKeys, level: Level, *, header_bytes: int, first_number: int = 0
    ) -> None:
        from cryptography.exceptions import InvalidTag

        self._invalid = InvalidTag
        self._keys, self._header_bytes = keys, header_bytes
        self._is_encrypted = level == "encrypted"
        self._period = first_number // KEY_PERIOD
        """The latest that a good datagram had."""
        self._ciphers: dict[int, AESGCM] = {}

    def open_untrusted(
        self, batch: memoryview, num_bytes: int, segment_bytes: int
    ) -> int:
        """Open datagrams that lie back to back, in place.

        One that does not open is overwritten with zeros: version 0, which no datagram
        has, and nothing of what a forger wrote.

        Args:
            batch: as it was received.
            num_bytes: in use; the last datagram may be shorter than the others.
            segment_bytes: of each datagram, trailer included.

        Returns:
            How many did not open.
        """
        num_forged = 0
        for start in range(0, num_bytes, segment_bytes):
            stop = min(start + segment_bytes, num_bytes)
            if not self._open_one(batch, start, stop):
                batch[start:stop] = bytes(stop - start)
                num_forged += 1
        return num_forged

    def _open_one(self, batch: memoryview, start: int, stop: int) -> bool:
        data, tag, tail = (
            start + self._header_bytes,
            stop - TRAILER_BYTES,
            stop - NUMBER_BYTES,
        )
        if tag < data:
            return False
        (number,) = _number.unpack_from(batch, tail)
        period = number // KEY_PERIOD
        cipher = self._ciphers.get(period) or self._find_cipher(period)
        if cipher is None:
            return False
        nonce = _nonce(0, number)
        try:
            if self._is_encrypted:
                cipher.decrypt_into(
                    nonce, batch[data:tail], batch[start:data], batch[data:tag]
                )
            else:
                cipher.decrypt(nonce, batch[tag:tail], batch[start:tag])
        except self._invalid:
            return False
        if period > self._period:
            self._move_to(period)
        return True

    def _find_cipher(self, period: int) -> "AESGCM | None":
        """The cipher of a period that may come now: a forger can make us hold few."""
        if not self._period - 1 <= period <= self._period + PERIODS_AHEAD:
            return None
        cipher = self._ciphers[period] = self._keys.cipher(period)
        return cipher

    def _move_to(self, period: int) -> None:
        self._period = period
        for old in [other for other in self._ciphers if other < period - 1]:
            del self._ciphers[old]
