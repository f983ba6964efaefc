"""A server in a thread, and a tool that stands where the real one does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mcp_types as types
import uvloop
from starlette.applications import Starlette

from mcp_discovery.certificates import Pki
from mcp_discovery.observe.accounting import Accounting
from mcp_discovery.transport.app import create_app
from mcp_discovery.transport.bind import bind_tcp, bind_unix
from mcp_discovery.transport.identity import Caller
from mcp_discovery.transport.limits import ConnectionLimits
from mcp_discovery.transport.serve import Listener, Listeners
from mcp_discovery.transport.tls import server_context

WAIT_S = 20.0

SCHEMA = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}


@dataclass
class EchoTool:
    """Answers with its query. `hold` never ends by itself; its start and its cancellation are events."""

    started: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)
    callers: list[str] = field(default_factory=list)

    def definition(self, caller: Caller) -> types.Tool:
        return types.Tool(name="discover_tools", description="Echo.", input_schema=SCHEMA)

    async def call(
        self, arguments: dict[str, Any] | None, caller: Caller, begin: Callable[[], None]
    ) -> types.CallToolResult:
        self.callers.append(caller.id)
        query = (arguments or {}).get("query")
        if not isinstance(query, str):
            return _result("invalid", "query must be a string", error=True)
        begin()
        if query == "hold":
            await self._hold()
        if query == "break":
            raise RuntimeError("planted")
        if query == "refuse":
            return _result("refused", "no", error=True, refusal={"code": "queue_full"})
        return _result("matched", query)

    async def _hold(self) -> None:
        self.started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


def _result(status: str, text: str, *, error: bool = False, **more: Any) -> types.CallToolResult:
    return types.CallToolResult(
        content=[types.TextContent(type="text", text=text)],
        structured_content={"status": status, "echo": text, **more},
        is_error=error,
    )


@dataclass(frozen=True)
class Served:
    """Where a running server is."""

    url: str
    host: str
    port: int
    uds: Path
    ca: Path
    tool: EchoTool
    accounting: Accounting
    run: Callable[[Callable[[], Any]], Any]
    """Runs a function in the server's loop and returns its result."""


@contextmanager
def serving(
    pki: Pki,
    uds: Path,
    *,
    limits: ConnectionLimits | None = None,
    min_version: Any = "1.3",
    client_certs: Any = "none",
    handshake_timeout_s: float = 10.0,
    **app_options: Any,
) -> Iterator[Served]:
    """An `EchoTool` behind TLS and a Unix socket, in a thread of its own."""
    tool, accounting = EchoTool(), Accounting()
    app = create_app(tool, accounting=accounting, **app_options)
    tls = server_context(
        pki.server, pki.server_key, ca=pki.ca, client_certs=client_certs, min_version=min_version
    )
    options: dict[str, Any] = {"limits": limits or ConnectionLimits()}
    tcp = bind_tcp("127.0.0.1", 0, key="server.port")
    listeners = [
        Listener("tls", app, tcp, tls, handshake_timeout_s=handshake_timeout_s, **options),
        Listener("local", app, bind_unix(uds), **options),
    ]
    with in_thread(app, listeners) as loop:
        port = listeners[0].address[1]

        def run(function: Callable[[], Any]) -> Any:
            async def call() -> Any:
                return function()

            return asyncio.run_coroutine_threadsafe(call(), loop).result(WAIT_S)

        url = f"https://127.0.0.1:{port}/mcp"
        yield Served(url, "127.0.0.1", port, uds, pki.ca, tool, accounting, run)


@contextmanager
def in_thread(app: Starlette, listeners: list[Listener]) -> Iterator[asyncio.AbstractEventLoop]:
    """Listeners and their app's lifespan in a thread; the loop, once they accept connections."""
    up, loops, stops = threading.Event(), [], []

    async def main() -> None:
        stop = asyncio.Event()
        async with _started(app, listeners):
            loops.append(asyncio.get_running_loop())
            stops.append(stop)
            up.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: uvloop.run(main()))
    thread.start()
    assert up.wait(WAIT_S)
    try:
        yield loops[0]
    finally:
        loops[0].call_soon_threadsafe(stops[0].set)
        thread.join(WAIT_S)
        assert not thread.is_alive()


@asynccontextmanager
async def _started(app: Starlette, listeners: list[Listener]) -> AsyncIterator[None]:
    async with app.router.lifespan_context(app):
        running = Listeners(listeners)
        await running.start()
        try:
            yield
        finally:
            await running.stop(grace_s=1)
