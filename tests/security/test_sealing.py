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


def datagrams(*datas: bytes) -> bytearray:
    """Plain ones, back to back, with room for the trailers."""
    return bytearray(b"".join(HEADER + data + bytes(TRAILER_BYTES) for data in datas))


def plain(batch: bytearray, *sizes: int) -> list[bytes]:
    """Header and data of datagrams with so many bytes of data."""
    found, start = [], 0
    for size in sizes:
        found.append(bytes(batch[start : start + 24 + size]))
        start += 24 + size + TRAILER_BYTES
    return found


@pytest.mark.parametrize("level", LEVELS)
def test_a_batch_with_a_short_last_datagram_comes_back_as_it_was(level: Level) -> None:
    batch = datagrams(b"a" * 100, b"b" * 100, b"c" * 7)
    num_bytes = len(batch)

    sealer(level).seal(memoryview(batch), num_bytes, 148)
    sealed = bytes(batch)
    num_forged = opener(level).open_untrusted(memoryview(batch), num_bytes, 148)

    assert num_forged == 0
    assert plain(batch, 100, 100, 7) == [
        HEADER + b"a" * 100,
        HEADER + b"b" * 100,
        HEADER + b"c" * 7,
    ]
    assert (b"a" * 100 in sealed) == (level == "authenticated")


@pytest.mark.parametrize("level", LEVELS)
def test_a_sealed_datagram_is_what_plain_aes_gcm_makes(level: Level) -> None:
    """Against the package's own HKDF and its call that copies."""
    ciphers = pytest.importorskip("cryptography.hazmat.primitives.ciphers.aead")
    kdf = pytest.importorskip("cryptography.hazmat.primitives.kdf.hkdf")
    hashes = pytest.importorskip("cryptography.hazmat.primitives.hashes")
    info = b"tailbound datagrams" + bytes.fromhex("0001 0002 0000000000000000")
    key = kdf.HKDF(hashes.SHA256(), 16, SALT, info).derive(SECRET)
    batch = datagrams(b"first", b"later")

    sealer(level).seal(memoryview(batch), len(batch), 53)

    nonce = bytes.fromhex("00000000 0000000000000001")
    if level == "encrypted":
        expected = HEADER + ciphers.AESGCM(key).encrypt(nonce, b"later", HEADER)
    else:
        tag = ciphers.AESGCM(key).encrypt(nonce, b"", HEADER + b"later")
        expected = HEADER + b"later" + tag
    assert bytes(batch[53:]) == expected + bytes.fromhex("0000000000000001")


@pytest.mark.parametrize("level", LEVELS)
def test_any_flipped_bit_closes_that_datagram_alone(level: Level) -> None:
    batch = datagrams(b"one", b"two")
    sealer(level).seal(memoryview(batch), len(batch), 51)
    good = opener(level)

    for bit in range(51 * 8):
        changed = bytearray(batch)
        changed[bit // 8] ^= 1 << bit % 8
        num_forged = good.open_untrusted(memoryview(changed), len(changed), 51)

        assert num_forged == 1
        assert changed[:51] == bytes(51)
        assert plain(changed, 3, 3)[1] == HEADER + b"two"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("size", range(60))
def test_a_datagram_cut_short_does_not_open(level: Level, size: int) -> None:
    batch = datagrams(b"twelve bytes")
    sealer(level).seal(memoryview(batch), 60, 60)

    num_forged = opener(level).open_untrusted(memoryview(batch)[:size], size, 60)

    assert num_forged == (1 if size else 0)


@pytest.mark.parametrize("level", LEVELS)
def test_only_the_peer_of_this_link_direction_and_job_opens_it(level: Level) -> None:
    strangers = [
        keys(sender=2, receiver=1),
        keys(receiver=3),
        keys(secret=b"another secret"),
        keys(salt=bytes(32)),
    ]
    for stranger in strangers:
        batch = datagrams(b"data")
        sealer(level).seal(memoryview(batch), 52, 52)

        closed = Opener(stranger, level, header_bytes=24)

        assert closed.open_untrusted(memoryview(batch), 52, 52) == 1
        assert batch == bytes(52)


def test_one_level_does_not_open_what_the_other_sealed() -> None:
    for level, other in (LEVELS, LEVELS[::-1]):
        batch = datagrams(b"data")
        sealer(level).seal(memoryview(batch), 52, 52)

        assert opener(other).open_untrusted(memoryview(batch), 52, 52) == 1


@pytest.mark.parametrize("level", LEVELS)
def test_the_same_data_never_leaves_alike(level: Level) -> None:
    """A repair has a number of its own, also across batches and keys."""
    good = sealer(level, first_number=KEY_PERIOD - 2)
    seen: set[bytes] = set()
    for _ in range(2):
        batch = datagrams(b"same", b"same")
        good.seal(memoryview(batch), 104, 52)
        seen.update((bytes(batch[28:52]), bytes(batch[80:104])))

    numbers = sorted(int.from_bytes(trailer[-8:], "big") for trailer in seen)
    assert numbers == [4194302, 4194303, 4194304, 4194305]


@pytest.mark.parametrize("level", LEVELS)
def test_a_batch_across_two_keys_opens(level: Level) -> None:
    batch = datagrams(*[b"data"] * 4)
    sealer(level, KEY_PERIOD - 2).seal(memoryview(batch), 208, 52)

    assert opener(level).open_untrusted(memoryview(batch), 208, 52) == 0
    assert plain(batch, 4, 4, 4, 4) == [HEADER + b"data"] * 4


@pytest.mark.parametrize(
    ("period", "num_forged"), [(4, 1), (5, 0), (6, 0), (10, 0), (11, 1)]
)
def test_keys_of_one_period_back_to_four_ahead_are_known(
    period: int, num_forged: int
) -> None:
    batch = datagrams(b"data")
    sealer("encrypted", period * KEY_PERIOD + 7).seal(memoryview(batch), 52, 52)

    good = opener("encrypted", first_number=6 * KEY_PERIOD)

    assert good.open_untrusted(memoryview(batch), 52, 52) == num_forged


def test_old_keys_are_given_up_once_a_good_datagram_has_a_later_one() -> None:
    good = opener("encrypted")
    answers = []
    for period in (0, 1, 2, 1, 0):
        batch = datagrams(b"data")
        sealer("encrypted", period * KEY_PERIOD + 7).seal(memoryview(batch), 52, 52)
        answers.append(good.open_untrusted(memoryview(batch), 52, 52))

    assert answers == [0, 0, 0, 0, 1]


def test_a_forged_number_does_not_move_the_keys_on() -> None:
    good = opener("encrypted")
    batch = datagrams(b"data")
    sealer("encrypted").seal(memoryview(batch), 52, 52)
    forged = bytearray(batch)
    forged[44:52] = (4 * KEY_PERIOD).to_bytes(8, "big")

    answers = [
        good.open_untrusted(memoryview(data), 52, 52) for data in (forged, batch)
    ]

    assert answers == [1, 0]
