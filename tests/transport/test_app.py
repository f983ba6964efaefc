"""The HTTP surface: both protocol eras, both listeners, JSON and streams, hostile bodies."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
from typing import Any

import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from mcp_discovery.certificates import Pki
from tests.clients.raw import (
    ERAS,
    LEGACY,
    MODERN,
    Reply,
    call_message,
    connect,
    headers,
    message,
    request,
    request_bytes,
    trusting,
)
from tests.transport.serving import WAIT_S, Served, serving


def post(served: Served, body: bytes | dict[str, Any], fields: dict[str, str]) -> Reply:
    return request(served.host, served.port, served.ca, body=body, fields=fields)


@pytest.mark.parametrize("era", ERAS)
def test_lists_and_calls_the_tool_over_tls(served: Served, era: str) -> None:
    listed = post(served, message(era, "tools/list"), headers(era, "tools/list"))
    assert [tool["name"] for tool in listed.json["result"]["tools"]] == ["discover_tools"]
    called = post(served, call_message(era, "hello"), headers(era))
    assert called.status == 200
    assert called.headers["content-type"] == "application/json"
    assert called.json["result"]["structuredContent"]["echo"] == "hello"


@pytest.mark.parametrize("version", ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"])
def test_every_handshake_revision_initializes(served: Served, version: str) -> None:
    params = {
        "protocolVersion": version,
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    }
    reply = post(served, message(LEGACY, "initialize", params), headers(version, "initialize"))
    assert reply.json["result"]["protocolVersion"] == version


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_the_official_client_lists_calls_and_gets_progress(served: Served, mode: str) -> None:
    progress: list[float] = []

    async def on_progress(done: float, total: float | None, text: str | None) -> None:
        progress.append(done)

    async def main() -> None:
        async with (
            httpx2.AsyncClient(verify=trusting(served.ca)) as http,
            Client(streamable_http_client(served.url, http_client=http), mode=mode) as client,
        ):
            assert [tool.name for tool in (await client.list_tools()).tools] == ["discover_tools"]
            plain = await client.call_tool("discover_tools", {"query": "plain"})
            assert plain.structured_content["echo"] == "plain"
            streamed = await client.call_tool(
                "discover_tools", {"query": "streamed"}, progress_callback=on_progress
            )
            assert streamed.structured_content["echo"] == "streamed"

    asyncio.run(main())
    assert progress == [0, 1]


@pytest.mark.parametrize("era", ERAS)
def test_an_unknown_tool_is_a_protocol_error_that_names_it(served: Served, era: str) -> None:
    body = message(era, "tools/call", {"name": "nope", "arguments": {}})
    reply = post(served, body, headers(era, name="nope"))
    assert reply.json["error"]["code"] == -32602
    assert "nope" in reply.json["error"]["message"]


def test_curl_speaks_to_the_unix_socket_that_only_its_owner_may_open(served: Served) -> None:
    assert served.uds.stat().st_mode & 0o777 == 0o600
    command = ["curl", "-sS", "--unix-socket", str(served.uds), "http://localhost/mcp"]
    for name, value in headers(LEGACY).items():
        command += ["-H", f"{name}: {value}"]
    command += ["-d", json.dumps(call_message(LEGACY, "by socket"))]
    done = subprocess.run(command, capture_output=True, timeout=WAIT_S, check=True)
    assert json.loads(done.stdout)["result"]["structuredContent"]["echo"] == "by socket"


@pytest.mark.parametrize("progress", [False, True], ids=["json", "stream"])
@pytest.mark.parametrize("era", ERAS)
def test_a_client_that_hangs_up_is_cancelled(fresh: Served, era: str, progress: bool) -> None:
    body = call_message(era, "hold")
    if progress:
        body["params"].setdefault("_meta", {})["progressToken"] = "p"
    with connect(fresh.host, fresh.port, fresh.ca) as tls:
        tls.sendall(request_bytes(era, body, fresh.host))
        assert fresh.tool.started.wait(WAIT_S)
    assert fresh.tool.cancelled.wait(WAIT_S)
    # The server still serves, and the ledger knows.
    assert post(fresh, call_message(era, "after"), headers(era)).status == 200
    counts = fresh.run(fresh.accounting.counts)
    assert (counts.received, counts.cancelled, counts.answered, counts.in_flight) == (2, 1, 1, 0)


@pytest.mark.parametrize("era", ERAS)
def test_counts_follow_the_status_of_each_result(fresh: Served, era: str) -> None:
    for query in ("one", "refuse", 7, "break"):
        post(fresh, call_message(era, query), headers(era))
    counts = fresh.run(fresh.accounting.counts)
    assert counts.as_json() == {
        "received": 3,
        "answered": 1,
        "no_match": 0,
        "refused": {"queue_full": 1},
        "failed": 1,
        "cancelled": 0,
        "in_flight": 0,
        "invalid": 1,
    }


def test_a_fault_of_the_tool_shows_the_client_nothing_of_its_inside(fresh: Served) -> None:
    for era in ERAS:
        reply = post(fresh, call_message(era, "break"), headers(era))
        assert reply.json["error"]["code"] == -32603
        assert b"planted" not in reply.body


@pytest.mark.parametrize("method", ["GET", "DELETE", "PUT"])
def test_only_post_is_served(served: Served, method: str) -> None:
    reply = request(served.host, served.port, served.ca, method, fields={"accept": "text/event-stream"})
    assert (reply.status, reply.headers["allow"]) == (405, "POST")


def hostile_bodies() -> dict[str, bytes]:
    whole = call_message(MODERN, "x")
    text = json.dumps(whole)
    return {
        "empty": b"",
        "not json": b"hello",
        "cut": text[:-1].encode(),
        "null": b"null",
        "number": b"1",
        "batch": json.dumps([whole, whole]).encode(),
        "empty batch": b"[]",
        "deep list": b"[" * 100_000 + b"]" * 100_000,
        "deep object": b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
        "deep with a token": b'{"progressToken":' * 10_000 + b"1" + b"}" * 10_000,
        "id NaN": text.replace('"id": 1', '"id": NaN').encode(),
        "id of 5,000 digits": text.replace('"id": 1', f'"id": {"9" * 5000}').encode(),
        "id null": text.replace('"id": 1', '"id": null').encode(),
        "id an object": text.replace('"id": 1', '"id": {}').encode(),
        "utf-16": text.encode("utf-16"),
        "latin-1": b'{"jsonrpc": "2.0", "id": 1, "method": "\xe9"}',
        "lone surrogate": text.replace('"x"', '"\\ud800"').encode(),
        "params a list": json.dumps({**whole, "params": [1]}).encode(),
        "arguments a list": json.dumps({**whole, "params": {**whole["params"], "arguments": [1]}}).encode(),
        "name a number": json.dumps({**whole, "params": {**whole["params"], "name": 5}}).encode(),
        "meta a string": json.dumps(
            {**whole, "params": {**whole["params"], "_meta": "progressToken"}}
        ).encode(),
        "unknown method": json.dumps({**whole, "method": "tools/nope"}).encode(),
        "nul bytes": b"\0" * 1000,
    }


@pytest.mark.parametrize("era", [*ERAS, "1999-01-01", "", "\xff"])
@pytest.mark.parametrize("name", hostile_bodies())
def test_a_hostile_body_is_answered_and_never_a_fault_of_ours(served: Served, name: str, era: str) -> None:
    reply = post(served, hostile_bodies()[name], headers(era))
    assert 200 <= reply.status < 500
    if reply.status not in (202, 406):
        assert "result" in reply.json or "error" in reply.json
    assert post(served, call_message(MODERN, "after"), headers(MODERN)).status == 200


@pytest.mark.parametrize("body", [b"[]", b' \n[{"jsonrpc": "2.0", "method": "notifications/initialized"}]'])
def test_a_batch_is_refused_in_one_sentence(served: Served, body: bytes) -> None:
    reply = post(served, body, headers(LEGACY))
    assert (reply.status, reply.json["error"]["code"]) == (400, -32600)
    assert "send one JSON-RPC message in each request" in reply.json["error"]["message"]


def test_nobody_is_redirected_to_a_host_of_the_requests_choice(served: Served) -> None:
    fields = {**headers(MODERN), "host": "evil.example.org"}
    reply = request(served.host, served.port, served.ca, path="/mcp/", body=b"{}", fields=fields)
    assert reply.status == 404
    assert "location" not in reply.headers


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit_is_refused(served: Served, chunked: bool) -> None:
    content = b"x" * (300 << 10)
    body: Any = iter([content[: 1 << 16]] * 5) if chunked else content
    try:
        reply = request(served.host, served.port, served.ca, body=body, fields=headers(MODERN))
    except (BrokenPipeError, ConnectionResetError):
        return  # closed while the client still wrote, which is a refusal too
    assert reply.status == 413
    assert b"262144" in reply.body


def test_host_and_origin_are_checked(pki: Pki, tmp_path: Any) -> None:
    options = {"allowed_hosts": ("mcp.example.org",), "allowed_origins": ("https://app.example.org",)}
    body = call_message(MODERN, "x")
    with serving(pki, tmp_path / "s", **options) as served:

        def status(**fields: str) -> int:
            return post(served, body, {**headers(MODERN), **fields}).status

        assert status() == 200
        assert status(host="mcp.example.org") == 200
        assert status(host="localhost:1234") == 200
        assert status(host="evil.example.org") == 421
        assert status(origin="https://app.example.org") == 200
        assert status(origin="https://localhost:6274") == 200
        assert status(origin="https://127.0.0.1") == 200
        assert status(origin="https://evil.example.org") == 403
        assert status(origin="https://localhost.evil.example.org") == 403


def test_health_and_readiness(pki: Pki, tmp_path: Any) -> None:
    reasons = ["warming up: 3 of 7 tools"]
    with serving(pki, tmp_path / "s", not_ready=lambda: reasons[0]) as served:

        def get(path: str) -> Reply:
            return request(served.host, served.port, served.ca, "GET", path)

        assert get("/healthz").status == 200
        assert get("/readyz").status == 503
        assert get("/readyz").json["reason"] == reasons[0]
        reasons[0] = ""
        assert get("/readyz").status == 200
        assert get("/nope").status == 404


def test_a_connection_is_a_caller(fresh: Served) -> None:
    for _ in range(2):
        post(fresh, call_message(MODERN, "x"), headers(MODERN))
    with socket.socket(socket.AF_UNIX) as local:
        local.settimeout(WAIT_S)
        local.connect(str(fresh.uds))
        local.sendall(request_bytes(MODERN, call_message(MODERN, "x"), "localhost"))
        assert local.recv(65536).startswith(b"HTTP/1.1 200")
    assert len(set(fresh.tool.callers)) == 3


def test_an_unknown_protocol_revision_is_answered_with_the_known_ones(served: Served) -> None:
    fields = {**headers(MODERN), "mcp-protocol-version": "2031-01-01"}
    body = call_message(MODERN, "x")
    body["params"]["_meta"]["io.modelcontextprotocol/protocolVersion"] = "2031-01-01"
    reply = post(served, body, fields)
    assert reply.status == 400
    assert MODERN in reply.json["error"]["data"]["supported"]
