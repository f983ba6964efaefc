"""A tour of the live catalogue: published servers from one `mcp.json`, and what happens when they change.

    make demo-live        or        python -m benchmarks.demo_live [--stdio N] [--keep]

Needs the network, npx and uvx (`pip install uv`), and the default model. It starts `mcp-discovery serve`
over an `mcp.json` with published servers from npm and PyPI over stdio, three published ones over Streamable
HTTP and a small one of its own, and asks `discover_tools` over TLS. Each step prints what happened and
how long it took; the exit code is 1 where one fails. Calls that measure a change load the tool by its name,
which asks no model: their time is that of the catalogue.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client

from mcp_discovery.certificates import Pki, ensure
from mcp_discovery.transport.tls import client_context

ROOT = Path(__file__).resolve().parent.parent
MCP_JSON = ROOT / "benchmarks" / "data" / "demo-mcp.json"
LEAST_STDIO, LEAST_HTTP = 10, 3
BRING_UP_S = 420.0  # downloads included
FOUND_WITHIN_S = 2.0
STEP_S = 30.0  # after which a step has failed
TOKEN = "of-the-demonstration"  # for the server that asks for one; told through the environment
HTTP_SERVERS = {
    "context7-http": ("@upstash/context7-mcp@4.1.1", "context7-mcp", "--transport", "http"),
    "notion-http": (
        "@notionhq/notion-mcp-server@2.5.2",
        "notion-mcp-server",
        "--transport",
        "http",
        "--auth-token",
        TOKEN,
    ),
    "playwright-http": ("@playwright/mcp@0.0.83", "playwright-mcp"),
}
QUERIES = (
    "what time is it in Tokyo",
    "open a web page and take a screenshot",
    "run an SQL query on the analytics database",
    "store a new entity in the knowledge graph",
)


class StepFailed(Exception):
    """A step of the tour did not come out; the message is one sentence."""


def tool(name: str, description: str) -> dict[str, Any]:
    return {"name": name, "description": description, "inputSchema": {"type": "object", "properties": {}}}


class Tour:
    """The servers, the client and the steps."""

    def __init__(self, folder: Path, stdio: int | None) -> None:
        self._folder = folder
        self._state = folder / "tour.json"
        self._tools = [tool("count_sheep", "Count the sheep of a flock")]
        self._file = folder / "notes.jsonl"
        self._stdio = stdio
        self._ports = {name: _free_port() for name in HTTP_SERVERS}
        self.port, self.admin = _free_port(), _free_port()
        self._client: Client | None = None

    # --- what is served ---------------------------------------------------------------------------

    def write(self) -> Path:
        """The `mcp.json`, the tour server's state and a file of tools."""
        published = json.loads(MCP_JSON.read_text(encoding="utf-8"))["mcpServers"]
        usable = {name: entry for name, entry in published.items() if shutil.which(entry["command"])}
        servers: dict[str, Any] = dict(list(usable.items())[: self._stdio])
        for name, port in self._ports.items():
            servers[name] = {"type": "http", "url": f"http://localhost:{port}/mcp"}
        servers["notion-http"]["headers"] = {"Authorization": "Bearer ${DEMO_TOKEN}"}
        tour = [sys.executable, "-m", "benchmarks.tour_server", str(self._state)]
        servers["tour"] = {"command": tour[0], "args": tour[1:], "cwd": str(ROOT)}
        self._set_tour()
        self._file.write_text(json.dumps({"server": "notes", **tool("write_note", "Write a note")}) + "\n")
        path = self._folder / "mcp.json"
        path.write_text(json.dumps({"mcpServers": servers}, indent=2))
        return path

    def _set_tour(self, *, refuses: bool = False) -> None:
        self._state.write_text(json.dumps({"tools": self._tools, "refuses": refuses}))

    def _signal_tour(self, number: signal.Signals) -> None:
        os.kill(int(self._state.with_suffix(".pid").read_text()), number)

    @contextlib.contextmanager
    def http_servers(self) -> Iterator[None]:
        """Published servers over HTTP, as somebody else would run them."""
        started: list[subprocess.Popen[bytes]] = []
        try:
            for name, (package, program, *options) in HTTP_SERVERS.items():
                command = ["npx", "-y", "--package", package, "--", program, *options]
                with (self._folder / f"{name}.log").open("wb") as log:
                    started.append(
                        subprocess.Popen(
                            [*command, "--port", str(self._ports[name])],
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=subprocess.STDOUT,
                            env={**os.environ, "NOTION_TOKEN": "placeholder"},
                            start_new_session=True,
                        )
                    )
            yield
        finally:
            for process in started:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
            for process in started:
                process.wait()

    @contextlib.contextmanager
    def server(self, mcp_json: Path, pki: Pki) -> Iterator[subprocess.Popen[bytes]]:
        """`mcp-discovery serve` over all of it."""
        command = [sys.executable, "-m", "mcp_discovery", "serve", "--port", str(self.port)]
        command += ["--admin", f"127.0.0.1:{self.admin}"]
        command += ["--catalog", str(mcp_json), "--catalog", str(self._file)]
        environment = {
            **os.environ,
            "DEMO_TOKEN": TOKEN,
            "PYTHONPATH": str(ROOT),
            "MCP_DISCOVERY__TLS__CERT": str(pki.server),
            "MCP_DISCOVERY__TLS__KEY": str(pki.server_key),
            "MCP_DISCOVERY__TLS__CA": str(pki.ca),
        }
        with (self._folder / "serve.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=self._folder)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()

    # --- looking ----------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def connected(self, pki: Pki) -> Any:
        """A client of the server, from its readiness on."""
        took = await self.until("the server is ready", self._is_ready, BRING_UP_S, pause_s=0.5)
        print(f"ready after {took:.0f} s")
        url = f"https://127.0.0.1:{self.port}/mcp"
        async with (
            httpx2.AsyncClient(verify=client_context(pki.ca), timeout=60.0) as http,
            Client(streamable_http_client(url, http_client=http)) as client,
        ):
            self._client = client
            yield

    async def _is_ready(self) -> bool:
        return bool((await self.status()).get("ready"))

    async def status(self) -> dict[str, Any]:
        """The object of `/status.json`; {} while there is none."""

        def read() -> dict[str, Any]:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.admin}/status.json", timeout=10) as answer:
                value: dict[str, Any] = json.load(answer)
                return value

        try:
            return await asyncio.to_thread(read)
        except OSError:
            return {}

    async def ask(self, **arguments: Any) -> dict[str, Any]:
        """The structured result of one call."""
        assert self._client is not None
        arguments |= {"detail": "names", "timeout_ms": 60_000}
        result = await self._client.call_tool("discover_tools", arguments)
        found: dict[str, Any] = result.structured_content
        return found

    async def catalog(self) -> dict[str, Any]:
        """What an answer says of the catalogue."""
        found: dict[str, Any] = (await self.ask(names=["notes/write_note"]))["catalog"]
        return found

    async def finds(self, id: str) -> bool:
        return any(found["id"] == id for found in (await self.ask(names=[id]))["tools"])

    async def until(
        self, what: str, holds: Callable[[], Awaitable[bool]], within_s: float = STEP_S, pause_s: float = 0.02
    ) -> float:
        """Seconds until `holds`; raises StepFailed after `within_s`."""
        started = time.monotonic()
        while not await holds():
            if time.monotonic() - started > within_s:
                raise StepFailed(f"{what}: not within {within_s:g} s")
            await asyncio.sleep(pause_s)
        return time.monotonic() - started

    # --- the steps --------------------------------------------------------------------------------

    async def bring_up(self) -> None:
        """Published servers, enough of each kind, answer."""
        states: dict[str, dict[str, Any]] = {}

        async def enough() -> bool:
            nonlocal states
            catalogue = (await self.status()).get("catalogue", {})
            states = {state["server"]: state for state in catalogue.get("states", ())}
            waiting = [s for s in states.values() if "not answered" in s["error"]]
            return bool(states) and not waiting

        took = await self.until("every server has answered or failed", enough, BRING_UP_S, pause_s=1.0)
        for server, state in states.items():
            error = f"  {state['error']}" if state["error"] else ""
            print(f"    {server:22} {state['presence']:8} {state['tools']:4} tools{error}"[:150])
        listed = {server for server, state in states.items() if state["presence"] == "listed"}
        over_http = listed & HTTP_SERVERS.keys()
        over_stdio = listed - over_http - {"tour", "notes"}
        print(
            f"  {len(over_stdio)} published over stdio, {len(over_http)} over HTTP, after {took:.0f} s more"
        )
        least = LEAST_STDIO if self._stdio is None else min(LEAST_STDIO, self._stdio)
        if len(over_stdio) < least or len(over_http) < LEAST_HTTP:
            raise StepFailed(f"{least} over stdio and {LEAST_HTTP} over HTTP were wanted")

    async def discover(self) -> None:
        """Answers come over all of them."""
        for query in QUERIES:
            started = time.monotonic()
            result = await self.ask(query=query, limit=3)
            took = time.monotonic() - started
            found = ", ".join(found["id"] for found in result["tools"]) or result["note"]
            print(f"    {query!r}: {found} ({took:.1f} s)")
            if result["status"] not in ("matched", "partial", "no_match"):
                raise StepFailed(f"a call was answered with {result['status']}")

    async def add_tool(self) -> None:
        """The tour server adds a tool and says so."""
        self._tools.append(tool("shear_sheep", "Shear one sheep of the flock"))
        self._set_tour()
        before = (await self.catalog())["revision"]
        self._signal_tour(signal.SIGUSR1)
        took = await self.until("the new tool is found", lambda: self.finds("tour/shear_sheep"))
        after = (await self.catalog())["revision"]
        print(f"  found {took:.2f} s after list_changed; revision {before[7:15]} -> {after[7:15]}")
        if took > FOUND_WITHIN_S:
            raise StepFailed(f"it took longer than {FOUND_WITHIN_S:g} s")

    async def kill(self) -> None:
        """The tour server is killed and does not start again; its tools stay, marked."""

        async def marked() -> bool:
            return "tour" in (await self.catalog())["servers_stale"]

        self._set_tour(refuses=True)
        self._signal_tour(signal.SIGKILL)
        took = await self.until("its tools are marked", marked)
        if not await self.finds("tour/count_sheep"):
            raise StepFailed("its last known tools are gone")
        print(f"  in servers_stale {took:.2f} s after SIGKILL; tour/count_sheep is still found")

    async def come_back(self) -> None:
        """It can be started again, and is."""

        async def unmarked() -> bool:
            return "tour" not in (await self.catalog())["servers_stale"]

        self._tools = [tool("feed_sheep", "Feed the sheep of a flock")]
        self._set_tour()
        took = await self.until("it is back", unmarked, within_s=90.0)
        if not await self.finds("tour/feed_sheep") or await self.finds("tour/count_sheep"):
            raise StepFailed("its new list is not the one that is served")
        print(f"  back {took:.2f} s after it could start again, with its new list")

    async def edit(self) -> None:
        """A file of tools is edited."""
        with self._file.open("a") as file:
            file.write(json.dumps({"server": "notes", **tool("burn_note", "Burn a note")}) + "\n")
        took = await self.until("the new line is found", lambda: self.finds("notes/burn_note"))
        print(f"  found {took:.2f} s after the file was written")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def descendants(parent: int) -> set[int]:
    """Process ids below `parent`, from /proc; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            of = int(entry.read_text().rpartition(")")[2].split()[1])
            children.setdefault(of, []).append(int(entry.parent.name))
    found: set[int] = set()
    waiting = [parent]
    while waiting:
        below = children.get(waiting.pop(), [])
        found.update(below)
        waiting += below
    return found


async def walk(tour: Tour, pki: Pki) -> None:
    """All steps; raises StepFailed at the first that does not come out."""
    steps: Sequence[tuple[str, Callable[[], Awaitable[None]]]] = (
        ("bring up published servers from one mcp.json", tour.bring_up),
        ("discover over all of them", tour.discover),
        ("a server adds a tool and sends list_changed", tour.add_tool),
        ("a server is killed", tour.kill),
        ("it comes back", tour.come_back),
        ("a file is edited", tour.edit),
    )
    async with tour.connected(pki):
        for number, (title, step) in enumerate(steps, start=1):
            started = time.monotonic()
            print(f"{number}. {title}", flush=True)
            await step()
            print(f"  ok, {time.monotonic() - started:.1f} s", flush=True)


def run(folder: Path, stdio: int | None) -> None:
    tour = Tour(folder, stdio)
    pki = Pki(folder / "certs")
    ensure(pki)
    mcp_json = tour.write()
    with tour.http_servers():
        with tour.server(mcp_json, pki) as process:
            asyncio.run(walk(tour, pki))
            below = descendants(process.pid)
            started = time.monotonic()
        print(f"7. the server is stopped\n  ended in {time.monotonic() - started:.1f} s", flush=True)
        left = [pid for pid in below if Path(f"/proc/{pid}").exists()]
        if left:
            raise StepFailed(f"{len(left)} of {len(below)} processes are left")
        print(f"  ok, none of its {len(below)} processes is left")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo_live")
    parser.add_argument("--stdio", type=int, metavar="N", help="only the first N published stdio servers")
    parser.add_argument("--keep", action="store_true", help="keep the folder with the logs")
    options = parser.parse_args(argv)
    if shutil.which("npx") is None:
        print("demo-live: npx is not on the PATH; install Node.js", file=sys.stderr)
        return 2
    failed = False
    folder = Path(tempfile.mkdtemp(prefix="demo-live-"))
    try:
        run(folder, options.stdio)
    except* StepFailed as group:  # it crossed the client's task groups
        print(f"failed: {_first(group)}", file=sys.stderr)
        failed = True
    finally:
        if options.keep:
            print(f"logs are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return 1 if failed else 0


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


if __name__ == "__main__":
    raise SystemExit(main())
