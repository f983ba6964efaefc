"""What tests of live sources share: servers of a known state, and a look at the catalogues that come."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from mcp_discovery.discovery.catalogue import Catalogue, Presence, ServerState
from mcp_discovery.discovery.live import Sources
from mcp_discovery.discovery.sources.server import Timing

PATIENCE_S = 30.0  # for what must come; nothing waits for it unless it fails
QUICK = Timing(
    connect_timeout_s=20.0, list_timeout_s=20.0, settle_s=0.01, first_delay_s=0.05, longest_delay_s=0.1
)
SERVER = Path(__file__).parent / "stdio_server.py"


def definition(name: str, description: str = "Does something", **extra: Any) -> dict[str, Any]:
    return {"name": name, "description": description, "inputSchema": {"type": "object"}, **extra}


class StdioServer:
    """The state of one `stdio_server.py`, and the process that serves it."""

    def __init__(self, folder: Path, name: str, tools: Sequence[Any] = (), **state: Any) -> None:
        self.name = name
        self.path = folder / f"{name}.state"
        self.set(tools, **state)

    def set(self, tools: Sequence[Any], **state: Any) -> None:
        self.path.write_text(json.dumps({"tools": list(tools), **state}))

    @property
    def entry(self) -> dict[str, Any]:
        return {"command": sys.executable, "args": ["-S", "-E", str(SERVER), str(self.path)]}

    @property
    def pid(self) -> int:
        return int(self.path.with_suffix(".pid").read_text())

    def tell(self) -> None:
        """Has it say that its tools have changed."""
        os.kill(self.pid, signal.SIGUSR1)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def mcp_json(folder: Path, servers: dict[str, Any]) -> Path:
    path = folder / "mcp.json"
    path.write_text(json.dumps({"mcpServers": servers}))
    return path


class Seen:
    """The catalogues that came, and a way to wait for one."""

    def __init__(self, sources: Any) -> None:
        self.sources: Any = sources
        self.catalogues: list[Catalogue] = [sources.load()]
        self._came = asyncio.Event()

    def __call__(self, catalogue: Catalogue) -> None:
        self.catalogues.append(catalogue)
        self._came.set()

    @property
    def last(self) -> Catalogue:
        return self.catalogues[-1]

    async def until(self, holds: Callable[[Catalogue], bool]) -> Catalogue:
        """The first catalogue from the present one on of which `holds` is true."""
        with anyio.fail_after(PATIENCE_S):
            while not holds(self.last):
                self._came.clear()
                await self._came.wait()
        return self.last

    async def until_ids(self, *ids: str) -> Catalogue:
        return await self.until(lambda catalogue: ids_of(catalogue) == list(ids))

    async def until_presence(self, server: str, presence: Presence) -> ServerState:
        found = await self.until(lambda catalogue: state_of(catalogue, server).presence == presence)
        return state_of(found, server)


def ids_of(catalogue: Catalogue) -> list[str]:
    return [tool.id for tool in catalogue.tools]


def state_of(catalogue: Catalogue, server: str) -> ServerState:
    (state,) = (state for state in catalogue.states if state.server == server)
    return state


@asynccontextmanager
async def following(
    paths: Sequence[Path], urls: Sequence[str] = (), *, timing: Timing = QUICK, **options: Any
) -> AsyncIterator[Seen]:
    """Sources that run, with quick reactions, for as long as the block."""
    sources = Sources(paths, urls, timing=timing, watch_s=0.02, **options)
    seen = Seen(sources)
    async with anyio.create_task_group() as group:
        group.start_soon(sources.run, seen)
        try:
            yield seen
        finally:
            group.cancel_scope.cancel()


def is_alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat")
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"
    return False
