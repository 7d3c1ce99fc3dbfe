"""Keys: the RFC's vectors, and that no two uses share one."""

import itertools

import pytest

from tailbound.security.keys import datagram_key, derive_key, proof_key

SECRET = b"correct horse battery"
SALT = bytes(range(32))


@pytest.mark.parametrize(
    ("secret", "salt", "info", "expected"),
    [
        (
            "0b" * 22,
            "000102030405060708090a0b0c",
            "f0f1f2f3f4f5f6f7f8f9",
            "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"
            "34007208d5b887185865",
        ),
        (
            "0b" * 22,
            "",
            "",
            "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d"
            "9d201395faa4b61a96c8",
        ),
    ],
    ids=["RFC 5869 A.1", "RFC 5869 A.3"],
)
def test_a_derived_key_is_the_rfcs(
    secret: str, salt: str, info: str, expected: str
) -> None:
    key = derive_key(
        bytes.fromhex(secret),
        salt=bytes.fromhex(salt),
        info=bytes.fromhex(info),
        num_bytes=42,
    )

    assert key.hex() == expected


def test_the_keys_are_those_of_another_implementation() -> None:
    """Computed with the openssl command."""
    assert proof_key(SECRET).hex() == (
        "fed3de95522e3e99a6fbcb39ac04762d1042f80ee45e82b21c210e9b3efcad6a"
    )
    key = datagram_key(SECRET, salt=SALT, sender=2, receiver=65535, period=1)
    assert key.hex() == "8cf7e9c75cfb972cd47e9888b4513eee"


def test_another_secret_salt_rank_direction_or_period_is_another_key() -> None:
    keys = {
        datagram_key(secret, salt=salt, sender=sender, receiver=receiver, period=period)
        for secret, salt, (sender, receiver), period in itertools.product(
            (SECRET, b"another"), (SALT, bytes(32)), ((0, 1), (1, 0), (0, 2)), (0, 1)
        )
    }

    assert len(keys) == 24
