"""TLS contexts: the server's from its certificate files, a client's from the authority it trusts."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Literal

from engine.errors import ConfigError
from mcp_discovery.config import TlsTable

_VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
_CLIENT_CERTS = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}
_ISSUE = "run `mcp-discovery certs init` or set {key}"


def server_context(
    cert: Path,
    key: Path,
    *,
    ca: Path | None = None,
    client_certs: Literal["none", "optional", "required"] = "none",
    min_version: Literal["1.2", "1.3"] = "1.3",
) -> ssl.SSLContext:
    """The server's context. `ca` signs client certificates, and is read only where they are asked for.

    Raises `ConfigError` where a file is missing, damaged, or certificate and key are no pair.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _VERSIONS[min_version]
    context.set_alpn_protocols(["http/1.1"])
    _load_pair(context, cert, key, "the server's")
    context.verify_mode = _CLIENT_CERTS[client_certs]
    if client_certs != "none":
        if ca is None:
            raise ConfigError(
                f"tls.client_certs is {client_certs}, so tls.ca must name the authority of clients"
            )
        _load_authority(context, ca)
    return context


def context_of(table: TlsTable) -> ssl.SSLContext:
    """The server's context from `[tls]`; raises `ConfigError`."""
    return server_context(
        table.cert, table.key, ca=table.ca, client_certs=table.client_certs, min_version=table.min_version
    )


def client_context(
    ca: Path | None = None, cert: Path | None = None, key: Path | None = None
) -> ssl.SSLContext:
    """A client's context: trusts `ca`, or the system's authorities; shows `cert` where given.

    `key` None means that the certificate's file holds the key too. Raises `ConfigError`.
    """
    context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH) if ca is None else _trusting(ca)
    if cert is not None:
        _load_pair(context, cert, key or cert, "the client's")
    return context


def _trusting(ca: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _load_authority(context, ca)
    return context


def _load_pair(context: ssl.SSLContext, cert: Path, key: Path, whose: str) -> None:
    for path, name, setting in ((cert, "certificate", "tls.cert"), (key, "key", "tls.key")):
        if not path.is_file():
            raise ConfigError(f"{whose} {name} {path} is missing: {_ISSUE.format(key=setting)}")
    try:
        # An encrypted key must fail here, not ask the terminal for its password.
        context.load_cert_chain(cert, key, password=lambda: "")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            problem = f"{key} is not the key of {cert}"
        else:
            problem = f"{cert} and {key} are not a PEM certificate and its key"
        raise ConfigError(f"{problem}: {_ISSUE.format(key='tls.cert and tls.key')}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {cert} and {key}: {error.strerror}") from None


def _load_authority(context: ssl.SSLContext, ca: Path) -> None:
    if not ca.is_file():
        raise ConfigError(
            f"the authority's certificate {ca} is missing: {_ISSUE.format(key='tls.ca (--ca)')}"
        )
    try:
        context.load_verify_locations(ca)
    except (ssl.SSLError, OSError):
        raise ConfigError(f"{ca} is not a PEM certificate: {_ISSUE.format(key='tls.ca (--ca)')}") from None
