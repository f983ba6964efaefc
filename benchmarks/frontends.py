"""Calls over TLS and MCP through one, two and more front-ends, the engine being a stub and being real.

    python -m benchmarks.frontends [--engines stub real] [--frontends 1,2,4] [--connections 64]
                                   [--seconds 3] [--rounds 5] [--drivers N] [--device cpu] [--model FILE]

Each row starts a server of its own and is measured in several rounds, of which the best one counts: that
in which others on the machine disturbed it least. The rates of all rounds are told too. Clients run in
processes of their own, one call at a time on each connection; how busy the busiest of them was says
whether they were the limit. CPU seconds are those of the server's processes, from /proc; where clients and
server share the cores, that figure says more than the rate: `calls_per_s_per_core` is what a core does of
the server's work alone.

With the real engine a row `alone` comes first: the very requests that the calls make of the engine, made
in its own process, as many outstanding as there are connections later.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop

from benchmarks import rank_alone
from benchmarks.ladder.host import thread_seconds, tree
from benchmarks.ladder.queries import QUERIES, read
from benchmarks.ladder.wire import Client, Endpoint, connect
from benchmarks.report import Target, write
from benchmarks.serving import Server, serving
from mcp_discovery import model_store

WARM_UP_S = 1.0
ANSWERED = ("matched", "no_match", "partial")


@dataclass(frozen=True, slots=True)
class Clients:
    """What clients do at a server; `drivers` are their processes."""

    queries: Sequence[str]
    connections: int
    drivers: int
    seconds: float  # a round
    rounds: int


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


@dataclass(frozen=True, slots=True)
class Part:
    """What one client process saw in a round."""

    latencies: list[float]
    statuses: Counter[str]
    cpu_s: float
    lost_why: str


def _status(ok: bool, body: bytes) -> str:
    """The status of a result, without reading all of it."""
    at = body.find(b'"status":"') + 10
    return body[at : body.find(b'"', at)].decode() if ok and at >= 10 else "no result"


def main() -> None:
    given = _arguments()
    queries = read(QUERIES)[: given.queries]
    counts = [int(count) for count in given.frontends.split(",")]
    model = given.model or model_store.fetch()
    results: dict[str, Any] = {}
    if "stub" in given.engines:
        clients = Clients(queries, given.connections, given.drivers, given.seconds, given.rounds)
        results["stubbed"] = {str(count): _stubbed(count, clients, model) for count in counts}
    if "real" in given.engines:
        connections = given.real_connections or given.connections
        asked, alone = _alone(given.device, str(model), queries, connections, given.seconds)
        results["real"] = {"alone": alone}
        clients = Clients(asked, connections, given.drivers, given.seconds, given.rounds)
        for count in counts:
            row = _real(count, clients, given.device, model)
            share = round(row["calls_per_s"] / alone["requests_per_s"], 4)
            results["real"][str(count)] = {**row, "share_of_alone": share}
    write("frontends", results, _targets(results, given.device), out=given.out)
    print("\n".join(_table(results)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=("stub", "real"), default=["stub"])
    parser.add_argument("--frontends", default="1,2,4", help="numbers of front-ends, by commas")
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--real-connections", type=int, help="with the real engine; default: --connections")
    parser.add_argument("--queries", type=int, default=512, help="different ones")
    parser.add_argument("--drivers", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--seconds", type=float, default=3.0, help="a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the real engine")
    parser.add_argument("--model", type=Path, help="default: the one that `serve` takes")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def _targets(results: Mapping[str, Any], device: str) -> list[Target]:
    """Those that this machine can tell of."""
    targets = []
    if one := results.get("stubbed", {}).get("1"):
        targets.append(Target("transport.server_cpu_us_per_call", one["server_cpu_us_per_call"], "at most"))
        targets.append(Target("transport.calls_per_s_per_core", one["calls_per_s_per_core"], "at least"))
        cores = len(os.sched_getaffinity(0))
        for count, key, fits in (
            ("2", "two_frontends_ratio_2_cores", cores == 2),
            ("4", "four_frontends_ratio", cores >= 16),
        ):
            if fits and count in results["stubbed"]:
                ratio = results["stubbed"][count]["calls_per_s"] / one["calls_per_s"]
                targets.append(Target(f"transport.{key}", ratio, "at least"))
    if "real" in results and device == "cuda":
        best = max(row["share_of_alone"] for count, row in results["real"].items() if count != "alone")
        targets.append(Target("transport.score_rate_of_engine_alone", best, "at least"))
    return targets


def _table(results: Mapping[str, Any]) -> list[str]:
    lines = ["engine   front-ends  calls/s   x one  p50 ms  p99 ms  CPU us a call  busiest client"]
    for engine, rows in results.items():
        if "alone" in rows:
            alone = rows["alone"]
            lines.append(
                f"{engine:8} {'alone':>10} {alone['requests_per_s']:8} {'':7} {alone['p50_ms']:7} "
                f"{alone['p99_ms']:7} {alone['cpu_us_per_request']:14}"
            )
        first = next(row for count, row in rows.items() if count != "alone")
        for count, row in rows.items():
            if count != "alone":
                lines.append(
                    f"{engine:8} {count:>10} {row['calls_per_s']:8} "
                    f"{row['calls_per_s'] / first['calls_per_s']:7.2f} {row['p50_ms']:7} {row['p99_ms']:7} "
                    f"{row['server_cpu_us_per_call']:14} {row['client_busiest_share']:15.0%}"
                )
    return lines


def _alone(
    device: str, model: str, queries: Sequence[str], outstanding: int, seconds: float
) -> tuple[list[str], dict[str, Any]]:
    """The queries that ask the engine, and what it does of their requests with nobody in between."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    asking = (there, device, model, queries, outstanding, seconds)
    process = context.Process(target=rank_alone.measure, args=asking, daemon=True)
    process.start()
    there.close()
    try:
        asked, alone = here.recv()
    except EOFError:
        raise SystemExit("the engine alone was not measured; its process says why above") from None
    process.join()
    return asked, alone


def _stubbed(frontends: int, clients: Clients, model: Path) -> dict[str, Any]:
    with stubbed_server(frontends, model) as server:
        return _row(clients, server)


@contextmanager
def stubbed_server(frontends: int, model: Path) -> Iterator[Server]:
    """With a cache of its own: what a stub says of tools must not be taken for their vectors later."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"SERVER__FRONTENDS": frontends, "ENGINE__DEVICE": "cpu", "ENGINE__MODEL": model}
        settings |= {"DISCOVERY__CANDIDATES": 32}
        environment = {"XDG_CACHE_HOME": folder}
        with serving(Path(folder), settings, "benchmarks.stubbed", environment=environment) as server:
            yield server


def _real(frontends: int, clients: Clients, device: str, model: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        settings = {"SERVER__FRONTENDS": frontends, "ENGINE__DEVICE": device, "ENGINE__MODEL": model}
        with serving(Path(folder), settings) as server:
            return _row(clients, server)


def _row(clients: Clients, server: Server) -> dict[str, Any]:
    server.await_warm()
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for number in range(clients.drivers):
        here, there = context.Pipe()
        processes.append(context.Process(target=drive, args=(there, server, clients, number), daemon=True))
        processes[-1].start()
        pipes.append(here)
    for pipe in pipes:
        pipe.recv()  # connected and warm
    rounds = [_round(clients, server, pipes) for _ in range(clients.rounds)]
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send("end")
        process.join()
    best = max(rounds, key=lambda each: each["calls_per_s"])
    return {**best, "calls_per_s_of_rounds": [each["calls_per_s"] for each in rounds]}


def _round(clients: Clients, server: Server, pipes: Sequence[Connection]) -> dict[str, Any]:
    before = thread_seconds(tree(server.pid))
    for pipe in pipes:
        pipe.send("go")
    parts = [pipe.recv() for pipe in pipes]
    return _summary(clients, parts, before, thread_seconds(tree(server.pid)))


def _summary(
    clients: Clients, parts: Sequence[Part], before: Mapping[str, float], after: Mapping[str, float]
) -> dict[str, Any]:
    latencies = [latency for part in parts for latency in part.latencies]
    statuses = sum((part.statuses for part in parts), Counter[str]())
    lost = [part.lost_why for part in parts if part.lost_why]
    if lost or len(latencies) < 2:
        raise SystemExit(f"the server ended a connection: {lost or 'no call was answered'}")
    if set(statuses) - set(ANSWERED):
        raise SystemExit(f"not every call was answered: {dict(statuses)}")
    used: dict[str, float] = {}
    for thread, seconds in after.items():
        process = thread.partition("/")[0]
        used[process] = used.get(process, 0.0) + seconds - before.get(thread, 0.0)
    calls, cpu_s = len(latencies), sum(used.values())
    return {
        "connections": clients.connections,
        "client_processes": clients.drivers,
        "calls": calls,
        "statuses": dict(statuses),
        "calls_per_s": round(calls / clients.seconds, 1),
        "p50_ms": round(1000 * statistics.median(latencies), 2),
        "p99_ms": round(1000 * statistics.quantiles(latencies, n=100)[98], 2),
        "server_cpu_us_per_call": round(1e6 * cpu_s / calls, 1),
        "server_cpu_us_per_call_by_process": [round(1e6 * seconds / calls, 1) for seconds in used.values()],
        "calls_per_s_per_core": round(calls / cpu_s),
        "client_cpu_us_per_call": round(1e6 * sum(part.cpu_s for part in parts) / calls, 1),
        "client_busiest_share": round(max(part.cpu_s for part in parts) / clients.seconds, 3),
    }


def drive(orders: Connection, server: Server, clients: Clients, number: int) -> None:
    """One client process: connects and warms up, says so, counts a round at each `go`, closes at `end`."""
    endpoint = Endpoint(server.host, server.port, "/mcp", server.ca)
    share = clients.connections // clients.drivers + (number < clients.connections % clients.drivers)
    # Each process begins elsewhere in the queries, so that no two ask the same at the same time.
    first = number * len(clients.queries) // clients.drivers
    turned = [*clients.queries[first:], *clients.queries[:first]]
    requests = [endpoint.call({"query": query}) for query in turned]

    async def calls() -> None:
        load, context = Load(requests), endpoint.context()
        held = [await connect(endpoint, context) for _ in range(share)]
        gc.freeze()
        for client in held:
            client.owner = load
            load.ask(client)
        await asyncio.sleep(WARM_UP_S)
        orders.send("ready")
        while await asyncio.to_thread(orders.recv) == "go":
            load.latencies, load.statuses = [], Counter()
            cpu, load.counting = time.process_time(), True
            await asyncio.sleep(clients.seconds)
            load.counting = False
            orders.send(Part(load.latencies, load.statuses, time.process_time() - cpu, load.lost_why))
        for client in held:
            client.close()

    uvloop.run(calls())


if __name__ == "__main__":
    main()
