"""One MCP client on one TLS connection, as cheap as Python allows: bytes made ahead, no tasks, no JSON."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast
from urllib.parse import urlsplit

REVISION = "2026-07-28"
HEALTH = "/healthz"
_META = {
    "io.modelcontextprotocol/protocolVersion": REVISION,
    "io.modelcontextprotocol/clientCapabilities": {},
}
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the server is and whose certificates it shows."""

    host: str
    port: int
    path: str
    ca: Path

    @classmethod
    def of(cls, url: str, ca: Path) -> Endpoint:
        """Raises ValueError for a URL that is not https."""
        parts = urlsplit(url)
        if parts.scheme != "https" or not parts.hostname:
            raise ValueError(f"--url must be an address such as https://127.0.0.1:8443/mcp, it is {url!r}")
        return cls(parts.hostname, parts.port or 443, parts.path or "/mcp", ca)

    @property
    def authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.ca))

    def call(
        self, arguments: Mapping[str, object], tool: str = "discover_tools", *, number: int = 1
    ) -> bytes:
        """A whole `tools/call` request, whose id is `number`."""
        params = {"name": tool, "arguments": arguments, "_meta": _META}
        message = {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}
        body = json.dumps(message, ensure_ascii=False).encode()
        head = (
            f"POST {self.path} HTTP/1.1\r\nhost: {self.authority}\r\ncontent-type: application/json\r\n"
            f"accept: application/json, text/event-stream\r\nmcp-protocol-version: {REVISION}\r\n"
            f"mcp-method: tools/call\r\nmcp-name: {tool}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    def health(self) -> bytes:
        """A request that costs the server next to nothing."""
        return f"GET {HEALTH} HTTP/1.1\r\nhost: {self.authority}\r\n\r\n".encode()


class Owner(Protocol):
    """Who uses a client: told once of each answer, and of a connection that ended."""

    def answered(self, client: Client, ok: bool, body: bytes) -> None: ...

    def lost(self, client: Client, reason: str) -> None: ...


class Client(asyncio.Protocol):
    """Sends one request at a time; the moments are `time.monotonic()` seconds."""

    __slots__ = ("_body_at", "_buffer", "_end", "_transport", "busy", "calls", "closed", "owner", "sent")

    def __init__(self) -> None:
        self.owner: Owner | None = None
        self.calls = 0  # answers since the owner took it
        self.sent = 0.0
        self.busy = False
        self.closed = False
        self._buffer = bytearray()
        self._body_at = self._end = -1
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its type

    @property
    def port(self) -> int:
        """Of this end."""
        assert self._transport is not None
        return int(self._transport.get_extra_info("sockname")[1])

    def ask(self, request: bytes) -> None:
        assert self._transport is not None
        self.busy = True
        self.sent = time.monotonic()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._end < 0 and not self._read_head():
            return
        if len(self._buffer) < self._end:
            return
        ok = self._buffer.startswith(b"HTTP/1.1 200")
        body = bytes(self._buffer[self._body_at : self._end] if ok else self._buffer[: self._end])
        self._buffer.clear()
        self._end = -1
        self.busy = False
        if self.owner is not None:
            self.owner.answered(self, ok, body)

    def _read_head(self) -> bool:
        """Whether the head is there and says where the answer ends."""
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        found = _LENGTH.search(self._buffer, 0, end)
        self._body_at = end + 4
        self._end = self._body_at + int(found[1]) if found else len(self._buffer)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self.owner is not None:
            self.owner.lost(self, f"the connection was lost: {exc or 'the server closed it'}")

    def close(self) -> None:
        self.owner = None
        if self._transport is not None:
            self._transport.abort()


async def connect(endpoint: Endpoint, context: ssl.SSLContext, timeout_s: float = 30.0) -> Client:
    """A client whose TLS handshake is done; raises OSError."""
    loop = asyncio.get_running_loop()
    opening = loop.create_connection(
        Client, endpoint.host, endpoint.port, ssl=context, server_hostname=endpoint.host,
        ssl_handshake_timeout=timeout_s,
    )  # fmt: skip
    _, client = await opening
    return client
