"""What control bytes pass through, and what is said where two ends differ."""

import ssl

import pytest

from tailbound.config import Security, Transport
from tailbound.security.channel import Channel, Guarded, Plain
from tailbound.security.gate import Gate
from tailbound.transport.credentials import Credentials, make_certificate

SECRET = "correct horse battery"
LEVELS: list[Security] = ["session", "authenticated", "encrypted"]
UNPROVED = (
    "it did not prove that it knows this job's secret: set the same TAILBOUND_SECRET "
    "on every rank"
)


def pair(
    levels: tuple[Security, Security],
    secrets: tuple[str | None, str | None] = (SECRET, SECRET),
) -> tuple[Channel, Channel]:
    """The end that connects, and the one that accepts."""
    pytest.importorskip("cryptography", reason="needs the extra tailbound[security]")
    connecting, accepting = (
        Credentials(Transport(security=level, secret=secret))
        for level, secret in zip(levels, secrets, strict=True)
    )
    return (
        connecting.make_channel(is_connecting=True),
        accepting.make_channel(is_connecting=False),
    )


def take(channel: Channel) -> bytes:
    """What it has for the stream."""
    data = bytes(channel.outgoing)
    channel.outgoing.clear()
    return data


def talk(first: Channel, second: Channel, step: int = 1 << 16) -> tuple[bytes, bytes]:
    """Carry all that both say, in pieces; returns what each heard."""
    heard = [bytearray(), bytearray()]
    ends = (first, second)
    while first.outgoing or second.outgoing:
        for number in (1, 0):
            data = take(ends[1 - number])
            for start in range(0, len(data), step):
                piece = data[start : start + step]
                heard[number] += ends[number].feed_untrusted(piece)
    return bytes(heard[0]), bytes(heard[1])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("step", [1, 7, 1 << 16])
def test_what_is_said_before_the_ends_know_each_other_comes_after(
    level: Security, step: int
) -> None:
    """However the bytes are cut."""
    first, second = pair((level, level))
    first.send(b"hello")
    second.send(b"welcome")

    assert talk(first, second, step) == (b"welcome", b"hello")
    assert first.is_open
    assert second.is_open
    first.send(b"more")
    assert talk(first, second, step) == (b"", b"more")


@pytest.mark.parametrize("level", LEVELS)
def test_both_ends_have_a_salt_that_no_other_connection_has(level: Security) -> None:
    salts = set()
    for _ in range(2):
        first, second = pair((level, level))
        talk(first, second)
        assert first.salt == second.salt
        assert len(first.salt) == 32
        salts.add(first.salt)

    assert len(salts) == 2


@pytest.mark.parametrize("level", ["authenticated", "encrypted"])
def test_nobody_on_the_wire_reads_a_word_or_a_nonce(level: Security) -> None:
    first, second = pair((level, level))
    first.send(b"a word of the protocol")
    wire = bytearray()
    while first.outgoing or second.outgoing:
        for ours, theirs in ((first, second), (second, first)):
            data = take(ours)
            wire += data
            theirs.feed_untrusted(data) if data else None

    assert first.is_open
    assert b"a word" not in wire
    assert b"tbencr1" not in wire
    assert b"tbauth1" not in wire


def test_somebody_between_the_ends_is_found_out() -> None:
    """It has TLS with both and hands on what they say, but no certificate of theirs."""
    first, second = pair(("encrypted", "encrypted"))
    middle = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    middle.check_hostname, middle.verify_mode = False, ssl.CERT_NONE
    seen = Between(take(first), middle)
    for _ in range(6):
        first.feed_untrusted(data) if (data := seen.for_first()) else None
        second.feed_untrusted(data) if (data := seen.for_second()) else None
        seen.carry(take(first), take(second))

    assert b"tbencr1" in seen.read, "it did sit between them"
    assert first.failure is not None
    assert first.failure.text == UNPROVED
    assert not first.is_open
    assert not second.is_open


class Between:
    """Two TLS connections and what is read in between."""

    def __init__(self, hello: bytes, context: ssl.SSLContext) -> None:
        import tempfile

        fake = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with tempfile.NamedTemporaryFile() as file:
            file.write(make_certificate())
            file.flush()
            fake.load_cert_chain(file.name)
        self._bios = [(ssl.MemoryBIO(), ssl.MemoryBIO()) for _ in range(2)]
        self._ends = [
            fake.wrap_bio(*self._bios[0], server_side=True),
            context.wrap_bio(*self._bios[1], server_side=False),
        ]
        self._is_shaken = [False, False]
        self.read = bytearray()
        self.carry(hello, b"")

    def carry(self, of_first: bytes, of_second: bytes) -> None:
        self._bios[0][0].write(of_first)
        self._bios[1][0].write(of_second)
        for number, end in enumerate(self._ends):
            if not self._is_shaken[number]:
                try:
                    end.do_handshake()
                    self._is_shaken[number] = True
                except ssl.SSLWantReadError:
                    pass
        for end, other in (self._ends, self._ends[::-1]):
            if all(self._is_shaken):
                try:
                    data = end.read()
                except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
                    continue
                self.read += data
                other.write(data)

    def for_first(self) -> bytes:
        return self._bios[0][1].read()

    def for_second(self) -> bytes:
        return self._bios[1][1].read()


@pytest.mark.parametrize("ours", LEVELS)
@pytest.mark.parametrize("theirs", LEVELS)
def test_ends_of_other_levels_both_say_so(ours: Security, theirs: Security) -> None:
    if ours == theirs:
        return
    first, second = pair((ours, theirs))
    first.send(b"hello")

    assert talk(first, second) == (b"", b"")
    for end, here, there in ((first, ours, theirs), (second, theirs, ours)):
        assert end.failure is not None
        assert not end.failure.peer_reads_frames
        told = end.failure.text
        if here == "session" and end is second:
            # A TLS greeting does not tell which of the two.
            there_told = "authenticated or encrypted"
        else:
            there_told = there
        assert told == (
            f"security differs: {here} here, {there_told} there; give the same "
            "Transport(security=...) on every rank"
        )
        assert end.feed_untrusted(b"anything") == b""


@pytest.mark.parametrize("level", ["authenticated", "encrypted"])
def test_an_end_without_a_secret_is_to_be_told_in_its_own_words(
    level: Security,
) -> None:
    _, second = pair((level, level))

    second.feed_untrusted(bytes.fromhex("00000005") + b"hello")

    assert second.failure is not None
    assert second.failure.peer_reads_frames
    assert (second.failure.ours, second.failure.theirs) == (level, "session")


def test_a_plain_end_knows_the_greeting_of_tls() -> None:
    first, _ = pair(("encrypted", "encrypted"))
    plain = Plain()

    assert plain.feed_untrusted(take(first)) == b""
    assert first.feed_untrusted(take(plain)) == b""

    assert plain.failure is not None
    assert first.failure is not None
    assert "encrypted here, session there" in first.failure.text


def test_a_plain_end_passes_what_only_later_looks_like_tls() -> None:
    plain = Plain()

    assert plain.feed_untrusted(b"\x00\x16") == b"\x00\x16"
    assert plain.feed_untrusted(b"\x16\x16") == b"\x16\x16"


@pytest.mark.parametrize("level", LEVELS)
def test_another_secret_opens_neither_end(level: Security) -> None:
    first, second = pair((level, level), (SECRET, "another horse battery"))

    talk(first, second)

    assert not first.is_open
    assert not second.is_open
    assert first.failure is not None
    assert first.failure.text == UNPROVED


@pytest.mark.parametrize("level", LEVELS)
def test_what_an_early_end_of_the_stream_means(level: Security) -> None:
    first, second = pair((level, level))
    early = first.closed
    talk(first, second)

    assert first.closed == "its connection closed"
    if level == "session":
        assert early == UNPROVED
    else:
        assert early.startswith("it closed the connection within the handshake of ")


@pytest.mark.parametrize("at", [0, 5, 40, 300])
def test_a_changed_byte_within_the_handshake_opens_nothing(at: int) -> None:
    first, second = pair(("encrypted", "encrypted"))
    second.feed_untrusted(take(first))
    answer = bytearray(take(second))
    answer[at] ^= 0x80

    first.feed_untrusted(bytes(answer))
    talk(first, second)

    assert not first.is_open
    assert not second.is_open


def test_a_changed_byte_after_it_ends_the_connection() -> None:
    first, second = pair(("authenticated", "authenticated"))
    talk(first, second)
    first.send(b"hello")
    data = bytearray(take(first))
    data[-1] ^= 1

    assert second.feed_untrusted(bytes(data)) == b""
    assert second.failure is not None
    assert "TLS failed" in second.failure.text


def test_a_guard_that_is_open_is_not_in_the_way() -> None:
    first, second = (
        Guarded(Gate(SECRET.encode(), bytes([number] * 32), is_connecting=number == 0))
        for number in range(2)
    )
    talk(first, second)

    first.send(b"hello")

    assert take(first) == b"hello"
