"""What a request costs on the wire between two processes of one host, the engine being a stub.

    python -m benchmarks.wire [--seconds 4] [--in-flight 256]

One client process, one server process, one connection. A rank is the score shape of the targets in two
round trips: the query goes out, its vector comes back, 32 prefixes of 512 go out, 32 probabilities come
back. The client's side includes its coroutine a call, and a choice that does nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import statistics
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.report import write
from benchmarks.wire_process import serve_wire, wire_process
from engine.client import EngineStatus, PageCounts
from engine.request import Embed, Embedded, Outcome, Rank, Request, Score, Scored, Timing, Tokens, Usage
from engine.wire import EngineFacts, WireClient

CANDIDATES, TOOLS, TOOL_TOKENS, QUERY_TOKENS, WIDTH = 32, 512, 66, 30, 576
FACTS = EngineFacts("stub", 16, 49_152, 8192, "stub")
WARM_UP_S = 0.5

Ask = Callable[[], Awaitable[Outcome]]


class StubRequest:
    """Answers as soon as it is asked."""

    __slots__ = ("_on_done", "_scored")

    def __init__(self, on_done: Callable[[Outcome], None], scored: Scored) -> None:
        self._on_done = on_done
        self._scored = scored

    def supply(self, prefixes: tuple[Tokens, ...]) -> None:
        if len(prefixes) != CANDIDATES:
            raise ValueError("the benchmark asks for another shape")
        self._on_done(self._scored)

    def cancel(self) -> None:
        """Nothing is left to take back: it was answered as soon as it was asked."""


class StubEngine:
    """A `Submitter` without an engine: what is left is the wire."""

    def __init__(self) -> None:
        seeded = random.Random(0)
        self._vector = tuple(seeded.random() for _ in range(WIDTH))
        self._scored = Scored(self._vector[:CANDIDATES], Usage(1200, 1024, 0, 80), Timing(0.1, 2.5))
        self._embedded = Embedded(self._vector, Usage(30, 0, 0, 2), Timing(0.1, 2.5))
        self.requests = 0

    def submit(
        self,
        request: Request,
        *,
        deadline: float | None,
        caller: str,
        on_done: Callable[[Outcome], None],
        on_vector: Callable[[tuple[float, ...]], None] | None = None,
    ) -> StubRequest:
        self.requests += 1
        stub = StubRequest(on_done, self._scored)
        if on_vector is not None:
            on_vector(self._vector)
        elif isinstance(request, Score):
            stub.supply(request.prefixes)
        else:
            on_done(self._embedded)
        return stub

    def status(self) -> EngineStatus:
        return EngineStatus(True, False, "", PageCounts(9, 0, 0, 9), 0, 0, 0, self.requests, 0.0, "stub")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="a row")
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with wire_process(_serve) as (path, control):
        results = uvloop.run(_measure(path, control, arguments.seconds, arguments.in_flight))
    write("wire", {"seconds_a_row": arguments.seconds, **results}, out=arguments.out)


def _serve(path: Path, control: Connection) -> None:
    """The server process: says its CPU seconds whenever it is asked."""
    uvloop.run(serve_wire(path, control, StubEngine(), FACTS, _cpu_s))


async def _measure(path: Path, control: Connection, seconds: float, in_flight: int) -> dict[str, Any]:
    seeded = random.Random(1)

    def tokens(count: int) -> Tokens:
        return tuple(seeded.randrange(49_152) for _ in range(count))

    catalogue = [tokens(TOOL_TOKENS) for _ in range(TOOLS)]
    query = tokens(QUERY_TOKENS)
    chosen = [tuple(seeded.sample(catalogue, CANDIDATES)) for _ in range(64)]
    turns = iter(range(1 << 62))
    rank = Rank(query, CANDIDATES, 256, query, 1, 2)
    scores = [Score(prefixes, query, 1, 2) for prefixes in chosen]
    async with WireClient(path, name="benchmark") as client:
        if not await client.wait_connected(10.0):
            raise SystemExit(client.status().reason)
        soon = time.monotonic() + 3600.0
        asks: dict[str, Ask] = {
            "rank": lambda: client.rank(rank, lambda _: chosen[next(turns) % 64], deadline=soon, caller="c"),
            "score": lambda: client.run(scores[next(turns) % 64], deadline=soon, caller="c"),
            "embed": lambda: client.run(Embed(query), deadline=soon, caller="c"),
        }
        rows = {}
        for name, ask in asks.items():
            rows[name] = {
                "saturated": await _row(ask, control, seconds, in_flight),
                "one_at_a_time": await _row(ask, control, seconds, 1),
            }
            _print(name, rows[name])
        return {"in_flight": in_flight, "rows": rows}


async def _row(ask: Ask, control: Connection, seconds: float, in_flight: int) -> dict[str, float]:
    """`in_flight` coroutines, each asking again as soon as it has its answer."""
    await ask_until(ask, time.perf_counter() + WARM_UP_S, in_flight)
    ours, theirs = _cpu_s(), _ask_cpu(control)
    started = time.perf_counter()
    latencies = await ask_until(ask, started + seconds, in_flight)
    took = time.perf_counter() - started
    ours, theirs = _cpu_s() - ours, _ask_cpu(control) - theirs
    calls = len(latencies)
    cuts = statistics.quantiles(latencies, n=100)
    return {
        "calls_per_s": round(calls / took),
        "client_cpu_us": round(1e6 * ours / calls, 1),
        "server_cpu_us": round(1e6 * theirs / calls, 1),
        "p50_ms": round(1e3 * cuts[49], 3),
        "p99_ms": round(1e3 * cuts[98], 3),
    }


async def ask_until(ask: Ask, end: float, in_flight: int) -> list[float]:
    latencies: list[float] = []

    async def again() -> None:
        while (started := time.perf_counter()) < end:
            outcome = await ask()
            if not isinstance(outcome, Scored | Embedded):
                raise SystemExit(f"the stub answered {outcome}")
            latencies.append(time.perf_counter() - started)

    await asyncio.gather(*(again() for _ in range(in_flight)))
    return latencies


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _ask_cpu(control: Connection) -> float:
    control.send("cpu")
    return float(control.recv())


def _print(name: str, rows: dict[str, dict[str, float]]) -> None:
    for row, values in rows.items():
        said = ", ".join(f"{value:,} {key}" for key, value in values.items())
        print(f"{name}, {row.replace('_', ' ')}: {said}")


if __name__ == "__main__":
    main()
