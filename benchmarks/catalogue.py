"""A large live catalogue: how soon it can be searched, and what a refresh of one server costs the others.

    python -m benchmarks.catalogue [--servers 300] [--seconds 30] [--out FILE]

300 servers with 56 tools each by default, spoken to by Streamable HTTP: of ten one is dead (half of those
refuse, half never answer) and one takes 10 s to list. All that live are in one process of the machine that
is measured. `mcp-discovery serve` is started over them with an empty cache; a client then calls at a fixed
rate over TLS, while nothing changes and, in turn, while one server gains or loses a tool every second. The
calls load tools by name, which asks no model, and the engine is idle (no adapter, few pages), so that
nothing hides what the catalogue costs; each is timed from when it was due.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client

from benchmarks.many_servers import NOUNS, TOOLS
from benchmarks.report import Target, write
from mcp_discovery import model_store
from mcp_discovery.certificates import Pki, ensure
from mcp_discovery.transport.tls import client_context

ROOT = Path(__file__).resolve().parent.parent
READY_S = 300.0
RATE = 20.0  # calls a second
ROUNDS = 4  # of each state, in turn
CALM_S = 10  # without progress of a warm-up, before it counts as ended
CHANGE_S = 1.0  # between two changes of one server


class Large:
    """The servers, and `mcp-discovery serve` over them."""

    def __init__(self, folder: Path, servers: int) -> None:
        self._folder = folder
        self.dead = servers // 10
        self.slow = servers // 10
        self.live = servers - self.dead
        self.port, self.admin, self.many = (_free_port() for _ in range(3))
        self._mute = socket.create_server(("127.0.0.1", 0))  # takes connections and never answers

    @property
    def tools(self) -> int:
        return self.live * TOOLS

    def name(self, number: int) -> str:
        return f"server{number:03}"

    def mcp_json(self) -> Path:
        """The dead ones first: they would delay the others if anything could."""
        mute, refusing = self._mute.getsockname()[1], _free_port()
        urls = [
            f"http://127.0.0.1:{mute if number % 2 else refusing}/mcp?server={number}"
            for number in range(self.dead)
        ]
        servers = {f"dead{number:03}": {"url": url} for number, url in enumerate(urls)}
        slow_first = [*range(self.live - self.slow, self.live), *range(self.live - self.slow)]
        for number in slow_first:
            servers[self.name(number)] = {"url": f"http://127.0.0.1:{self.many}/mcp?server={number}"}
        path = self._folder / "mcp.json"
        path.write_text(json.dumps({"mcpServers": servers}))
        return path

    @contextlib.contextmanager
    def running(self, pki: Pki) -> Iterator[None]:
        module = [sys.executable, "-m"]
        many = [*module, "benchmarks.many_servers", "--port", str(self.many), "--servers", str(self.live)]
        many += ["--slow", str(self.slow)]
        serve = [
            *module,
            "mcp_discovery",
            "serve",
            "--port",
            str(self.port),
            "--catalog",
            str(self.mcp_json()),
        ]
        serve += ["--admin", f"127.0.0.1:{self.admin}", "--model", str(model_store.locate())]
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "XDG_CACHE_HOME": str(self._folder / "cache"),
            "MCP_DISCOVERY__ENGINE__ADAPTER": "none",
            "MCP_DISCOVERY__ENGINE__MAX_PAGES": "256",
            "MCP_DISCOVERY__TLS__CERT": str(pki.server),
            "MCP_DISCOVERY__TLS__KEY": str(pki.server_key),
            "MCP_DISCOVERY__TLS__CA": str(pki.ca),
        }
        started = []
        with (self._folder / "log").open("wb") as log:
            try:
                started.append(subprocess.Popen(many, stdout=log, stderr=log, cwd=ROOT))
                _until_open(self.many)
                started.append(
                    subprocess.Popen(serve, stdout=log, stderr=log, cwd=self._folder, env=environment)
                )
                yield
            finally:
                for process in reversed(started):
                    process.send_signal(signal.SIGTERM)
                    process.wait()

    def status(self) -> dict[str, Any]:
        """The object of `/status.json`; {} while there is none."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.admin}/status.json", timeout=10) as answer:
                value: dict[str, Any] = json.load(answer)
                return value
        except OSError:
            return {}

    def change(self, number: int) -> None:
        """One server gains a tool, or loses it again."""
        url = f"http://127.0.0.1:{self.many}/change?server={number}"
        with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=10):
            pass


async def until_listed(large: Large) -> dict[str, Any]:
    """Seconds from the start until the fast servers' tools, and until all, can be found."""
    started = time.monotonic()
    fast = (large.live - large.slow) * TOOLS
    times: dict[str, Any] = {}
    while "all_s" not in times:
        if time.monotonic() - started > READY_S:
            raise SystemExit(f"not all tools were listed within {READY_S:g} s: {large.status()['catalogue']}")
        catalogue = (await asyncio.to_thread(large.status)).get("catalogue", {})
        known = sum(catalogue.get("servers", {}).values())
        for key, wanted in (("fast_s", fast), ("all_s", large.tools)):
            if known >= wanted and key not in times:
                times[key] = round(time.monotonic() - started, 1)
        await asyncio.sleep(0.25)
    return times


async def call_steadily(client: Client, names: Sequence[str], seconds: float) -> list[float]:
    """Milliseconds of each call, from when it was due; calls do not wait for one another."""
    took: list[float] = []
    revisions: set[str] = set()

    async def call(due: float, name: str) -> None:
        result = await client.call_tool("discover_tools", {"names": [name]})
        took.append((time.monotonic() - due) * 1000.0)
        body = result.structured_content
        if body["status"] != "matched":
            raise SystemExit(f"a call for {name} was answered with {body['status']}")
        revisions.add(body["catalog"]["revision"])

    started = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number in range(int(seconds * RATE)):
            due = started + number / RATE
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            group.create_task(call(due, names[number % len(names)]))
    took.sort()
    print(
        f"  {len(took)} calls saw {len(revisions)} revisions, p50 {at(took, 50)} ms, p99 {at(took, 99)} ms",
        flush=True,
    )
    return took


def at(took: Sequence[float], share: int) -> float:
    """The quantile of sorted milliseconds, in percent."""
    return round(took[min(len(took) - 1, len(took) * share // 100)], 2)


async def change_steadily(large: Large) -> None:
    while True:
        await asyncio.to_thread(large.change, 0)
        await asyncio.sleep(CHANGE_S)


async def measure(large: Large, pki: Pki, seconds: float) -> dict[str, Any]:
    found = await until_listed(large)
    print(f"  searchable: fast servers after {found['fast_s']} s, all after {found['all_s']} s", flush=True)
    shown = [""] * 2 * CALM_S
    while not shown[0].startswith(("done", "stopped")) or len(set(shown)) > 1:
        await asyncio.sleep(0.5)
        shown = [*shown[1:], str((await asyncio.to_thread(large.status)).get("warm_up", ""))]
    print(f"  warm-up: {shown[0]}", flush=True)
    url = f"https://127.0.0.1:{large.port}/mcp"
    names = [f"{large.name(number)}/create_{NOUNS[number % 10]}_0" for number in range(1, large.live, 7)]
    async with (
        httpx2.AsyncClient(verify=client_context(pki.ca), timeout=60.0) as http,
        Client(streamable_http_client(url, http_client=http)) as client,
    ):
        await call_steadily(client, names, 5.0)
        rounds: dict[str, list[float]] = {"quiet": [], "refreshing": []}
        for _ in range(ROUNDS):
            rounds["quiet"] += await call_steadily(client, names, seconds / ROUNDS)
            changing = asyncio.create_task(change_steadily(large))
            rounds["refreshing"] += await call_steadily(client, names, seconds / ROUNDS)
            changing.cancel()
    for kind, took in rounds.items():
        took.sort()
        found[kind] = {"calls": len(took)} | {f"p{share}_ms": at(took, share) for share in (50, 95, 99)}
    found["p99_ratio"] = round(found["refreshing"]["p99_ms"] / found["quiet"]["p99_ms"], 3)
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _until_open(port: int) -> None:
    deadline = time.monotonic() + 30.0
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.catalogue")
    parser.add_argument("--servers", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=30.0, help="of calls in each state")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the numbers here as JSON")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="large-catalogue-") as folder:
        pki = Pki(Path(folder) / "certs")
        ensure(pki)
        large = Large(Path(folder), options.servers)
        print(
            f"{options.servers} servers, {large.tools:,} tools, {large.dead} dead, {large.slow} slow",
            flush=True,
        )
        with large.running(pki):
            found = asyncio.run(measure(large, pki, options.seconds))
    found |= {"servers": options.servers, "tools": large.tools, "dead": large.dead, "slow": large.slow}
    print(json.dumps(found, indent=2))
    targets = [
        Target("catalogue.ready_lexically_s", found["all_s"], "at most"),
        Target("catalogue.refresh_p99_increase", round(found["p99_ratio"] - 1.0, 3), "at most"),
    ]
    write("catalogue", found, targets, out=options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
