"""Slow, silent and oversized clients are cut off at the limit; the honest ones notice nothing."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mcp_discovery.certificates import Pki
from mcp_discovery.transport.limits import ConnectionLimits
from tests.clients.raw import LEGACY, MODERN, call_message, connect, headers, request, request_bytes, trusting
from tests.transport.serving import WAIT_S, Served, serving

SHORT = ConnectionLimits(header_timeout_s=0.3, body_timeout_s=0.3, max_header_bytes=8 << 10)


@pytest.fixture(scope="module")
def strict(pki: Pki, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    socket_path = tmp_path_factory.mktemp("uds") / "mcp.sock"
    with serving(pki, socket_path, limits=SHORT, handshake_timeout_s=0.3) as running:
        yield running


@contextmanager
def opened(served: Served) -> Iterator[ssl.SSLSocket]:
    with connect(served.host, served.port, served.ca) as tls:
        tls.settimeout(WAIT_S)
        yield tls


def closed(sock: socket.socket) -> bool:
    """Whether the server ends the connection without a byte, within the test's patience."""
    try:
        return sock.recv(1) == b""
    except (ConnectionError, ssl.SSLError):
        return True


def answered(tls: ssl.SSLSocket) -> bool:
    """Reads one whole answer; whether it is a 200."""
    answer = b""
    while not answer.endswith(b"}"):
        chunk = tls.recv(1 << 16)
        if not chunk:
            return False
        answer += chunk
    return answer.startswith(b"HTTP/1.1 200")


def serves(served: Served) -> bool:
    body = call_message(MODERN, "after")
    return request(served.host, served.port, served.ca, body=body, fields=headers(MODERN)).status == 200


def test_silence_before_the_handshake_is_cut_off(strict: Served) -> None:
    with socket.create_connection((strict.host, strict.port), WAIT_S) as plain:
        assert closed(plain)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /mcp HT",
        b"POST /mcp HTTP/1.1\r\nhost: localhost\r\nx: ",
        b"POST /mcp HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{",
        b"POST /mcp HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n",
    ],
    ids=["nothing", "half a line", "half a header", "half a body", "half a chunked body"],
)
def test_a_client_that_stops_in_the_middle_is_cut_off(strict: Served, sent: bytes) -> None:
    with opened(strict) as tls:
        tls.sendall(sent)
        assert closed(tls)
    assert serves(strict)


@pytest.mark.parametrize("part", [0.1, 0.99], ids=["half a header", "half a body"])
def test_a_second_request_gets_the_same_deadlines(strict: Served, part: float) -> None:
    whole = request_bytes(MODERN, call_message(MODERN, "first"), strict.host)
    with opened(strict) as tls:
        tls.sendall(whole)
        assert answered(tls)
        tls.sendall(whole[: int(part * len(whole))])
        assert closed(tls)


@pytest.mark.parametrize("whole", [True, False], ids=["ended", "endless"])
def test_a_large_header_is_refused(strict: Served, whole: bool) -> None:
    with opened(strict) as tls:
        tls.sendall(b"POST /mcp HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * (9 << 10))
        if whole:
            tls.sendall(b"\r\n\r\n")
        assert tls.recv(65536).startswith(b"HTTP/1.1 431")
        assert closed(tls)
    assert serves(strict)


def test_a_large_address_counts_as_header(strict: Served) -> None:
    with opened(strict) as tls:
        tls.sendall(b"GET /" + b"a" * (9 << 10) + b" HTTP/1.1\r\n\r\n")
        assert tls.recv(65536).startswith(b"HTTP/1.1 431")


def test_a_call_may_take_longer_than_header_and_body(strict: Served) -> None:
    """The deadlines end with the body: a held call outlives both, and hanging up still cancels it."""
    with opened(strict) as tls:
        tls.sendall(request_bytes(MODERN, call_message(MODERN, "hold"), strict.host))
        assert strict.tool.started.wait(WAIT_S)
        tls.settimeout(3 * SHORT.body_timeout_s)
        with pytest.raises(TimeoutError):
            tls.recv(1)
        assert not strict.tool.cancelled.is_set()
    assert strict.tool.cancelled.wait(WAIT_S)


def test_the_end_of_a_body_does_not_count_as_the_next_header(strict: Served) -> None:
    """One TLS record with much of a body and a little of the next header, more than a header may have."""
    whole = request_bytes(MODERN, call_message(MODERN, "y" * 32_000), strict.host)
    with opened(strict) as tls:
        tls.sendall(whole + whole[:50])
        assert answered(tls)
        tls.sendall(whole[50:])
        assert answered(tls)


def test_plain_http_on_the_tls_port_gets_no_answer_and_harms_nobody(served: Served) -> None:
    with socket.create_connection((served.host, served.port), WAIT_S) as plain:
        plain.sendall(b"POST /mcp HTTP/1.1\r\nhost: localhost\r\n\r\n")
        received = b""
        try:
            while chunk := plain.recv(4096):
                received += chunk
        except ConnectionResetError:
            pass
    assert b"HTTP/" not in received
    assert serves(served)


def test_tls_1_2_is_refused_unless_configured(served: Served, pki: Pki, tmp_path: Path) -> None:
    old = trusting(pki.ca)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        connect(served.host, served.port, served.ca, old)
    with serving(pki, tmp_path / "s", min_version="1.2") as relaxed:
        body = call_message(LEGACY, "old")
        reply = request(
            relaxed.host, relaxed.port, relaxed.ca, body=body, fields=headers(LEGACY), context=old
        )
        assert json.loads(reply.body)["result"]["structuredContent"]["echo"] == "old"


def test_the_connection_negotiates_tls_1_3(served: Served) -> None:
    with connect(served.host, served.port, served.ca) as tls:
        assert tls.version() == "TLSv1.3"
