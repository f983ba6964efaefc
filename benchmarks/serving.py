"""A server process for a benchmark, and a lean client that speaks MCP on one kept TLS connection."""

from __future__ import annotations

import asyncio
import json
import os
import re
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.ladder.host import thread_seconds, tree
from mcp_discovery.certificates import Pki, ensure

REVISION = "2026-07-28"
_HEADERS = (
    "content-type: application/json\r\naccept: application/json\r\n"
    f"mcp-protocol-version: {REVISION}\r\nmcp-method: tools/call\r\nmcp-name: discover_tools\r\n"
)


@dataclass(frozen=True, slots=True)
class Server:
    """Where a running server is; `ready_s` is from its start to its ready line."""

    host: str
    port: int
    ca: Path
    pid: int
    ready_s: float
    announced: str
    admin: str

    def await_warm(self, most_s: float = 600.0) -> float:
        """Waits until the tools' prefixes are computed; returns the seconds waited. Ends the program where
        that takes longer than `most_s`, as after a warm-up that stopped early."""
        started = time.monotonic()
        while time.monotonic() - started < most_s:
            with urllib.request.urlopen(f"{self.admin}/status.json", timeout=60) as reply:
                if json.load(reply)["is_warm"]:
                    return time.monotonic() - started
            time.sleep(0.5)
        raise SystemExit(f"the server was not warm after {most_s:.0f} s; see its log")

    def cpu_s(self) -> float:
        """Processor seconds that the server's processes have taken so far."""
        return sum(thread_seconds(tree(self.pid)).values())


@contextmanager
def serving(
    folder: Path,
    settings: Mapping[str, object],
    *command: str,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """`mcp-discovery serve` with `{"TABLE__KEY": value}`, on free ports, its certificates in `folder`.
    `command` is another module to run, with its arguments; `environment` is added to this process's."""
    pki = Pki(folder)
    ensure(pki)
    values = {
        "SERVER__PORT": 0,
        "SERVER__ADMIN": "127.0.0.1:0",
        "TLS__CERT": pki.server.resolve(),
        "TLS__KEY": pki.server_key.resolve(),
        "TLS__CA": pki.ca.resolve(),
        **settings,
    }
    environment = {
        **(environment or {}),
        **{f"MCP_DISCOVERY__{key}": str(value) for key, value in values.items()},
    }
    started = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", *(command or ("mcp_discovery", "serve"))],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.match(r"ready: https://([\d.]+):(\d+)/mcp  (.*)", line)
            if found is None:
                raise SystemExit(f"the server did not start: {line!r}")
            ready_s = time.monotonic() - started
            while not line.startswith("admin: "):
                line = process.stdout.readline()
            admin = line.split()[1].removesuffix("/status")
            yield Server(found[1], int(found[2]), pki.ca, process.pid, ready_s, found[3], admin)
        finally:
            process.terminate()


class Connection:
    """One TLS connection; calls go one after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> None:
        self._reader = reader
        self._writer = writer
        self._head = f"POST /mcp HTTP/1.1\r\nhost: {host}\r\n{_HEADERS}"

    @classmethod
    async def open(cls, server: Server) -> Connection:
        context = ssl.create_default_context(cafile=str(server.ca))
        reader, writer = await asyncio.open_connection(
            server.host, server.port, ssl=context, server_hostname=server.host
        )
        return cls(reader, writer, server.host)

    async def call(self, arguments: Mapping[str, object]) -> dict[str, Any]:
        """The structured result of `discover_tools`; raises RuntimeError for anything but a result."""
        meta = {
            "io.modelcontextprotocol/protocolVersion": REVISION,
            "io.modelcontextprotocol/clientCapabilities": {},
        }
        params = {"name": "discover_tools", "arguments": arguments, "_meta": meta}
        body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}).encode()
        self._writer.write(f"{self._head}content-length: {len(body)}\r\n\r\n".encode() + body)
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        if not head.startswith(b"HTTP/1.1 200") or length is None:
            raise RuntimeError(f"the server answered {head.splitlines()[0]!r}")
        answer = json.loads(await self._reader.readexactly(int(length[1])))
        structured: dict[str, Any] = answer["result"]["structuredContent"]
        return structured

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()
