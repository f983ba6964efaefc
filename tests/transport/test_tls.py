"""Certificate files: made, renewed, described; missing or mismatched ones are one sentence."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from engine.errors import ConfigError
from mcp_discovery import certificates
from mcp_discovery.certificates import Pki, describe, ensure, issue_client
from mcp_discovery.transport.tls import client_context, server_context
from tests.clients.raw import MODERN, call_message, headers, request
from tests.transport.serving import serving


def test_init_makes_private_keys_private_and_is_idempotent(tmp_path: Path) -> None:
    made = Pki(tmp_path)
    assert set(ensure(made)) == {made.ca, made.ca_key, made.server, made.server_key}
    for key in (made.ca_key, made.server_key):
        assert key.stat().st_mode & 0o777 == 0o600
    assert ensure(made) == []
    assert list(tmp_path.glob(".*")) == []


def test_a_new_host_renews_the_certificate_and_keeps_the_authority(tmp_path: Path) -> None:
    made = Pki(tmp_path)
    ensure(made, ["one.example.org"])
    authority = describe(made.ca).sha256
    assert ensure(made, ["two.example.org", "192.0.2.7"]) == [made.server, made.server_key]
    shown = describe(made.server)
    assert {"localhost", "127.0.0.1", "::1", "one.example.org", "two.example.org", "192.0.2.7"} <= set(
        shown.names
    )
    assert describe(made.ca).sha256 == authority
    server_context(made.server, made.server_key)


def test_renew_makes_a_new_certificate_with_the_same_names(tmp_path: Path) -> None:
    made = Pki(tmp_path)
    ensure(made, ["one.example.org"])
    before = describe(made.server)
    ensure(made, renew=True)
    after = describe(made.server)
    assert after.sha256 != before.sha256
    assert set(after.names) == set(before.names)


def test_what_ends_soon_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Pki(tmp_path)
    monkeypatch.setattr(certificates, "LEAF_DAYS", 3)
    ensure(made)
    monkeypatch.undo()
    assert ensure(made) == [made.server, made.server_key]
    assert describe(made.server).not_after > datetime.now(UTC) + timedelta(days=300)


def test_a_server_certificate_without_its_key_is_made_anew(tmp_path: Path) -> None:
    made = Pki(tmp_path)
    ensure(made)
    for wrong in (made.ca_key.read_bytes(), b"nothing"):
        made.server_key.write_bytes(wrong)
        assert ensure(made) == [made.server, made.server_key]
        server_context(made.server, made.server_key)


def test_a_new_authority_takes_the_server_certificate_with_it(tmp_path: Path) -> None:
    made = Pki(tmp_path)
    ensure(made)
    made.ca_key.unlink()
    assert set(ensure(made)) == {made.ca, made.ca_key, made.server, made.server_key}


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "x" * 65, "a b"])
def test_a_client_name_that_is_no_name_is_refused(pki: Pki, name: str) -> None:
    with pytest.raises(ConfigError, match="client name"):
        issue_client(pki, name)


@pytest.mark.parametrize("name", ["bücher.example", "", "a b", "a..b", "https://a", "x" * 64])
def test_a_bad_host_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="neither a host name nor an IP address"):
        ensure(Pki(tmp_path), [name])


def test_client_certificates_are_asked_for_and_checked(pki: Pki, tmp_path: Path) -> None:
    other = Pki(tmp_path / "other")
    ensure(other)
    good, bad = issue_client(pki, "alice"), issue_client(other, "mallory")
    body = call_message(MODERN, "x")
    with serving(pki, tmp_path / "s", client_certs="required") as served:

        def call(certificate: Path | None) -> int:
            context = client_context(pki.ca, certificate)
            return request(
                served.host, served.port, served.ca, body=body, fields=headers(MODERN), context=context
            ).status

        assert call(good) == 200
        for refused in (None, bad):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                call(refused)


def test_missing_damaged_and_mismatched_files_are_one_sentence(pki: Pki, tmp_path: Path) -> None:
    other = Pki(tmp_path / "other")
    ensure(other)
    damaged = tmp_path / "damaged.pem"
    damaged.write_text("-----BEGIN CERTIFICATE-----\nnope\n")
    cases = {
        "is missing": (tmp_path / "none.pem", pki.server_key),
        "is not the key of": (pki.server, other.server_key),
        "are not a PEM certificate": (damaged, pki.server_key),
    }
    for expected, (cert, key) in cases.items():
        with pytest.raises(ConfigError, match=expected) as raised:
            server_context(cert, key)
        assert "\n" not in str(raised.value)
        assert "certs init" in str(raised.value)
    with pytest.raises(ConfigError, match=r"tls\.ca"):
        server_context(pki.server, pki.server_key, client_certs="required")
    with pytest.raises(ConfigError, match="is not a PEM certificate"):
        client_context(damaged)
    with pytest.raises(ConfigError, match="is missing"):
        client_context(tmp_path / "none.pem")


def test_an_encrypted_key_fails_instead_of_asking_the_terminal(pki: Pki, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(pki.server_key.read_bytes(), None)
    locked = tmp_path / "locked.pem"
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(ConfigError, match="are not a PEM certificate and its key"):
        server_context(pki.server, locked)
