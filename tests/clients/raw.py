"""MCP by hand: JSON-RPC in HTTP in TLS, with nothing but the standard library."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODERN = "2026-07-28"
LEGACY = "2025-11-25"
ERAS = (MODERN, LEGACY)
TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def message(era: str, method: str, params: dict[str, Any] | None = None, **extra: Any) -> dict[str, Any]:
    """A JSON-RPC request as `era` writes it."""
    params = dict(params or {})
    if era == MODERN:
        params["_meta"] = {
            "io.modelcontextprotocol/protocolVersion": MODERN,
            "io.modelcontextprotocol/clientCapabilities": {},
            **params.get("_meta", {}),
        }
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": params, **extra}


def headers(era: str, method: str = "tools/call", name: str = "discover_tools") -> dict[str, str]:
    """The headers that `era` asks for."""
    fields = {
        "content-type": "application/json",
        "accept": "application/json, text/event-stream",
        "mcp-protocol-version": era,
    }
    if era == MODERN:
        fields["mcp-method"] = method
        if method == "tools/call":
            fields["mcp-name"] = name
    return fields


def call_message(era: str, query: Any, **arguments: Any) -> dict[str, Any]:
    return message(era, "tools/call", {"name": "discover_tools", "arguments": {"query": query, **arguments}})


def trusting(ca: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(ca))


def connect(host: str, port: int, ca: Path, context: ssl.SSLContext | None = None) -> ssl.SSLSocket:
    plain = socket.create_connection((host, port), TIMEOUT_S)
    return (context or trusting(ca)).wrap_socket(plain, server_hostname=host)


def request(
    host: str,
    port: int,
    ca: Path,
    method: str = "POST",
    path: str = "/mcp",
    body: bytes | dict[str, Any] | None = None,
    fields: dict[str, str] | None = None,
    context: ssl.SSLContext | None = None,
) -> Reply:
    """One request on a connection of its own."""
    content = json.dumps(body).encode() if isinstance(body, dict) else body
    connection = http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=context or trusting(ca))
    try:
        connection.request(method, path, content, fields or {})
        response = connection.getresponse()
        return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    finally:
        connection.close()


def request_bytes(era: str, body: dict[str, Any], host: str) -> bytes:
    """A whole POST as bytes, for clients that then hang up."""
    content = json.dumps(body).encode()
    lines = [f"{name}: {value}" for name, value in headers(era).items()]
    head = "\r\n".join(["POST /mcp HTTP/1.1", f"host: {host}", f"content-length: {len(content)}", *lines])
    return head.encode() + b"\r\n\r\n" + content
