"""Calls on a large catalogue, timed by stage: by words, by vectors, the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from engine.client import Choose, EngineClient, EngineStatus
from engine.request import Outcome, Rank, Request, Tokens
from mcp_discovery.discovery.call import DiscoverRequest, DiscoverResult
from mcp_discovery.discovery.select import Discovery
from mcp_discovery.transport.identity import Caller

COLD_SHARE = 0.1  # of a call's tokens, at most, were in the pool
RESIDENT_SHARE = 0.5  # of the pool's pages, for queries that are asked again and again


@dataclass(frozen=True, slots=True)
class Call:
    """One answered call. Milliseconds: of all, of the search by words and of that by vectors, and of the
    wait for admission, which is part of the engine's. `cached_tokens` are those in the pool but for the page
    that every tool's prefix begins with, which always is."""

    ms: float
    words_ms: float
    vectors_ms: float
    queue_ms: float
    prompt_tokens: int
    cached_tokens: int

    @property
    def engine_ms(self) -> float:
        """What is left: the engine's wait and steps, and the way there and back."""
        return self.ms - self.words_ms - self.vectors_ms

    @property
    def cached_share(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    @property
    def is_cold(self) -> bool:
        return self.cached_share <= COLD_SHARE


class TimedClient:
    """An `EngineClient` that notes how long each caller's last choice by vectors took."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self.choice_ms: dict[str, float] = {}

    async def run(self, request: Request, *, deadline: float | None = None, caller: str = "") -> Outcome:
        return await self._client.run(request, deadline=deadline, caller=caller)

    async def rank(
        self, request: Rank, choose: Choose, *, deadline: float | None = None, caller: str = ""
    ) -> Outcome:
        def timed(vector: Sequence[float]) -> Sequence[Tokens]:
            started = time.perf_counter()
            prefixes = choose(vector)
            self.choice_ms[caller] = (time.perf_counter() - started) * 1000.0
            return prefixes

        return await self._client.rank(request, timed, deadline=deadline, caller=caller)

    def status(self) -> EngineStatus:
        return self._client.status()


@dataclass(frozen=True, slots=True)
class Asker:
    """Asks as `discover_tools` does. `client` is the one that `discovery` was made with."""

    discovery: Discovery
    client: TimedClient
    page_tokens: int

    async def ask(self, query: str, caller: str = "caller") -> Call | None:
        """None where the query names its tools, so that the model is not asked. Raises RuntimeError where
        the call is refused or fails."""
        self.client.choice_ms.pop(caller, None)
        started = time.perf_counter()
        result = await self.discovery.discover(DiscoverRequest(query), Caller(caller))
        ms = (time.perf_counter() - started) * 1000.0
        if result.refusal or result.failure:
            raise RuntimeError(f"a call was not answered: {result.refusal or result.failure}")
        if not result.usage.prompt_tokens:
            return None
        return self._call(result, ms, self.client.choice_ms.get(caller, 0.0))

    def _call(self, result: DiscoverResult, ms: float, vectors_ms: float) -> Call:
        usage = result.usage
        cached = max(0, usage.cached_tokens - result.candidates * self.page_tokens)
        queue_ms = result.timing.queue_ms
        return Call(ms, result.retrieve_ms, vectors_ms, queue_ms, usage.prompt_tokens, cached)

    async def cold_and_warm(self, queries: Iterable[str], wanted: int) -> tuple[list[Call], list[Call], int]:
        """One call at a time: each query, and the same again at once. Goes on until `wanted` calls were cold,
        or there are no more queries. The third is how many queries were left out because their tools' pages
        were there by chance."""
        cold: list[Call] = []
        warm: list[Call] = []
        left_out = 0
        for query in queries:
            first = await self.ask(query)
            if first is None:
                continue
            if not first.is_cold:
                left_out += 1
                continue
            again = await self.ask(query)
            cold.append(first)
            warm += [again] if again is not None else []
            if len(cold) == wanted:
                break
        return cold, warm, left_out

    async def at_once(self, queries: Sequence[str], callers: int) -> tuple[list[Call], float]:
        """The queries by `callers` callers, each with one call under way at a time; and seconds."""
        waiting = iter(queries)
        calls: list[Call] = []

        async def work(name: str) -> None:
            for query in waiting:
                call = await self.ask(query, name)
                calls.extend([call] if call is not None else [])

        started = time.perf_counter()
        await asyncio.gather(*(work(f"caller {number}") for number in range(callers)))
        return calls, time.perf_counter() - started

    async def resident(self, queries: Sequence[str], rows: int, row_pages: int) -> list[str]:
        """As many queries as the pool keeps the tools of, having been asked once."""
        room = int(self.client.status().pages.total * RESIDENT_SHARE)
        kept = list(queries[: max(1, room // (rows * row_pages))])
        for query in kept:
            await self.ask(query)
        return kept


def repeated(queries: Sequence[str], count: int) -> list[str]:
    """`count` queries: all of them in turn, as often as it takes."""
    return list(islice(cycle(queries), count))


def at(values: Iterable[float], percent: int) -> float:
    """The least value that `percent` of the values do not exceed, rounded to 2 places."""
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return round(ordered[max(rank, 1) - 1], 2)


def figures(calls: Sequence[Call], seconds: float | None = None) -> dict[str, Any]:
    """Percentiles of calls and of their stages; calls a second where they took `seconds` together."""
    stages = {
        "words": [call.words_ms for call in calls],
        "vectors": [call.vectors_ms for call in calls],
        "engine": [call.engine_ms for call in calls],
        "of it waiting": [call.queue_ms for call in calls],
    }
    told: dict[str, Any] = {"calls": len(calls), **_percentiles([call.ms for call in calls])}
    told["stages"] = {name: _percentiles(values) for name, values in stages.items()}
    told["cached_share"] = at((call.cached_share for call in calls), 50)
    if seconds is not None:
        told["calls_per_s"] = round(len(calls) / seconds, 1)
    return told


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    return {"p50_ms": at(values, 50), "p99_ms": at(values, 99)}
