"""Sealed datagrams: opened by whom they are for, and zeros to everybody else."""

import sys

import pytest

from tailbound.errors import MissingExtraError
from tailbound.security.sealing import (
    KEY_PERIOD,
    TRAILER_BYTES,
    Level,
    LinkKeys,
    Opener,
    Sealer,
    load_cipher,
)

SECRET = b"correct horse battery"
SALT = bytes(range(32))
HEADER = bytes(range(100, 124))
LEVELS: list[Level] = ["authenticated", "encrypted"]


def test_without_the_package_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(
        sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None
    )

    with pytest.raises(MissingExtraError) as caught:
        load_cipher()

    assert str(caught.value) == (
        "sealed datagrams need the cryptography package: "
        "pip install 'tailbound[security]'"
    )


def keys(
    sender: int = 1, receiver: int = 2, secret: bytes = SECRET, salt: bytes = SALT
) -> LinkKeys:
    pytest.importorskip("cryptography", reason="needs the extra tailbound[security]")
    return LinkKeys(secret, salt=salt, sender=sender, receiver=receiver)


def sealer(level: Level, first_number: int = 0) -> Sealer:
    return Sealer(keys(), level, header_bytes=24, first_number=first_number)


def opener(level: Level, first_number: int = 0) -> Opener:
    return Opener(keys(), level, header_bytes=24, first_number=first_number)


def seal(good: Sealer, *datas: bytes) -> bytearray:
    """Sealed datagrams, back to back, with this data and a header each."""
    plain = b"".join(HEADER + data for data in datas)
    sealed = bytearray(len(plain) + len(datas) * TRAILER_BYTES)
    size = 24 + len(datas[0])
    num_bytes = good.seal(memoryview(plain), len(plain), size, memoryview(sealed))
    assert num_bytes == len(sealed)
    return sealed


def open_all(good: Opener, sealed: bytes | bytearray, size: int) -> list[bytes]:
    """The plain datagrams; zeros where one did not open."""
    into = bytearray(b"?" * len(sealed))
    num_bytes, plain_bytes = good.open_untrusted(
        memoryview(sealed), len(sealed), size, memoryview(into)
    )
    batch = bytes(into[:num_bytes])
    return [batch[at : at + plain_bytes] for at in range(0, num_bytes, plain_bytes)]


@pytest.mark.parametrize("level", LEVELS)
def test_a_batch_with_a_short_last_datagram_comes_back_as_it_was(level: Level) -> None:
    sealed = seal(sealer(level), b"a" * 100, b"b" * 100, b"c" * 7)

    opened = open_all(opener(level), sealed, 148)

    assert opened == [HEADER + b"a" * 100, HEADER + b"b" * 100, HEADER + b"c" * 7]
    assert (b"a" * 100 in sealed) == (level == "authenticated")


@pytest.mark.parametrize("level", LEVELS)
def test_a_sealed_datagram_is_what_plain_aes_gcm_makes(level: Level) -> None:
    """Against the package's own HKDF and its call that copies."""
    ciphers = pytest.importorskip("cryptography.hazmat.primitives.ciphers.aead")
    kdf = pytest.importorskip("cryptography.hazmat.primitives.kdf.hkdf")
    hashes = pytest.importorskip("cryptography.hazmat.primitives.hashes")
    info = b"tailbound datagrams" + bytes.fromhex("0001 0002 0000000000000000")
    key = kdf.HKDF(hashes.SHA256(), 16, SALT, info).derive(SECRET)

    sealed = seal(sealer(level), b"first", b"later")

    nonce = bytes.fromhex("00000000 0000000000000001")
    if level == "encrypted":
        expected = HEADER + ciphers.AESGCM(key).encrypt(nonce, b"later", HEADER)
    else:
        tag = ciphers.AESGCM(key).encrypt(nonce, b"", HEADER + b"later")
        expected = HEADER + b"later" + tag
    assert bytes(sealed[53:]) == expected + bytes.fromhex("0000000000000001")


@pytest.mark.parametrize("level", LEVELS)
def test_any_flipped_bit_closes_that_datagram_alone(level: Level) -> None:
    sealed = seal(sealer(level), b"one", b"two")
    good = opener(level)

    for bit in range(51 * 8):
        changed = bytearray(sealed)
        changed[bit // 8] ^= 1 << bit % 8

        assert open_all(good, changed, 51) == [bytes(27), HEADER + b"two"]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("size", "plain_bytes"), [(1, 1), (7, 1), (24, 1), (25, 1), (47, 23), (59, 35)]
)
def test_a_datagram_cut_short_does_not_open(
    level: Level, size: int, plain_bytes: int
) -> None:
    sealed = seal(sealer(level), b"twelve bytes")

    assert open_all(opener(level), sealed[:size], 60) == [bytes(plain_bytes)]


@pytest.mark.parametrize("level", LEVELS)
def test_small_datagrams_that_are_none_stay_apart(level: Level) -> None:
    """Three of 20 bytes: not even a trailer fits into one."""
    assert open_all(opener(level), b"x" * 60, 20) == [b"\0"] * 3


@pytest.mark.parametrize("level", LEVELS)
def test_only_the_peer_of_this_link_direction_and_job_opens_it(level: Level) -> None:
    strangers = [
        keys(sender=2, receiver=1),
        keys(receiver=3),
        keys(secret=b"another secret"),
        keys(salt=bytes(32)),
    ]
    sealed = seal(sealer(level), b"data")

    for stranger in strangers:
        closed = Opener(stranger, level, header_bytes=24)

        assert open_all(closed, sealed, 52) == [bytes(28)]


def test_one_level_does_not_open_what_the_other_sealed() -> None:
    for level, other in (LEVELS, LEVELS[::-1]):
        sealed = seal(sealer(level), b"data")

        assert open_all(opener(other), sealed, 52) == [bytes(28)]


@pytest.mark.parametrize("level", LEVELS)
def test_the_same_data_never_leaves_alike(level: Level) -> None:
    """A repair has a number of its own, also across batches and keys."""
    good = sealer(level, first_number=KEY_PERIOD - 2)
    seen: set[bytes] = set()
    for _ in range(2):
        sealed = seal(good, b"same", b"same")
        seen.update((bytes(sealed[28:52]), bytes(sealed[80:104])))

    numbers = sorted(int.from_bytes(trailer[-8:], "big") for trailer in seen)
    assert numbers == [4194302, 4194303, 4194304, 4194305]


@pytest.mark.parametrize("level", LEVELS)
def test_a_batch_across_two_keys_opens(level: Level) -> None:
    sealed = seal(sealer(level, KEY_PERIOD - 2), *[b"data"] * 4)

    assert open_all(opener(level), sealed, 52) == [HEADER + b"data"] * 4


@pytest.mark.parametrize(
    ("period", "is_known"), [(4, False), (5, True), (6, True), (10, True), (11, False)]
)
def test_keys_of_one_period_back_to_four_ahead_are_known(
    period: int, is_known: bool
) -> None:
    sealed = seal(sealer("encrypted", period * KEY_PERIOD + 7), b"data")

    good = opener("encrypted", first_number=6 * KEY_PERIOD)

    expected = HEADER + b"data" if is_known else bytes(28)
    assert open_all(good, sealed, 52) == [expected]


def test_old_keys_are_given_up_once_a_good_datagram_has_a_later_one() -> None:
    good = opener("encrypted")
    answers = []
    for period in (0, 1, 2, 1, 0):
        sealed = seal(sealer("encrypted", period * KEY_PERIOD + 7), b"data")
        answers.append(open_all(good, sealed, 52) == [HEADER + b"data"])

    assert answers == [True, True, True, True, False]


def test_a_forged_number_does_not_move_the_keys_on() -> None:
    good = opener("encrypted")
    sealed = seal(sealer("encrypted"), b"data")
    forged = bytearray(sealed)
    forged[44:52] = (4 * KEY_PERIOD).to_bytes(8, "big")

    assert open_all(good, forged, 52) == [bytes(28)]
    assert open_all(good, sealed, 52) == [HEADER + b"data"]
