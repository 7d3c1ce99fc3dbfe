"""Seal datagrams, a batch at a time, and open them at the other end.

A sealed datagram has 24 bytes more than a plain one::

    header ...  data ...  tag (16)  number (8)

A batch goes from one buffer into another: the cipher reads and writes every byte
anyway, and plain datagrams lie back to back, with no room for what sealing adds.

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

    def seal(
        self, batch: memoryview, num_bytes: int, segment_bytes: int, into: memoryview
    ) -> int:
        """Seal datagrams that lie back to back.

        Args:
            batch: plain datagrams.
            num_bytes: in use; the last datagram may be shorter than the others.
            segment_bytes: of each datagram.
            into: another buffer, TRAILER_BYTES larger for each datagram.

        Returns:
            Bytes of the sealed batch; each datagram but the last has ``segment_bytes``
            and TRAILER_BYTES.
        """
        header_bytes, is_encrypted = self._header_bytes, self._is_encrypted
        number, cipher, end = self._next_number, self._cipher, 0
        for start in range(0, num_bytes, segment_bytes):
            stop = min(start + segment_bytes, num_bytes)
            if number % KEY_PERIOD == 0:
                cipher = self._cipher = self._keys.cipher(number // KEY_PERIOD)
            # Counted before it is used: whatever goes wrong, never used again.
            self._next_number = number + 1
            nonce = _nonce(0, number)
            data, tag, tail = (
                end + header_bytes,
                end + stop - start,
                end + stop - start + TAG_BYTES,
            )
            if is_encrypted:
                header = into[end:data]
                header[:] = batch[start : start + header_bytes]
                cipher.encrypt_into(
                    nonce, batch[start + header_bytes : stop], header, into[data:tail]
                )
            else:
                plain = batch[start:stop]
                into[end:tag] = plain
                cipher.encrypt_into(nonce, b"", plain, into[tag:tail])
            _number.pack_into(into, tail, number)
            number += 1
            end = tail + NUMBER_BYTES
        return end


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
        self, batch: memoryview, num_bytes: int, segment_bytes: int, into: memoryview
    ) -> tuple[int, int]:
        """Open datagrams that lie back to back.

        One that does not open becomes zeros: version 0, which no datagram has, and
        nothing of what a forger wrote.

        Args:
            batch: as it was received.
            num_bytes: in use; the last datagram may be shorter than the others.
            segment_bytes: of each datagram.
            into: another buffer, as large.

        Returns:
            Bytes of the plain batch, and of each datagram in it but the last.
        """
        end = 0
        for start in range(0, num_bytes, segment_bytes):
            stop = min(start + segment_bytes, num_bytes)
            plain = into[end : end + _plain_bytes(stop - start)]
            if not self._open_one(batch, start, stop, plain):
                plain[:] = bytes(len(plain))
            end += len(plain)
        return end, _plain_bytes(segment_bytes)

    def _open_one(
        self, batch: memoryview, start: int, stop: int, plain: memoryview
    ) -> bool:
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
        nonce, header = _nonce(0, number), batch[start:data]
        try:
            if self._is_encrypted:
                cipher.decrypt_into(
                    nonce, batch[data:tail], header, plain[self._header_bytes :]
                )
                plain[: self._header_bytes] = header
            else:
                cipher.decrypt(nonce, batch[tag:tail], batch[start:tag])
                plain[:] = batch[start:tag]
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


def _plain_bytes(sealed_bytes: int) -> int:
    """Of an opened datagram; 1 for what is too short to be sealed."""
    return max(1, sealed_bytes - TRAILER_BYTES)


class Sealing:
    """Both directions of one link, as one end has them.

    Args:
        level: of both ends.
        secret: of the job.
        salt: of this incarnation of the link.
        is_connecting: whether this end opened the connection. As keys have it, that
            end is 0 and the other 1, whatever rank a peer claims to be.
        header_bytes: that stay readable in any case.
        max_bytes: of a sealed batch.
    """

    def __init__(
        self,
        level: Level,
        *,
        secret: bytes,
        salt: bytes,
        is_connecting: bool,
        header_bytes: int,
        max_bytes: int,
    ) -> None:
        sender, receiver = (0, 1) if is_connecting else (1, 0)
        ours = LinkKeys(secret, salt=salt, sender=sender, receiver=receiver)
        theirs = LinkKeys(secret, salt=salt, sender=receiver, receiver=sender)
        self._sealer = Sealer(ours, level, header_bytes=header_bytes)
        self.opener = Opener(theirs, level, header_bytes=header_bytes)
        self._into = memoryview(bytearray(max_bytes))

    def seal(
        self, batch: memoryview, num_bytes: int, segment_bytes: int
    ) -> tuple[memoryview, int]:
        """Seal a batch; good until the next call.

        Returns:
            The sealed batch, and bytes of each datagram in it but the last.
        """
        sealed_bytes = self._sealer.seal(batch, num_bytes, segment_bytes, self._into)
        return self._into[:sealed_bytes], segment_bytes + TRAILER_BYTES
