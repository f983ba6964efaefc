"""Programs that people use as clients, over https with the development authority."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from tests.clients.raw import ERAS, LEGACY, call_message, headers, message, request, request_bytes, trusting
from tests.clients.server import WAIT_S, Process

QUERY = "send an email to my colleague"
EXPECTED = "mail/send_email"


def ids(structured: dict[str, Any]) -> list[str]:
    return [tool["id"] for tool in structured["tools"]]


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_the_official_client(server: Process, mode: str) -> None:
    async def main() -> None:
        async with (
            httpx2.AsyncClient(verify=trusting(server.pki.ca), timeout=WAIT_S) as http,
            Client(streamable_http_client(server.url, http_client=http), mode=mode) as client,
        ):
            (tool,) = (await client.list_tools()).tools
            assert tool.name == "discover_tools"
            assert "mail (2)" in (tool.description or "")
            result = await client.call_tool("discover_tools", {"query": QUERY})
            assert not result.is_error
            assert EXPECTED in ids(result.structured_content)
            assert EXPECTED in result.content[0].text

    asyncio.run(main())


@pytest.mark.parametrize("era", ERAS)
def test_a_raw_tls_client(server: Process, era: str) -> None:
    """JSON-RPC by hand over an asyncio TLS stream, two requests on one connection."""

    async def exchange(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: dict[str, Any]
    ) -> Any:
        writer.write(request_bytes(era, body, server.host))
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        assert head.startswith("http/1.1 200")
        length = int(head.split("content-length:")[1].split("\r\n")[0])
        return json.loads(await reader.readexactly(length))

    async def main() -> None:
        reader, writer = await asyncio.open_connection(
            server.host, server.port, ssl=trusting(server.pki.ca), server_hostname=server.host
        )
        for query in (QUERY, "what is the weather tomorrow"):
            answer = await exchange(reader, writer, call_message(era, query))
            assert answer["result"]["structuredContent"]["status"] == "matched"
        writer.close()
        await writer.wait_closed()

    asyncio.run(asyncio.wait_for(main(), WAIT_S))


@pytest.mark.parametrize("era", ["modern", "legacy"])
def test_mcp_inspector(server: Process, inspector: list[str], era: str, tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*inspector, server.url, "--transport", "http", "--protocol-era", era, *arguments]
        environment = {
            **os.environ,
            "NODE_EXTRA_CA_CERTS": str(server.pki.ca),
            "MCP_STORAGE_DIR": str(tmp_path),
        }
        return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, env=environment)

    listed = run("--method", "tools/list", "--format", "json")
    assert listed.returncode == 0, listed.stderr
    assert '"discover_tools"' in listed.stdout
    call = ("--method", "tools/call", "--tool-name", "discover_tools", "--tool-args-json")
    called = run(*call, json.dumps({"query": QUERY}))
    assert called.returncode == 0, called.stderr
    assert EXPECTED in called.stdout
    # A bad argument reaches the person whole: text and structure pass the tool's own output schema.
    invalid = run(*call, json.dumps({"query": QUERY, "colour": "red"}))
    assert invalid.returncode == 5, invalid.stderr
    assert "colour" in invalid.stdout


AGENT = """
import asyncio, ssl, sys
import httpx2
from agents.mcp import MCPServerStreamableHttp

url, ca, query = sys.argv[1:]

def client(headers=None, timeout=None, auth=None):
    context = ssl.create_default_context(cafile=ca)
    return httpx2.AsyncClient(verify=context, headers=headers, timeout=timeout, auth=auth)

async def main():
    params = {"url": url, "httpx_client_factory": client}
    async with MCPServerStreamableHttp(params, client_session_timeout_seconds=60) as server:
        print([tool.name for tool in await server.list_tools()])
        print((await server.call_tool("discover_tools", {"query": query})).content[0].text)

asyncio.run(main())
"""


def test_an_agent_framework(server: Process, agents_python: Path) -> None:
    command = [str(agents_python), "-c", AGENT, server.url, str(server.pki.ca), QUERY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    assert "['discover_tools']" in done.stdout
    assert EXPECTED in done.stdout


def test_curl_over_tls_and_over_the_unix_socket(server: Process) -> None:
    fields = [word for name, value in headers(LEGACY).items() for word in ("-H", f"{name}: {value}")]
    ways = (
        ["--cacert", str(server.pki.ca), server.url],
        ["--unix-socket", str(server.uds), "http://localhost/mcp"],
    )
    for way in ways:
        command = ["curl", "-sS", *way, *fields, "-d", json.dumps(call_message(LEGACY, QUERY))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
        assert done.returncode == 0, done.stderr
        assert EXPECTED in ids(json.loads(done.stdout)["result"]["structuredContent"])


def test_the_command_line_client(server: Process) -> None:
    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "mcp_discovery", "call", "--url", server.url, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)

    trusted = ("--ca", str(server.pki.ca))
    answered = call(*trusted, QUERY, "--limit", "3")
    assert answered.returncode == 0, answered.stderr
    assert EXPECTED in answered.stdout
    as_json = json.loads(call(*trusted, "--json", "--name", EXPECTED).stdout)
    assert ids(as_json) == [EXPECTED]
    assert call(*trusted, "--name", "mail/nothing").returncode == 4
    wrong = call(*trusted, QUERY, "--limit", "99")
    assert wrong.returncode == 2
    assert "1 to 20" in wrong.stdout
    untrusted = call(QUERY, "--ca", str(server.pki.server))
    assert untrusted.returncode == 1
    assert "give its authority with --ca" in untrusted.stderr
    assert "Traceback" not in untrusted.stderr


def test_every_method_of_both_eras_is_answered(server: Process) -> None:
    for era, method in (
        (ERAS[0], "server/discover"),
        (LEGACY, "ping"),
        (ERAS[0], "tools/list"),
        (LEGACY, "tools/list"),
    ):
        reply = request(
            server.host, server.port, server.pki.ca, body=message(era, method), fields=headers(era, method)
        )
        assert (reply.status, "result" in reply.json) == (200, True)
