"""Calls over TLS and MCP through one, two and four front-ends, the engine being a stub and being real.

    python -m benchmarks.frontends [--seconds 3] [--rounds 5] [--connections 64] [--frontends 1,2,4] [--real]

Each row starts a server of its own and is measured in several rounds, of which the best one counts: that
in which others on the machine disturbed it least. The rates of all rounds are told too. Clients run in
processes of their own, one call at a time on each connection. CPU seconds are those of the server's
processes, from /proc; where clients and server share the cores, that figure says more than the rate:
`calls_per_s_per_core` is what a core does of the server's work alone.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import multiprocessing
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.ladder.host import thread_seconds, tree
from benchmarks.ladder.wire import Client, Endpoint, connect
from benchmarks.report import Target, write
from benchmarks.serving import Server, serving
from mcp_discovery import model_store

WARM_UP_S = 1.0
QUERIES = 512  # different ones, so that nothing is answered from a habit


@dataclass(frozen=True, slots=True)
class Row:
    """One server's measurements; `drivers` are its client processes."""

    frontends: int
    seconds: float  # a round
    rounds: int
    connections: int
    drivers: int


class Load:
    """A closed loop on each connection of one client process."""

    def __init__(self, requests: Sequence[bytes]) -> None:
        self._requests = itertools.cycle(requests)
        self.latencies: list[float] = []
        self.statuses: Counter[str] = Counter()
        self.counting = False
        self.lost_why = ""

    def ask(self, client: Client) -> None:
        client.ask(next(self._requests))

    def answered(self, client: Client, ok: bool, body: bytes) -> None:
        if self.counting:
            self.latencies.append(time.monotonic() - client.sent)
            self.statuses[_status(ok, body)] += 1
        self.ask(client)

    def lost(self, client: Client, reason: str) -> None:
        self.lost_why = reason


def _status(ok: bool, body: bytes) -> str:
    """The status of a result, without reading all of it."""
    at = body.find(b'"status":"') + 10
    return body[at : body.find(b'"', at)].decode() if ok and at >= 10 else "no result"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--drivers", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--frontends", default="1,2,4", help="numbers of front-ends, by commas")
    parser.add_argument("--real", action="store_true", help="also with the engine, on a CPU")
    parser.add_argument("--real-connections", type=int, default=4)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = [
        Row(int(count), arguments.seconds, arguments.rounds, arguments.connections, arguments.drivers)
        for count in arguments.frontends.split(",")
    ]
    results: dict[str, Any] = {"stubbed": {str(row.frontends): _stubbed(row) for row in rows}}
    if arguments.real:
        real = [replace(row, connections=arguments.real_connections, drivers=1) for row in rows]
        results["real_on_cpu"] = {str(row.frontends): _real(row) for row in real}
    write("frontends", results, _targets(results["stubbed"]), out=arguments.out)


def _targets(stubbed: dict[str, Any]) -> list[Target]:
    one = stubbed.get("1")
    if one is None:
        return []
    targets = [Target("transport.server_cpu_us_per_call", one["server_cpu_us_per_call"], "at most")]
    for count, key in (("2", "two_frontends_ratio_2_cores"), ("4", "four_frontends_ratio")):
        if count in stubbed:
            ratio = stubbed[count]["calls_per_s"] / one["calls_per_s"]
            targets.append(Target(f"transport.{key}", ratio, "at least"))
    return targets


def _stubbed(row: Row) -> dict[str, Any]:
    """With a cache of its own: what a stub says of tools must not be taken for their vectors later."""
    model = model_store.fetch()
    with tempfile.TemporaryDirectory() as folder:
        settings = {"SERVER__FRONTENDS": row.frontends, "ENGINE__DEVICE": "cpu", "ENGINE__MODEL": model}
        settings |= {"DISCOVERY__CANDIDATES": 32}
        environment = {"XDG_CACHE_HOME": folder}
        with serving(Path(folder), settings, "benchmarks.stubbed", environment=environment) as server:
            return _row(row, server)


def _real(row: Row) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        settings = {"SERVER__FRONTENDS": row.frontends, "ENGINE__DEVICE": "cpu"}
        with serving(Path(folder), settings) as server:
            return _row(row, server)


def _row(row: Row, server: Server) -> dict[str, Any]:
    server.await_warm()
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for number in range(row.drivers):
        here, there = context.Pipe()
        share = row.connections // row.drivers + (number < row.connections % row.drivers)
        processes.append(
            context.Process(target=_drive, args=(there, server, share, row.seconds), daemon=True)
        )
        processes[-1].start()
        pipes.append(here)
    for pipe in pipes:
        pipe.recv()  # connected and warm
    rounds = [_round(row, server, pipes) for _ in range(row.rounds)]
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send("end")
        process.join()
    best = max(rounds, key=lambda each: each["calls_per_s"])
    return {**best, "calls_per_s_of_rounds": [each["calls_per_s"] for each in rounds]}


def _round(row: Row, server: Server, pipes: Sequence[Connection]) -> dict[str, Any]:
    before = thread_seconds(tree(server.pid))
    for pipe in pipes:
        pipe.send("go")
    found = [pipe.recv() for pipe in pipes]
    return _summary(row, found, before, thread_seconds(tree(server.pid)))


def _summary(
    row: Row,
    found: Sequence[tuple[list[float], Counter[str], float, str]],
    before: dict[str, float],
    after: dict[str, float],
) -> dict[str, Any]:
    latencies = [latency for part, _, _, _ in found for latency in part]
    lost = [why for _, _, _, why in found if why]
    if lost or len(latencies) < 2:
        raise SystemExit(f"the server ended a connection: {lost or 'no call was answered'}")
    used: dict[str, float] = {}
    for thread, seconds in after.items():
        process = thread.partition("/")[0]
        used[process] = used.get(process, 0.0) + seconds - before.get(thread, 0.0)
    calls, cpu_s = len(latencies), sum(used.values())
    return {
        "connections": row.connections,
        "client_processes": row.drivers,
        "calls": calls,
        "statuses": dict(sum((statuses for _, statuses, _, _ in found), Counter())),
        "calls_per_s": round(calls / row.seconds, 1),
        "p50_ms": round(1000 * statistics.median(latencies), 2),
        "p99_ms": round(1000 * statistics.quantiles(latencies, n=100)[98], 2),
        "server_cpu_us_per_call": round(1e6 * cpu_s / calls, 1),
        "server_cpu_us_per_call_by_process": [round(1e6 * seconds / calls, 1) for seconds in used.values()],
        "calls_per_s_per_core": round(calls / cpu_s),
        "client_cpu_us_per_call": round(1e6 * sum(cpu for _, _, cpu, _ in found) / calls, 1),
    }


def _drive(orders: Connection, server: Server, connections: int, seconds: float) -> None:
    """One client process: connects and warms up, says so, counts a round at each `go`, closes at `end`."""
    endpoint = Endpoint(server.host, server.port, "/mcp", server.ca)
    words = ("read a file", "send a message", "list issues", "search the web", "convert a currency")
    requests = [endpoint.call({"query": f"{words[n % 5]} about topic {n}"}) for n in range(QUERIES)]

    async def drive() -> None:
        load, context = Load(requests), endpoint.context()
        clients = [await connect(endpoint, context) for _ in range(connections)]
        gc.freeze()
        for client in clients:
            client.owner = load
            load.ask(client)
        await asyncio.sleep(WARM_UP_S)
        orders.send("ready")
        while await asyncio.to_thread(orders.recv) == "go":
            load.latencies, load.statuses = [], Counter()
            cpu, load.counting = time.process_time(), True
            await asyncio.sleep(seconds)
            load.counting = False
            orders.send((load.latencies, load.statuses, time.process_time() - cpu, load.lost_why))
        for client in clients:
            client.close()

    uvloop.run(drive())


if __name__ == "__main__":
    main()
