"""Jobs with sealed datagrams and TLS, over real sockets."""

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobs import QUICK, Work, reduced, run_job, vector
from tailbound.config import Certificates, LossBound, Security, Transport
from tailbound.errors import (
    ConfigError,
    HandshakeError,
    MissingExtraError,
    PeerLostError,
)
from tailbound.impairments import Impairments, IndependentLoss
from tailbound.transport.credentials import Credentials
from tailbound.transport.mesh import MeshGroup
from transport.test_mesh import run_mesh

pytestmark = pytest.mark.sockets

SEALED_LEVELS: list[Security] = ["authenticated", "encrypted"]
SECRET = "correct horse battery"


def transport(level: Security, **settings: Any) -> Transport:
    return replace(
        QUICK, **{"timeout_s": 3.0, "security": level, "secret": SECRET, **settings}
    )


def mean(mesh: MeshGroup) -> float:
    values = np.full(300_000, 1.0 + mesh.rank, np.float32)
    mesh.all_reduce(values, 1.0)
    assert np.all(values == values[0])
    return float(values[0])


@pytest.fixture(autouse=True)
def _needs_cryptography() -> None:
    pytest.importorskip("cryptography", reason="needs the extra tailbound[security]")


@pytest.mark.parametrize("level", SEALED_LEVELS)
def test_ranks_reduce(level: Security) -> None:
    assert run_mesh(mean, 3, transport=transport(level)) == [2.0] * 3


@pytest.mark.parametrize("level", SEALED_LEVELS)
def test_so_do_workers_of_a_server(level: Security) -> None:
    works: list[Work] = [
        partial(reduced, num=100_000, value=1.0),
        partial(reduced, num=100_000, value=3.0),
    ]

    job = run_job(works, buckets=vector(100_000), transport=transport(level))

    assert [values[0] for values in job.check()] == [2.0, 2.0]


@pytest.mark.parametrize("level", SEALED_LEVELS)
def test_a_bad_network_changes_nothing(level: Security) -> None:
    """Repairs are sealed anew, and what was lost on the way is no forgery."""
    bad = Impairments(
        losses=(IndependentLoss(rate=0.2),), reorder_share=0.1, duplicate_share=0.1
    )

    def work(mesh: MeshGroup) -> tuple[float, int]:
        return mean(mesh), mesh.counters().malformed

    lossy = transport(level, impairments=bad, timeout_s=20.0)
    assert run_mesh(work, 3, transport=lossy) == [(2.0, 0)] * 3


@pytest.mark.parametrize("level", SEALED_LEVELS)
def test_a_rank_with_another_secret_gets_nowhere(
    level: Security, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "tailbound")
    stranger = transport(level, secret="another horse battery")

    first, second = run_mesh(mean, 2, transport=[transport(level), stranger])

    assert "lost rank 1 during start-up (did not join" in str(first)
    assert isinstance(second, PeerLostError)
    assert "lost rank 0 during start-up" in str(second)
    assert "did not prove that it knows this job's secret" in caplog.text
    assert "set the same TAILBOUND_SECRET on every rank" in caplog.text


@pytest.mark.parametrize(
    ("accepting", "connecting", "told"),
    [
        ("encrypted", "session", "session here, encrypted there"),
        ("session", "encrypted", "encrypted here, session there"),
        ("authenticated", "encrypted", "encrypted here, authenticated there"),
        ("encrypted", "authenticated", "authenticated here, encrypted there"),
    ],
)
@pytest.mark.parametrize("has_secret", [True, False])
def test_ranks_with_other_levels_are_told_both(
    accepting: Security, connecting: Security, told: str, has_secret: bool
) -> None:
    """Rank 1 connects. A rank of the lowest level may have no secret at all."""

    def settings(level: Security) -> Transport:
        secret = SECRET if has_secret or level != "session" else None
        return transport(level, secret=secret)

    first, second = run_mesh(
        mean, 2, transport=[settings(accepting), settings(connecting)]
    )

    assert "lost rank 1 during start-up (did not join" in str(first)
    assert isinstance(second, PeerLostError | HandshakeError)
    assert (
        f"security differs: {told}; give the same Transport(security=...) on every rank"
    ) in str(second)


def test_a_sealed_level_needs_a_secret_or_certificates() -> None:
    with pytest.raises(ConfigError) as caught:
        Credentials(Transport(security="encrypted"))

    assert str(caught.value) == (
        "security='encrypted' needs a secret or certificates: set TAILBOUND_SECRET on "
        "every rank, or Transport(certificates=...)"
    )


def test_without_the_package_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(
        sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None
    )

    with pytest.raises(MissingExtraError, match=r"pip install 'tailbound\[security\]'"):
        Credentials(transport("authenticated"))


class Authority:
    """Signs certificates for ranks."""

    def __init__(self, folder: Path, name: str) -> None:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec

        self._folder, self._key = folder, ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self.ca = self._write(f"{name}-ca.pem", self._sign(self._name, self._key, True))

    def issue(self, rank: str, passphrase: bytes | None = None) -> Certificates:
        """Files for a rank."""
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, rank)])
        cipher: Any = serialization.NoEncryption()
        if passphrase is not None:
            cipher = serialization.BestAvailableEncryption(passphrase)
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, cipher
        )
        return Certificates(
            cert=self._write(f"{rank}.pem", self._sign(name, key, False)),
            key=self._write(f"{rank}.key", pem),
            ca=self.ca,
        )

    def _sign(self, name: Any, key: Any, is_authority: bool) -> bytes:
        from datetime import UTC, datetime, timedelta

        from cryptography import x509
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.serialization import Encoding

        now = datetime.now(UTC)
        constraints = x509.BasicConstraints(ca=is_authority, path_length=None)
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(constraints, critical=True)
        )
        return bytes(builder.sign(self._key, SHA256()).public_bytes(Encoding.PEM))

    def _write(self, name: str, data: bytes) -> str:
        path = self._folder / name
        path.write_bytes(data)
        return str(path)


@pytest.fixture
def make_authority(tmp_path: Path) -> Callable[[str], Authority]:
    return lambda name: Authority(tmp_path, name)


@pytest.mark.parametrize("secret", [None, SECRET])
def test_ranks_with_certificates_of_their_own_reduce(
    make_authority: Callable[[str], Authority], secret: str | None
) -> None:
    """With or without a secret on top."""
    ours = make_authority("ours")
    transports = [
        transport("encrypted", secret=secret, certificates=ours.issue(f"rank{rank}"))
        for rank in range(3)
    ]

    assert run_mesh(mean, 3, transport=transports) == [2.0] * 3


def test_a_certificate_of_another_authority_gets_nowhere(
    make_authority: Callable[[str], Authority], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "tailbound")
    ours, other = make_authority("ours"), make_authority("other")
    stranger = replace(other.issue("stranger"), ca=ours.ca)

    first, second = run_mesh(
        mean,
        2,
        transport=[
            transport("encrypted", secret=None, certificates=ours.issue("rank0")),
            transport("encrypted", secret=None, certificates=stranger),
        ],
    )

    assert "lost rank 1 during start-up (did not join" in str(first)
    assert isinstance(second, PeerLostError)
    assert "TLS failed" in caplog.text
    assert "set the same certificates" in str(second)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"cert": "/nowhere.pem"}, "No such file or directory; give PEM files that"),
        ({"ca": "/nowhere.pem"}, "authorities /nowhere.pem: No such file"),
        ({"key": "other.key"}, "KEY_VALUES_MISMATCH; give PEM files that belong"),
        ({"key": "locked.key"}, "it has a passphrase; give PEM files"),
        ({"ca": "rank0.key"}, "give a PEM file"),
    ],
)
def test_wrong_certificate_files_are_named(
    make_authority: Callable[[str], Authority],
    tmp_path: Path,
    change: dict[str, str],
    told: str,
) -> None:
    ours = make_authority("ours")
    certificates = ours.issue("rank0")
    ours.issue("other")
    ours.issue("locked", passphrase=b"1234")
    changed = {name: str(tmp_path / value) for name, value in change.items()}

    with pytest.raises(ConfigError) as caught:
        Credentials(
            transport("encrypted", certificates=replace(certificates, **changed))
        )

    assert told in str(caught.value)


def test_a_lossy_bound_holds_with_sealed_datagrams() -> None:
    bad = Impairments(losses=(IndependentLoss(rate=0.3),))

    def work(mesh: MeshGroup) -> bytes:
        values = np.full(300_000, 1.0 + mesh.rank, np.float32)
        mesh.all_reduce(values, 1.0)
        return values.tobytes()

    first, second = run_mesh(
        work,
        bound=LossBound.fixed(0.4),
        transport=transport("encrypted", impairments=bad, timeout_s=20.0),
    )

    assert isinstance(first, bytes)
    assert first == second
