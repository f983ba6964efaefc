"""Engines behind the wire, and engines that are killed."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from engine.attention.torch import TorchAttention
from engine.batch import KVCache
from engine.client import EngineClient
from engine.core import Core, CoreLimits
from engine.engine import Engine
from engine.errors import EngineFault, Refusal, RefusalCode
from engine.local import LocalClient
from engine.model import Model
from engine.pages import PagePool
from engine.request import (
    Embed,
    Embedded,
    Failed,
    Generate,
    Generated,
    Outcome,
    Rank,
    Request,
    Score,
    Scored,
)
from engine.runner import TorchRunner
from engine.schedule import StepLimits
from engine.wire import BlockingClient, EngineFacts, ItemList, WireServer
from tests.engine.fakes import VOCABULARY, expected, make_core, same
from tests.engine.test_engine import GatedRunner
from tests.engine.wire.doubles import WAIT_S, ScriptedEngine, Wire, go, until

FACTS = EngineFacts("hash", 4, VOCABULARY, 4096, "hash")


@pytest.fixture
def gated() -> Iterator[tuple[Engine, GatedRunner]]:
    """An engine of its own thread over the model that is a hash; the gate of its steps is open at first."""
    core, plain = make_core(60)
    core.not_ready = "it has not passed its canary"
    runner = GatedRunner(60, plain.page_tokens, plain.depth)
    core.pool._on_free = runner.poison
    runner.is_published = plain.is_published
    runner.gate.set()
    engine = Engine(core, runner)
    engine.start()
    yield engine, runner
    runner.gate.set()
    engine.close()
    assert engine.status().pages.held == 0


@asynccontextmanager
async def serve(engine: Engine, path: Path) -> AsyncIterator[Wire]:
    server = WireServer()
    await server.start(path)
    server.open(LocalClient(engine), FACTS)
    try:
        yield Wire(server, ScriptedEngine(), path)
    finally:
        await server.close()


def requests(seed: int, count: int) -> list[Request]:
    drawn = random.Random(seed)

    def tokens(most: int) -> tuple[int, ...]:
        return tuple(drawn.randrange(VOCABULARY) for _ in range(drawn.randint(1, most)))

    numbered = ItemList(((1,), (2, 3), (2, 4)), end=9, separator=(7,), most=3)
    kinds: list[Callable[[], Request]] = [
        lambda: Embed(tokens(9), keep=drawn.randint(0, 4)),
        lambda: Generate(tokens(6), drawn.randint(1, 6), frozenset(tokens(3))),
        lambda: Generate(tokens(6), 8, frozenset({9}), constraint=numbered),
        lambda: Score(tuple(tokens(9) for _ in range(drawn.randint(1, 5))), tokens(4), 1, 2),
        lambda: Rank(tokens(9), 6, 9, tokens(4), 1, 2),
    ]
    return [drawn.choice(kinds)() for _ in range(count)]


def test_a_real_engine_answers_each_request_with_its_own_hash(
    gated: tuple[Engine, GatedRunner], tmp_path: Path
) -> None:
    engine, _ = gated
    engine.mark_ready()
    catalogue = [tuple(range(start, start + 3 + start % 6)) for start in range(40)]

    async def test() -> None:
        async with (
            serve(engine, tmp_path / "socket") as wire,
            wire.client() as one,
            wire.client() as other,
        ):

            async def check(number: int, request: Request) -> None:
                client = (one, other)[number % 2]
                chosen = tuple(random.Random(number).sample(catalogue, 6))
                if isinstance(request, Rank):
                    outcome = await client.rank(request, lambda vector: chosen, caller=str(number % 3))
                else:
                    outcome = await client.run(request, caller=str(number % 3))
                assert same(outcome, expected(request, chosen))

            await asyncio.gather(*(check(number, each) for number, each in enumerate(requests(1, 150))))

    go(test)
    assert engine.status().pages.held == 0


def test_cancels_deadlines_and_hang_ups_give_the_pages_back(
    gated: tuple[Engine, GatedRunner], tmp_path: Path
) -> None:
    engine, runner = gated
    engine.mark_ready()

    async def test() -> None:
        async with serve(engine, tmp_path / "socket") as wire, wire.client() as stays:
            runner.gate.clear()
            async with wire.client() as goes:
                calls = [asyncio.create_task(stays.run(Embed((number % 90,)))) for number in range(100)]
                lost = [asyncio.create_task(goes.run(Generate((number % 90,), 50))) for number in range(100)]
                await until(lambda: wire.server.in_flight == 200)
                soon = time.monotonic() + 0.1
                late = [
                    asyncio.create_task(stays.run(Generate((number % 90,), 50), deadline=soon))
                    for number in range(100)
                ]
                for call in calls:
                    call.cancel()
                for outcome in await asyncio.gather(*late):
                    assert isinstance(outcome, Refusal)
                    assert outcome.code is RefusalCode.DEADLINE
                    assert outcome.pages_total == 60
            assert all(isinstance(outcome, Failed) for outcome in await asyncio.gather(*lost))
            await until(lambda: wire.server.in_flight == 0)
            runner.gate.set()
            assert same(await stays.run(Embed((5, 6))), expected(Embed((5, 6))))
            await until(lambda: engine.status().running == engine.status().waiting == 0)

    go(test)
    assert engine.status().pages.held == 0


def test_an_engine_that_is_not_ready_drains_or_fails_says_so_through_the_wire(
    gated: tuple[Engine, GatedRunner], tmp_path: Path
) -> None:
    engine, runner = gated

    async def test() -> None:
        async with serve(engine, tmp_path / "socket") as wire, wire.client() as client:
            outcome = await client.run(Embed((1,)))
            assert isinstance(outcome, Refusal)
            assert outcome.code is RefusalCode.NOT_READY
            engine.mark_ready()
            with pytest.raises(ValueError, match="tokens must be from 0 to 96, one is 97"):
                await client.run(Embed((97,)))
            runner.fail_at = ("collect", runner.collections + 1)
            outcome = await client.run(Embed((1,)))
            assert outcome == Failed("device_fault", "A step failed on the device; the engine has stopped.")
            assert (await client.ask_status()).reason == "a step failed on the device"

    go(test, uv=False)


@pytest.fixture
def tiny_engine(make_tiny_model: Callable[..., Model]) -> Iterator[Engine]:
    """A real engine on the CPU over a tiny random model."""
    model = make_tiny_model()
    shape, pages, size = model.shape, 64, 16
    kv = KVCache(torch.zeros((shape.layers, pages + 1, 2, size, shape.kv_heads, shape.head_dim)))
    limits = CoreLimits(StepLimits(64, 16), 1, 100, 10_000, shape.vocabulary, shape.context)
    engine = Engine(Core(PagePool(pages, size), limits), TorchRunner(model, TorchAttention(kv, shape), kv))
    engine.start()
    engine.mark_ready()
    yield engine
    engine.close()


def test_a_model_answers_through_the_wire_as_it_does_locally(tiny_engine: Engine, tmp_path: Path) -> None:
    catalogue = tuple(tuple(range(start, start + 20)) for start in range(6))
    rank = Rank((5, 6, 7), 6, 32, (8, 9), 1, 2)
    listed = Generate((1, 2, 3), 6, frozenset({9}), constraint=ItemList(((4,), (5, 6)), 9, (7,), 2))
    asked: list[Request] = [Embed((1, 2, 3)), Score(catalogue, (8, 9), 1, 2), listed]

    async def answers(client: EngineClient) -> list[Outcome]:
        found = [await client.run(request) for request in asked]
        return [*found, await client.rank(rank, lambda vector: catalogue)]

    async def test() -> None:
        async with serve(tiny_engine, tmp_path / "socket") as wire, wire.client() as client:
            here, there = await answers(LocalClient(tiny_engine)), await answers(client)
        for ours, theirs in zip(here, there, strict=True):
            assert type(ours) is type(theirs)
            if isinstance(ours, Embedded) and isinstance(theirs, Embedded):
                assert ours.vector == pytest.approx(theirs.vector, abs=1e-6)
            elif isinstance(ours, Scored) and isinstance(theirs, Scored):
                assert ours.probabilities == pytest.approx(theirs.probabilities, abs=1e-6)
            elif isinstance(ours, Generated) and isinstance(theirs, Generated):
                assert ours.tokens == theirs.tokens
                assert ours.tokens in {(4,), (5, 6), (4, 7, 5, 6), (5, 6, 7, 4)}

    go(test)


SERVER = """
import asyncio, sys
from pathlib import Path
from engine.wire import EngineFacts, WireServer
from tests.engine.wire.doubles import FACTS, ScriptedEngine

async def main():
    server = WireServer()
    await server.start(Path(sys.argv[1]))
    server.open(ScriptedEngine(by_itself=False), FACTS)
    print("listening", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def start_process(path: Path) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVER, str(path), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), WAIT_S) == b"listening\n"
    return process


def test_a_killed_engine_ends_every_call_and_a_new_one_is_found(tmp_path: Path) -> None:
    async def test() -> None:
        path = tmp_path / "socket"
        process = await start_process(path)
        wire = Wire(WireServer(), ScriptedEngine(), path)
        async with wire.client() as client, wire.client() as other:
            calls = [
                asyncio.create_task((client, other)[number % 2].run(Embed((number,))))
                for number in range(300)
            ]
            while (await client.ask_status()).waiting < 300:
                pass
            process.send_signal(signal.SIGKILL)
            for outcome in await asyncio.gather(*calls):
                assert isinstance(outcome, Failed)
                assert outcome.code == "engine_lost"
            await process.wait()
            assert client.in_flight == other.in_flight == 0
            process = await start_process(path)  # its path was left behind
            assert await client.wait_connected(WAIT_S)
            assert (await client.ask_status()).waiting == 0
        process.kill()
        await process.wait()

    go(test)


@pytest.fixture
def blocking(gated: tuple[Engine, GatedRunner], tmp_path: Path) -> Iterator[Path]:
    """A served engine, on a loop of its own thread."""
    gated[0].mark_ready()
    path, started, loop = tmp_path / "socket", threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def main() -> None:
        async with serve(gated[0], path):
            started.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    assert started.wait(WAIT_S)
    yield path
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


def test_a_program_without_a_loop_asks_from_several_threads(blocking: Path) -> None:
    asked = [request for request in requests(2, 60) if not isinstance(request, Rank)]
    rank, chosen = Rank((1, 2), 4, 9, (3,), 1, 2), ((4, 5), (6,))
    answers: dict[int, Outcome] = {}
    with BlockingClient(blocking) as client:

        def ask(numbers: range) -> None:
            for number in numbers:
                answers[number] = client.run(asked[number])

        threads = [threading.Thread(target=ask, args=(range(start, len(asked), 3),)) for start in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert same(client.rank(rank, lambda vector: chosen), expected(rank, chosen))
        assert client.status().ready
    for number, request in enumerate(asked):
        assert same(answers[number], expected(request))


def test_a_program_without_an_engine_is_told_so(tmp_path: Path) -> None:
    with (
        pytest.raises(EngineFault, match=r"There is no engine at .*: .*No such file"),
        BlockingClient(tmp_path / "socket", timeout=0.05),
    ):
        pass
    assert threading.active_count() < 10
