"""A small MCP server whose tools are told from outside, for the demonstration of a live catalogue.

    python -m benchmarks.tour_server STATE

serves over stdio the tools that the JSON file STATE lists, and on SIGUSR1 tells its client that they
have changed. Where STATE says `"refuses": true` it ends at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import mcp_types as types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, ToolsListChanged


async def serve(state: Path) -> None:
    """Until its client has gone."""
    bus = InMemorySubscriptionBus()

    async def tools(context: Any, params: Any) -> types.ListToolsResult:
        listed = json.loads(state.read_text(encoding="utf-8"))["tools"]
        return types.ListToolsResult(tools=[types.Tool.model_validate(tool) for tool in listed])

    server = Server("tour", on_list_tools=tools, on_subscriptions_listen=ListenHandler(bus))
    loop = asyncio.get_running_loop()
    telling: set[asyncio.Task[None]] = set()

    def tell() -> None:
        task = loop.create_task(bus.publish(ToolsListChanged()))
        telling.add(task)
        task.add_done_callback(telling.discard)

    loop.add_signal_handler(signal.SIGUSR1, tell)
    state.with_suffix(".pid").write_text(str(os.getpid()))
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


def main() -> int:
    state = Path(sys.argv[1])
    if json.loads(state.read_text(encoding="utf-8")).get("refuses"):
        print("the tour server is told to refuse", file=sys.stderr)
        return 1
    asyncio.run(serve(state))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
