"""A Streamable HTTP server for tests, by the official server, in the test's own event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import mcp_types as types
import uvicorn
from mcp.server.lowlevel import Server
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, ToolsListChanged
from starlette.types import ASGIApp, Receive, Scope, Send


class HttpServer:
    """`tools` may be changed at any time; `tell` says so to who listens. `token` None lets everyone in."""

    def __init__(self, tools: Sequence[dict[str, Any]], token: str | None = None) -> None:
        self.tools = list(tools)
        self.token = token
        self.listed = 0
        self._bus = InMemorySubscriptionBus()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/mcp"

    async def tell(self) -> None:
        await self._bus.publish(ToolsListChanged())

    @asynccontextmanager
    async def running(self) -> AsyncIterator[HttpServer]:
        server = Server("test", on_list_tools=self._list, on_subscriptions_listen=ListenHandler(self._bus))
        app = self._guarded(server.streamable_http_app())
        config = uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1, lifespan="on")
        listening = uvicorn.Server(config)
        task = asyncio.create_task(listening.serve(sockets=[self._socket]))
        try:
            yield self
        finally:
            listening.should_exit = True
            await task

    async def _list(self, context: Any, params: Any) -> types.ListToolsResult:
        self.listed += 1
        return types.ListToolsResult(tools=[types.Tool.model_validate(tool) for tool in self.tools])

    def _guarded(self, app: ASGIApp) -> ASGIApp:
        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            given = dict(scope.get("headers", ())).get(b"authorization", b"").decode()
            if scope["type"] != "http" or self.token is None or given == f"Bearer {self.token}":
                await app(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": f"no: {given}".encode()})

        return guarded
