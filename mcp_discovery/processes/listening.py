"""Listeners over sockets that the parent has bound."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from starlette.types import ASGIApp

from mcp_discovery.config import Config
from mcp_discovery.transport.limits import ConnectionLimits
from mcp_discovery.transport.serve import Listener
from mcp_discovery.transport.tls import context_of


def listeners_of(config: Config, app: ASGIApp, sockets: Mapping[str, int]) -> list[Listener]:
    """One for each inherited socket; that named `tls` speaks TLS. Raises `ConfigError`.

    Several processes may listen on one socket: who has time takes the next connection, and where a process
    ends what waits in the queue is taken by another. Sockets of their own on one port would lose it.
    """
    return [_listener(config, name, app, socket.socket(fileno=number)) for name, number in sockets.items()]


def _listener(config: Config, name: str, app: ASGIApp, bound: socket.socket) -> Listener:
    table = config.server
    bound.setblocking(False)
    return Listener(
        name,
        app,
        bound,
        context_of(config.tls) if name == "tls" else None,
        limits=ConnectionLimits(table.header_timeout_s, table.body_timeout_s, table.max_header_bytes),
        handshake_timeout_s=table.handshake_timeout_s,
        keep_alive_s=table.keep_alive_s,
        backlog=table.backlog,
    )
