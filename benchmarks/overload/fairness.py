"""One greedy caller with a thousand calls at once, and fifty with a few each.

The engine is asked directly, as a caller of the server is a connection, on which HTTP/1.1 answers one call
at a time: there nobody can be greedy. Where callers have names (`engine.client`), one can.

The index is Jain's, (sum x)^2 / (n sum x^2) of the answers x of n callers: 1 where all get the same, 1/n
where one gets everything.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from benchmarks.ladder.rung import quantiles
from engine import Engine, EngineConfig, Score
from engine.local import LocalClient
from engine.request import Scored
from mcp_discovery.assemble import DiscoveryModel

GREEDY = "greedy"
TOOL_TOKENS, QUERY_TOKENS = 64, 16  # of one row: a small call, so that there are many in a minute
TOKENS = range(1_000, 40_000)
SETTLE_S, SETTLE_ANSWERS = 5.0, 200
"""Of all callers together, before answers are counted: at least so long, and so many, which is more than an
engine has admitted at any time."""


@dataclass(frozen=True, slots=True)
class Callers:
    """`calls` are those that the greedy one has open, `modest_calls` those of each other: enough that some
    always wait, as turns are about those who wait."""

    modest: int
    modest_calls: int
    calls: int
    seconds: float


def fairness(given: Callers, threads: int) -> dict[str, Any]:
    """In a process of its own, which ends with its engine."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_measure, given, threads).result()


def jain(shares: Sequence[float]) -> float:
    """Jain's index; 1.0 where nobody got anything."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


def _measure(given: Callers, threads: int) -> dict[str, Any]:
    model, config = DiscoveryModel.of(None), EngineConfig(device="cpu", max_pages=1000, threads=threads)
    with Engine.create(config, model.path, model.adapter_path) as engine:
        return asyncio.run(_beside(LocalClient(engine), given))


async def _beside(client: LocalClient, given: Callers) -> dict[str, Any]:
    """First the modest callers alone, then beside the greedy one, which was there before them."""
    load = _Load(client)
    await asyncio.gather(*(load.ask("warm-up") for _ in range(64)))
    alone = await load.run(given, 0)
    beside = await load.run(given, given.calls)
    return {
        "modest": given.modest,
        "modest_calls": given.modest_calls,
        "greedy_calls": given.calls,
        "seconds": given.seconds,
        "alone": alone,
        "beside_the_greedy_one": beside,
        "jain": beside["jain"],
        "jain_without_turns": round(jain([given.calls, *([given.modest_calls] * given.modest)]), 4),
    }


class _Load:
    """Callers that always want something. Lives in a running loop."""

    def __init__(self, client: LocalClient) -> None:
        self._client = client
        self._random = random.Random(2)
        self._tools = [tuple(self._random.sample(TOKENS, TOOL_TOKENS)) for _ in range(64)]
        self._served: Counter[str] = Counter()

    async def ask(self, caller: str) -> float:
        """One call; how long it took, in milliseconds."""
        query = tuple(self._random.sample(TOKENS, QUERY_TOKENS))
        began = time.monotonic()
        score = Score((self._random.choice(self._tools),), query, 1, 2)
        outcome = await self._client.run(score, caller=caller)
        if not isinstance(outcome, Scored):
            raise RuntimeError(f"a call was not answered: {outcome}")
        self._served[caller] += 1
        return (time.monotonic() - began) * 1000.0

    async def run(self, given: Callers, greedy_calls: int) -> dict[str, Any]:
        """The greedy caller first. Answers are counted once each of the others has had its first and all have
        asked for a while: what the greedy one had admitted while it was alone is no turn of theirs."""
        callers = [f"modest {number}" for number in range(given.modest)]
        greedy = [asyncio.create_task(self._keep_asking(GREEDY)) for _ in range(greedy_calls)]
        await asyncio.sleep(1.0 if greedy else 0.0)
        firsts = await asyncio.gather(*(self.ask(caller) for caller in callers))
        asking = [caller for caller in callers for _ in range(given.modest_calls)]
        modest = [asyncio.create_task(self._keep_asking(caller)) for caller in asking]
        self._served.clear()
        await asyncio.sleep(SETTLE_S)
        while self._served.total() < SETTLE_ANSWERS:
            await asyncio.sleep(0.1)
        self._served.clear()
        await asyncio.sleep(given.seconds)
        served = self._served.copy()
        for task in (*greedy, *modest):
            task.cancel()
        ended = await asyncio.gather(*greedy, *modest, return_exceptions=True)
        for error in ended:
            if not isinstance(error, asyncio.CancelledError):
                raise RuntimeError("a caller stopped early") from (error or None)
        shares = [served[name] for name in ([*callers, GREEDY] if greedy else callers)]
        return {
            "jain": round(jain(shares), 4),
            "answers": sum(shares),
            "answers_of_greedy": served[GREEDY],
            "answers_of_modest": {"least": min(shares[: given.modest]), "most": max(shares[: given.modest])},
            "first_call_ms": quantiles(firsts),
        }

    async def _keep_asking(self, caller: str) -> None:
        while True:
            await self.ask(caller)
