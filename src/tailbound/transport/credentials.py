"""With what a process shows that it belongs to a job, at each level of security.

A certificate that is made at the start lives as long as the process, and its key is in
no file. Peers know it by the secret (``security.channel``), so names and dates in it
mean nothing.
"""

import contextlib
import os
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from tailbound.config import Certificates, Security, Transport
from tailbound.errors import ConfigError
from tailbound.protocol.wire import HEADER_BYTES
from tailbound.security.channel import Channel, Guarded, Plain, Tls
from tailbound.security.gate import Gate
from tailbound.security.proofs import NONCE_BYTES
from tailbound.security.sealing import Sealing, load_cipher

VALID_DAYS = 3650
"""Nobody checks it; but some date must stand there."""


class Credentials:
    """What the ends of this process's connections are made with.

    Args:
        transport: its secret, security and certificates.

    Raises:
        ConfigError: neither a secret nor certificates, or a file is not what it should.
        MissingExtraError: the level needs a package that is not installed.
    """

    def __init__(self, transport: Transport) -> None:
        transport.require_credentials()
        secret = transport.secret
        self._level: Security = transport.security
        self._secret = None if secret is None else secret.encode()
        self.is_sealed = transport.is_sealed
        if self.is_sealed:
            load_cipher()
            self._prepare_tls(transport.certificates)

    def make_channel(self, *, is_connecting: bool) -> Channel:
        """What a new connection's control bytes pass through."""
        nonce = os.urandom(NONCE_BYTES)
        if self._level != "session":
            return Tls(
                self._connecting if is_connecting else self._accepting,
                level=self._level,
                secret=self._secret or b"",
                nonce=nonce,
                is_connecting=is_connecting,
                certificate=self._certificate,
            )
        if self._secret is not None:
            return Guarded(Gate(self._secret, nonce, is_connecting=is_connecting))
        return Plain()

    def make_sealing(
        self, salt: bytes, max_bytes: int, *, is_connecting: bool
    ) -> Sealing:
        """What seals and opens a connection's datagrams, where ``is_sealed``.

        Args:
            salt: of its channel, which is open.
            max_bytes: of a sealed batch.
            is_connecting: whether this end opened it.
        """
        assert self._level != "session", "nothing is sealed"
        return Sealing(
            self._level,
            secret=self._secret or b"",
            salt=salt,
            is_connecting=is_connecting,
            header_bytes=HEADER_BYTES,
            max_bytes=max_bytes,
        )

    def _prepare_tls(self, certificates: Certificates | None) -> None:
        self._connecting = _context(ssl.PROTOCOL_TLS_CLIENT)
        self._accepting = _context(ssl.PROTOCOL_TLS_SERVER)
        # A resumed session would show no certificate.
        self._accepting.num_tickets = 0
        if certificates is None:
            pem = make_certificate()
            with _as_file(pem) as path:
                self._accepting.load_cert_chain(path)
            self._certificate = ssl.PEM_cert_to_DER_cert(
                pem[pem.index(b"-----BEGIN CERTIFICATE") :].decode()
            )
            return
        for context in (self._connecting, self._accepting):
            _load(context, certificates)
        self._certificate = _first_certificate(certificates.cert)


def make_certificate() -> bytes:
    """A key (P-256) and a certificate that it signed itself, PEM, one after the other.

    Raises:
        MissingExtraError: the ``cryptography`` package is not installed.
    """
    load_cipher()
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
    )

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tailbound")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=VALID_DAYS))
        .not_valid_after(now + timedelta(days=VALID_DAYS))
        .sign(key, SHA256())
    )
    form = PrivateFormat.PKCS8
    return bytes(
        key.private_bytes(Encoding.PEM, form, NoEncryption())
        + certificate.public_bytes(Encoding.PEM)
    )


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _load(context: ssl.SSLContext, certificates: Certificates) -> None:
    """Show the job's own certificate, and ask for one of the same authorities.

    Names are not compared: ranks have addresses, and any rank may be any.
    """
    try:
        context.load_cert_chain(
            certificates.cert, certificates.key, password=_refuse_passphrase
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"certificate {certificates.cert} with key {certificates.key}: "
            f"{_reason(error)}; give PEM files that belong together, the key without "
            "a passphrase"
        ) from error
    try:
        context.load_verify_locations(certificates.ca)
    except OSError as error:
        raise ConfigError(
            f"authorities {certificates.ca}: {_reason(error)}; give a PEM file"
        ) from error
    context.verify_mode = ssl.CERT_REQUIRED


def _refuse_passphrase() -> bytes:
    raise ValueError("it has a passphrase")


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, ssl.SSLError):
        return error.reason or str(error)
    return getattr(error, "strerror", None) or str(error)


def _first_certificate(path: str) -> bytes:
    """DER of the one that is shown, the first of the file."""
    with open(path, encoding="ascii", errors="replace") as file:
        text = file.read()
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    start = text.index(begin)
    return ssl.PEM_cert_to_DER_cert(text[start : text.index(end, start) + len(end)])


@contextlib.contextmanager
def _as_file(data: bytes) -> Iterator[str]:
    """A path to bytes that are in memory only: a key has no business on a disk."""
    fd = os.memfd_create("tailbound", os.MFD_CLOEXEC)
    try:
        os.write(fd, data)
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)
