"""Hundreds of MCP servers in one process, for the benchmark of a large catalogue.

    python -m benchmarks.many_servers --port N --servers 270 --slow 30 --slow-s 10

Server number n answers under `/mcp?server=n` by the official server, with 56 tools; the last `--slow` of
them take `--slow-s` before each list. `POST /change?server=n` gives one a tool more, or takes it away
again, and has it tell who listens.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import mcp_types as types
import uvicorn
from mcp.server.lowlevel import Server
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, ToolsListChanged
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

TOOLS = 56
VERBS = ("create", "list", "read", "update", "delete", "search", "export", "archive", "share", "count")
NOUNS = ("invoice", "ticket", "photo", "contact", "report", "meeting", "order", "branch", "recipe", "sensor")


def tools_of(number: int, extra: bool) -> list[types.Tool]:
    """The tools of one server: each definition occurs once among all servers."""
    made = [_tool(number, index) for index in range(TOOLS)]
    return [*made, _tool(number, TOOLS)] if extra else made


def _tool(number: int, index: int) -> types.Tool:
    verb, noun = VERBS[index % 10], NOUNS[(index // 10 + number) % 10]
    return types.Tool(
        name=f"{verb}_{noun}_{index}",
        description=f"{verb.title()} one {noun} or several in workspace {number}, by {NOUNS[number % 10]}",
        input_schema={
            "type": "object",
            "properties": {
                "id": {"type": "string", "description": f"Which {noun}"},
                "workspace": {"type": "integer", "default": number},
                "fields": {"type": "array", "items": {"type": "string"}},
                "options": {"type": "object", "properties": {"dry_run": {"type": "boolean"}}},
            },
            "required": ["id"],
        },
    )


class ManyServers:
    """All of them behind one `Server`, told apart by the query of the URL."""

    def __init__(self, servers: int, slow: int, slow_s: float) -> None:
        self._first_slow = servers - slow
        self._slow_s = slow_s
        self._changed: set[int] = set()
        self._buses = [InMemorySubscriptionBus() for _ in range(servers)]
        self._listens = [ListenHandler(bus) for bus in self._buses]

    def app(self) -> Any:
        server = Server("many", on_list_tools=self._list, on_subscriptions_listen=self._listen)
        change = Route("/change", self._change, methods=["POST"])
        return server.streamable_http_app(
            stateless_http=True, custom_starlette_routes=[change], max_sessions=None
        )

    async def _list(self, context: Any, params: Any) -> types.ListToolsResult:
        number = _number(context.request)
        if number >= self._first_slow:
            await asyncio.sleep(self._slow_s)
        return types.ListToolsResult(tools=tools_of(number, number in self._changed))

    async def _listen(self, context: Any, params: Any) -> Any:
        return await self._listens[_number(context.request)](context, params)

    async def _change(self, request: Request) -> Response:
        number = _number(request)
        self._changed ^= {number}
        await self._buses[number].publish(ToolsListChanged())
        return PlainTextResponse("changed")


def _number(request: Request) -> int:
    return int(request.query_params["server"])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many_servers")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--servers", type=int, default=270)
    parser.add_argument("--slow", type=int, default=30)
    parser.add_argument("--slow-s", type=float, default=10.0)
    options = parser.parse_args()
    app = ManyServers(options.servers, options.slow, options.slow_s).app()
    uvicorn.run(app, port=options.port, log_level="error", timeout_graceful_shutdown=1)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
