"""A development and small-site PKI: one authority, a server certificate, client certificates.

EC P-256 throughout. Files under one folder:

    ca.pem           the authority that clients trust
    ca-key.pem       its key
    server.pem       the server's certificate
    server-key.pem   its key
    clients/NAME.pem a client's certificate and key in one file

Keys are written for their owner alone. Every file is replaced by a rename, so a reader never sees half.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from engine.errors import ConfigError

AUTHORITY_DAYS = 3650
LEAF_DAYS = 397
RENEW_BEFORE = timedelta(days=14)
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_HOST_NAME = re.compile(r"(?:\*\.)?[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?")
_CLIENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")

PrivateKey = ec.EllipticCurvePrivateKey


@dataclass(frozen=True, slots=True)
class Pki:
    """The files of one folder."""

    folder: Path = Path("certs")

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    @property
    def ca_key(self) -> Path:
        return self.folder / "ca-key.pem"

    @property
    def server(self) -> Path:
        return self.folder / "server.pem"

    @property
    def server_key(self) -> Path:
        return self.folder / "server-key.pem"

    def client(self, name: str) -> Path:
        return self.folder / "clients" / f"{name}.pem"


@dataclass(frozen=True, slots=True)
class Description:
    """What `certs show` prints of a certificate."""

    path: Path
    subject: str
    names: tuple[str, ...]
    not_before: datetime
    not_after: datetime
    sha256: str

    @property
    def expired(self) -> bool:
        return self.not_after <= datetime.now(UTC)


def ensure(pki: Pki, hosts: Iterable[str] = (), *, renew: bool = False) -> list[Path]:
    """Makes what is missing, about to expire or without one of `hosts`; returns the files written.

    `renew` makes the server's certificate anew in any case. The authority is made anew only when it is
    missing or about to expire, and then the server's certificate with it: clients must trust the new one.
    """
    written: list[Path] = []
    authority = _read_authority(pki)
    if authority is None:
        authority = _issue_authority(pki)
        written += [pki.ca, pki.ca_key]
    names = tuple(
        dict.fromkeys([*LOCAL_NAMES, socket.gethostname().lower(), *(host.lower() for host in hosts)])
    )
    if renew or written or not _server_stands(pki, authority[0], names):
        if pki.server.is_file() and not written:
            names = tuple(dict.fromkeys([*names, *describe(pki.server).names]))
        _issue_server(pki, authority, names)
        written += [pki.server, pki.server_key]
    return written


def issue_client(pki: Pki, name: str) -> Path:
    """A client certificate and its key in `clients/NAME.pem`; `name` becomes its URI and common name."""
    if not _CLIENT_NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is no client name: use up to 64 letters, digits and . _ @ -")
    authority = _read_authority(pki)
    if authority is None:
        raise ConfigError(f"there is no authority in {pki.folder}: run `mcp-discovery certs init` first")
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _leaf(authority, key, name, ExtendedKeyUsageOID.CLIENT_AUTH).add_extension(
        x509.SubjectAlternativeName([x509.UniformResourceIdentifier(f"urn:mcp-discovery:client:{name}")]),
        False,
    )
    certificate = builder.sign(authority[1], hashes.SHA256())
    path = pki.client(name)
    _write(path, _pem(certificate) + _pem_key(key), mode=0o600)
    return path


def describe(path: Path) -> Description:
    """Subject, names, validity and SHA-256 of the certificate in `path`; raises `ConfigError`."""
    certificate = _read_certificate(path)
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        listed: tuple[str, ...] = ()
    else:
        listed = tuple(str(name.value) for name in names)
    digest = certificate.fingerprint(hashes.SHA256()).hex().upper()
    return Description(
        path=path,
        subject=certificate.subject.rfc4514_string(),
        names=listed,
        not_before=certificate.not_valid_before_utc,
        not_after=certificate.not_valid_after_utc,
        sha256=":".join(digest[at : at + 2] for at in range(0, len(digest), 2)),
    )


Authority = tuple[x509.Certificate, PrivateKey]


def _read_authority(pki: Pki) -> Authority | None:
    """The authority, None where it is missing or about to expire."""
    if not pki.ca.is_file() or not pki.ca_key.is_file():
        return None
    certificate = _read_certificate(pki.ca)
    if _ends_soon(certificate):
        return None
    key = _read_key(pki.ca_key, certificate)
    if key is None:
        raise ConfigError(f"{pki.ca_key} is not the key of {pki.ca}: remove both to make a new authority")
    return certificate, key


def _read_key(path: Path, certificate: x509.Certificate) -> PrivateKey | None:
    """The key of `certificate`; None where `path` holds another or none."""
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise ConfigError(f"cannot read the key {path}: {error.strerror}") from None
    except (ValueError, TypeError):
        return None
    return key if isinstance(key, PrivateKey) and key.public_key() == certificate.public_key() else None


def _read_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read the certificate {path}: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{path} is not a PEM certificate: remove it to make a new one") from None


def _ends_soon(certificate: x509.Certificate) -> bool:
    return certificate.not_valid_after_utc - datetime.now(UTC) < RENEW_BEFORE


def _server_stands(pki: Pki, authority: x509.Certificate, names: Iterable[str]) -> bool:
    """Whether the server's certificate is there with its key, of this authority, valid for a while and
    for `names`."""
    if not pki.server.is_file() or not pki.server_key.is_file():
        return False
    certificate = _read_certificate(pki.server)
    if certificate.issuer != authority.subject or _ends_soon(certificate):
        return False
    if _read_key(pki.server_key, certificate) is None:
        return False
    return set(names) <= set(describe(pki.server).names)


def _issue_authority(pki: Pki) -> Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    # A name of its own for each authority, so that a certificate of an earlier one is told apart.
    subject = _name(f"mcp-discovery development CA {secrets.token_hex(4)}")
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    builder = (
        _builder(subject, subject, key, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    certificate = builder.sign(key, hashes.SHA256())
    _write(pki.ca_key, _pem_key(key), mode=0o600)
    _write(pki.ca, _pem(certificate))
    return certificate, key


def _issue_server(pki: Pki, authority: Authority, names: Iterable[str]) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _leaf(authority, key, "mcp-discovery server", ExtendedKeyUsageOID.SERVER_AUTH).add_extension(
        x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False
    )
    certificate = builder.sign(authority[1], hashes.SHA256())
    _write(pki.server_key, _pem_key(key), mode=0o600)
    _write(pki.server, _pem(certificate))


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        pass
    if not _HOST_NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is neither a host name nor an IP address")
    return x509.DNSName(name)


def _leaf(
    authority: Authority, key: PrivateKey, common_name: str, usage: x509.ObjectIdentifier
) -> x509.CertificateBuilder:
    issuer, issuer_key = authority
    return (
        _builder(_name(common_name), issuer.subject, key, LEAF_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False
        )
    )


def _builder(subject: x509.Name, issuer: x509.Name, key: PrivateKey, days: int) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))  # clocks differ
        .not_valid_after(now + timedelta(days=days))
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _pem_key(key: PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Writes by rename, with `mode` from the first byte on."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
