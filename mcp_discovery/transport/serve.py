"""Listeners: one uvicorn server for each bound socket, in one event loop, drained together."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field

import uvicorn
from starlette.types import ASGIApp

from mcp_discovery.transport.limits import ConnectionLimits, protocol_with

WANTED_FILES = 65_536
LAST_WORDS_S = 1.0


@dataclass(frozen=True, slots=True)
class Listener:
    """An app on a bound socket, over TLS where a context is given."""

    name: str
    app: ASGIApp
    socket: socket.socket
    tls: ssl.SSLContext | None = None
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    handshake_timeout_s: float = 10.0
    keep_alive_s: int = 75
    backlog: int = 4096

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that the socket is bound to."""
        host, port = self.socket.getsockname()[:2]
        return host, port


class Listeners:
    """Several listeners in the running event loop."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._servers = [_Server(listener) for listener in listeners]
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Accepts connections once it returns."""
        self._tasks = [asyncio.create_task(server.serve()) for server in self._servers]
        for server, task in zip(self._servers, self._tasks, strict=True):
            up = asyncio.ensure_future(server.up.wait())
            await asyncio.wait((up, task), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                up.cancel()
                await task

    async def stop(self, grace_s: float) -> None:
        """Accepts nothing more, lets running requests end for `grace_s`, then cancels them."""
        for server in self._servers:
            server.config.timeout_graceful_shutdown = max(1, round(grace_s))
            server.should_exit = True
        await asyncio.gather(*self._tasks)


class _Server(uvicorn.Server):
    """uvicorn's server of one bound socket: no signal handlers, a limit on the TLS handshake."""

    def __init__(self, listener: Listener) -> None:
        config = uvicorn.Config(
            listener.app,
            loop="none",
            http=protocol_with(listener.limits, listener.name),
            ws="none",
            lifespan="off",  # one app may stand behind several listeners; who starts them runs its lifespan
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=listener.backlog,
            timeout_keep_alive=listener.keep_alive_s,
        )
        super().__init__(config)
        self.up = asyncio.Event()
        self._listener = listener

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        await super().serve([self._listener.socket])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, with a handshake timeout, which its configuration does not offer."""
        loop = asyncio.get_running_loop()
        tls = self._listener.tls
        server = await loop.create_server(
            lambda: self.config.http_protocol_class(  # type: ignore[call-arg]
                config=self.config, server_state=self.server_state, app_state={}, _loop=loop
            ),
            sock=self._listener.socket,
            ssl=tls,
            ssl_handshake_timeout=self._listener.handshake_timeout_s if tls else None,
            backlog=self.config.backlog,
        )
        self.servers = [server]
        self.started = True
        self.up.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, then ends what outlived the grace: tasks to their last line, and connections."""
        await super().shutdown(sockets)
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=LAST_WORDS_S)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)  # connections learn of their end


def raise_file_limit() -> int:
    """Raises the soft limit of open files towards `WANTED_FILES`; returns the limit that holds now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft
