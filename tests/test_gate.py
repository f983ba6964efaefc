"""The gate before the engine: closed it refuses, open it lets through, the warm-up behind the calls."""

from __future__ import annotations

import asyncio

from engine.client import Choose, EngineStatus, PageCounts
from engine.errors import Refusal, RefusalCode
from engine.request import Embed, Embedded, Outcome, Rank, Request
from mcp_discovery.gate import WARM_UP, Gate

WAIT_S = 20.0
REQUEST = Embed((1, 2, 3))
RANK = Rank(query=(1,), rows=1, prefix_tokens=16, suffix=(2,), positive=3, negative=4)


class Engine:
    """Answers when it is told to, and notes who asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answer = asyncio.Event()
        self.asked_to_warm = asyncio.Event()

    async def run(self, request: Request, *, deadline: float | None = None, caller: str = "") -> Outcome:
        self.asked.append(caller)
        if caller == WARM_UP:
            self.asked_to_warm.set()
        await self.answer.wait()
        return Embedded((1.0,))

    async def rank(
        self, request: Rank, choose: Choose, *, deadline: float | None = None, caller: str = ""
    ) -> Outcome:
        return await self.run(RANK, deadline=deadline, caller=caller)

    def status(self) -> EngineStatus:
        return EngineStatus(True, False, "", PageCounts(1, 2, 3, 6), 0, 0, 0, 0, 0.0, "test")


async def settle() -> None:
    """Lets every task run as far as it can."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_closed_gate_refuses_with_its_reason() -> None:
    async def main() -> None:
        gate = Gate("the model is being loaded", 16)
        for outcome in (await gate.run(REQUEST), await gate.rank(RANK, lambda vector: ())):
            assert isinstance(outcome, Refusal)
            assert outcome.code is RefusalCode.NOT_READY
            assert "the model is being loaded" in outcome.message
            assert outcome.retry_after_ms is not None
        assert (gate.status().ready, gate.status().reason) == (False, "the model is being loaded")

    asyncio.run(main())


def test_an_open_gate_lets_through_and_a_closed_one_lets_what_runs_go_on() -> None:
    async def main() -> None:
        gate, engine = Gate("loading", 16), Engine()
        gate.open(engine)
        assert gate.status().pages.total == 6
        running = asyncio.create_task(gate.run(REQUEST, caller="a"))
        ranking = asyncio.create_task(gate.rank(RANK, lambda vector: (), caller="b"))
        await settle()
        gate.close("the engine is gone")
        assert isinstance(await gate.run(REQUEST), Refusal)
        engine.answer.set()
        assert isinstance(await running, Embedded)
        assert isinstance(await ranking, Embedded)
        assert engine.asked == ["a", "b"]

    asyncio.run(main())


def test_the_warm_up_waits_while_a_call_is_under_way() -> None:
    async def main() -> None:
        gate, engine = Gate("loading", 16), Engine()
        gate.open(engine)
        calls = [asyncio.create_task(gate.run(REQUEST, caller=name)) for name in ("a", "b")]
        await settle()
        warming = asyncio.create_task(gate.run(REQUEST, caller=WARM_UP))
        calls[0].cancel()
        await settle()
        assert engine.asked == ["a", "b"]
        engine.answer.set()
        await calls[1]
        assert isinstance(await warming, Embedded)
        assert engine.asked == ["a", "b", WARM_UP]

    asyncio.run(main())


def test_the_warm_up_gets_its_turn_though_calls_never_cease() -> None:
    async def main() -> None:
        gate, engine = Gate("loading", 16, patience_s=0.01), Engine()
        gate.open(engine)
        call = asyncio.create_task(gate.run(REQUEST, caller="me"))
        await settle()
        warming = asyncio.create_task(gate.run(REQUEST, caller=WARM_UP))
        async with asyncio.timeout(5):
            await engine.asked_to_warm.wait()
        assert engine.asked == ["me", WARM_UP]
        engine.answer.set()
        await asyncio.gather(call, warming)

    asyncio.run(main())


def test_a_draining_gate_refuses_what_is_new_and_waits_for_what_runs() -> None:
    async def main() -> None:
        engine, gate = Engine(), Gate("loading", 16)
        gate.open(engine)
        running = asyncio.create_task(gate.run(REQUEST))
        await settle()
        draining = asyncio.create_task(gate.drain(timeout=60.0))
        await settle()
        for outcome in (await gate.run(REQUEST), await gate.rank(RANK, lambda vector: ())):
            assert isinstance(outcome, Refusal)
            assert outcome.code is RefusalCode.DRAINING
        assert not draining.done()
        engine.answer.set()
        assert isinstance(await running, Embedded)
        assert await draining
        assert engine.asked == [""]
        assert gate.reason == "it is draining"

    asyncio.run(asyncio.wait_for(main(), WAIT_S))


def test_a_drain_waits_no_longer_than_it_may() -> None:
    async def main() -> None:
        engine, gate = Engine(), Gate("loading", 16)
        gate.open(engine)
        running = asyncio.create_task(gate.run(REQUEST))
        await settle()
        assert not await gate.drain(timeout=0.0)
        engine.answer.set()
        await running

    asyncio.run(asyncio.wait_for(main(), WAIT_S))
