"""Proofs: good for one end of one connection, and for nothing else."""

from typing import Any

import pytest

from tailbound.security.proofs import Transcript, is_proof_untrusted, prove

KEY = bytes.fromhex("fed3de95522e3e99a6fbcb39ac04762d1042f80ee45e82b21c210e9b3efcad6a")
TRANSCRIPT = Transcript(
    version=1,
    connecting_nonce=bytes(range(32)),
    accepting_nonce=bytes(range(32, 64)),
)


def test_proofs_and_digest_are_those_of_another_implementation() -> None:
    """Computed with the openssl command."""
    assert prove(KEY, TRANSCRIPT, is_connecting=True).hex() == (
        "172ac4df3ca833a56a42b4d62f11310a61d0c8479a8a6f5c42376b220f755bb1"
    )
    assert prove(KEY, TRANSCRIPT, is_connecting=False).hex() == (
        "7e850ca3aace4f2431b65a5bc97b83b957d3e2ca468f97eeae6a9a426f167e25"
    )
    assert TRANSCRIPT.digest().hex() == (
        "2c94e8a3d94fe8a7aa6c44ab2bf1feb7a165d7b93de00ec5623f1c5c92659f69"
    )


@pytest.mark.parametrize("is_connecting", [True, False])
def test_a_proof_is_accepted_from_its_own_end_only(is_connecting: bool) -> None:
    proof = prove(KEY, TRANSCRIPT, is_connecting=is_connecting)

    accepted = [
        is_proof_untrusted(proof, KEY, TRANSCRIPT, is_connecting=end)
        for end in (is_connecting, not is_connecting)
    ]

    assert accepted == [True, False]


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"connecting_nonce": bytes(32)},
        {"accepting_nonce": bytes(32)},
    ],
)
def test_a_proof_does_not_fit_another_connection(change: dict[str, Any]) -> None:
    proof = prove(KEY, TRANSCRIPT, is_connecting=True)
    other = TRANSCRIPT._replace(**change)

    assert not is_proof_untrusted(proof, KEY, other, is_connecting=True)
    assert other.digest() != TRANSCRIPT.digest()


@pytest.mark.parametrize("proof", [b"", bytes(31), bytes(32), bytes(33)])
def test_other_bytes_are_no_proof(proof: bytes) -> None:
    assert not is_proof_untrusted(proof, KEY, TRANSCRIPT, is_connecting=True)


def test_a_proof_needs_the_secrets_key() -> None:
    proof = prove(bytes(32), TRANSCRIPT, is_connecting=True)

    assert not is_proof_untrusted(proof, KEY, TRANSCRIPT, is_connecting=True)
