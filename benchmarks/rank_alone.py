"""The engine asked in its own process for what `discover_tools` asks it: nobody else is in between.

Each query goes through discovery once, which says the request that it makes of the engine and the
prefixes that it chooses. Those requests are then kept coming by one thread, so many outstanding at any
time, and the engine's own thread supplies the prefixes: no event loop, no wire, no TLS, no MCP.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import cycle
from multiprocessing.connection import Connection
from typing import Any

from engine import Embed, Embedded, Engine, Outcome, Scored
from engine.client import Choose, EngineClient, EngineStatus
from engine.config import Device
from engine.engine import RequestHandle
from engine.local import LocalClient
from engine.request import Failed, Rank, Request, Tokens
from mcp_discovery.assemble import Choices, DiscoveryModel
from mcp_discovery.config import Config
from mcp_discovery.discovery.call import DiscoverRequest
from mcp_discovery.discovery.select import Discovery
from mcp_discovery.following import sources_of
from mcp_discovery.transport.identity import Caller
from mcp_discovery.tuning import tune_interpreter

WARM_UP_S = 1.0
AT_ONCE = 32  # queries that are prepared together


@dataclass(frozen=True, slots=True)
class Ask:
    """What a query's call asks of the engine."""

    rank: Rank
    prefixes: tuple[Tokens, ...]


class Recorder:
    """An `EngineClient` that has queries embedded, notes what they would have scored, and answers no more."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self.asks: dict[str, Ask] = {}  # by caller

    async def run(self, request: Request, *, deadline: float | None = None, caller: str = "") -> Outcome:
        return await self._client.run(request, deadline=deadline, caller=caller)

    async def rank(
        self, request: Rank, choose: Choose, *, deadline: float | None = None, caller: str = ""
    ) -> Outcome:
        outcome = await self._client.run(Embed(request.query))
        if not isinstance(outcome, Embedded):
            raise RuntimeError(f"a query was not embedded: {outcome}")
        self.asks[caller] = Ask(request, tuple(choose(outcome.vector)))
        return Failed("noted", "It is noted, and not scored.")

    def status(self) -> EngineStatus:
        return self._client.status()


class Closed:
    """A closed loop of `outstanding` requests, for `seconds` after a warm-up."""

    def __init__(self, engine: Engine, asks: Sequence[Ask], outstanding: int) -> None:
        self._engine = engine
        self._asks: Iterator[Ask] = cycle(asks)
        self._outstanding = outstanding
        self._slots = threading.Semaphore(outstanding)
        self._ended: list[tuple[float, float, Outcome]] = []  # submitted, ended

    def run(self, seconds: float) -> dict[str, Any]:
        start = time.perf_counter() + WARM_UP_S
        stop = start + seconds
        while time.perf_counter() < start:
            self._submit()
        cpu = time.process_time()
        while time.perf_counter() < stop:
            self._submit()
        cpu = time.process_time() - cpu
        for _ in range(self._outstanding):
            self._slots.acquire()
        return self._summary(start, stop, cpu)

    def _submit(self) -> None:
        self._slots.acquire()
        ask, submitted = next(self._asks), time.perf_counter()
        handle: Future[RequestHandle] = Future()

        def done(outcome: Outcome) -> None:
            self._ended.append((submitted, time.perf_counter(), outcome))
            self._slots.release()

        def supply(vector: Sequence[float]) -> None:  # maybe before `submit` has returned
            handle.add_done_callback(lambda made: made.result().supply(ask.prefixes))

        handle.set_result(self._engine.submit(ask.rank, on_done=done, on_vector=supply))

    def _summary(self, start: float, stop: float, cpu_s: float) -> dict[str, Any]:
        wrong = [outcome for _, _, outcome in self._ended if not isinstance(outcome, Scored)]
        if wrong:
            raise SystemExit(f"{len(wrong)} requests were not scored, such as: {wrong[0]}")
        waited = [ended - submitted for submitted, ended, _ in self._ended if start <= ended < stop]
        return {
            "outstanding": self._outstanding,
            "requests": len(waited),
            "requests_per_s": round(len(waited) / (stop - start), 1),
            "p50_ms": round(1e3 * statistics.median(waited), 2),
            "p99_ms": round(1e3 * statistics.quantiles(waited, n=100)[98], 2),
            "cpu_us_per_request": round(1e6 * cpu_s / len(waited), 1),
        }


def measure(
    answer: Connection, device: Device, model: str, queries: Sequence[str], outstanding: int, seconds: float
) -> None:
    """Sends (the queries that ask the engine, what it does a second of their requests). Meant for a process
    of its own: with that the card's memory comes back."""
    config = Config.model_validate({"engine": {"device": device, "model": model}})
    held = DiscoveryModel.of(model)
    with Engine.create(config.engine_config(), held.path, held.adapter_path) as engine:
        recorder = Recorder(LocalClient(engine))
        discovery = held.discovery(
            recorder,
            sources_of(config).load(),
            Choices(),
            device=device,
            page_tokens=config.engine.page_tokens,
        )
        asks = asyncio.run(_asks(discovery, recorder, queries))
        tune_interpreter()
        answer.send((list(asks), Closed(engine, list(asks.values()), outstanding).run(seconds)))


async def _asks(discovery: Discovery, recorder: Recorder, queries: Sequence[str]) -> dict[str, Ask]:
    """By query. Not of those that the names in them answer."""
    await discovery.warm()
    for at in range(0, len(queries), AT_ONCE):
        part = queries[at : at + AT_ONCE]
        await asyncio.gather(*(discovery.discover(DiscoverRequest(q), Caller(id=q)) for q in part))
    return recorder.asks
