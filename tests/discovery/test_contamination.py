"""Callers of different visibility at once, in few pages: each gets what it gets alone, of its own tools.

The facts are planted: every tool has one that no other has, and its query asks for that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.contamination import Answer, Reference, Tolerance, compare
from engine.config import EngineConfig
from engine.engine import Engine
from engine.local import LocalClient
from engine.tokenizer import Tokenizer
from mcp_discovery import model_store
from mcp_discovery.assemble import DiscoveryModel
from mcp_discovery.discovery.call import DiscoverRequest, DiscoverResult
from mcp_discovery.discovery.catalogue import Catalogue
from mcp_discovery.discovery.prompts import Prompts
from mcp_discovery.discovery.select import Discovery, DiscoverySettings, Trained
from mcp_discovery.discovery.vectors import VectorCache
from mcp_discovery.transport.identity import Caller
from tests.discovery.doubles import tool

PAGES = 64  # some four calls at once, and not the prefixes of all tools
LIMIT = 3
FACTS = {
    "wolves": "Count the grey wolves of the northern reserve",
    "tides": "Predict the tides of the harbour for a day",
    "looms": "List the looms of the weaving mill and their speed",
    "kilns": "Read the temperature of a pottery kiln",
}
SERVERS = ("east", "west")
TOOLS = [
    tool(server, f"{name}_{server}", f"{text}, for the {server} office", "day")
    for server in SERVERS
    for name, text in FACTS.items()
]
CALLERS = [
    Caller(id="east", sees=lambda server, name: server == "east"),
    Caller(id="west", sees=lambda server, name: server == "west"),
    Caller(id="both"),
]
CALLS = [(caller, text.lower()) for caller in CALLERS for text in FACTS.values()]
EXACT = Tolerance(log_odds=0.01, doubt=0.05)  # float32 in another order


@pytest.fixture(scope="module")
def discovery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Discovery]:
    model_store.fetch()
    model = DiscoveryModel.of(None)
    assert model.adapter is not None
    vectors = VectorCache(Path(tmp_path_factory.mktemp("vectors")) / "v")
    config = EngineConfig(device="cpu", dtype="float32", max_pages=PAGES)
    with Engine.create(config, model.path, model.adapter.path) as engine:
        made = Discovery(
            LocalClient(engine),
            Prompts(Tokenizer.from_gguf(model.path)),
            Catalogue.of(TOOLS),
            DiscoverySettings(candidates=6, min_score=0.0, limit=LIMIT),
            model=model.name,
            trained=Trained(model.adapter.calibration, vectors),
        )
        asyncio.run(made.warm())
        yield made
        assert engine.status().pages.held == 0


async def ask(discovery: Discovery, call: tuple[Caller, str]) -> DiscoverResult:
    caller, query = call
    return await discovery.discover(DiscoverRequest(query, limit=LIMIT), caller)


async def ask_all(discovery: Discovery) -> list[DiscoverResult]:
    """All calls at once, and as many again that are hung up while they are under way."""
    kept = [asyncio.create_task(ask(discovery, call)) for call in CALLS]
    gone = [asyncio.create_task(ask(discovery, call)) for call in reversed(CALLS)]
    for number, task in enumerate(gone):
        await kept[number % 4]
        task.cancel()
    await asyncio.gather(*gone, return_exceptions=True)
    return await asyncio.gather(*kept)


def scores_of(result: DiscoverResult) -> tuple[tuple[str, ...], tuple[float, ...]]:
    return tuple(pick.tool.id for pick in result.picks), tuple(pick.score for pick in result.picks)


@pytest.fixture(scope="module")
def references(discovery: Discovery) -> list[Reference]:
    async def one_at_a_time() -> list[DiscoverResult]:
        return [await ask(discovery, call) for call in CALLS]

    return [Reference(*scores_of(result), limit=LIMIT) for result in asyncio.run(one_at_a_time())]


@pytest.fixture(scope="module")
def answers(discovery: Discovery, references: list[Reference]) -> list[Answer]:
    results = asyncio.run(asyncio.wait_for(ask_all(discovery), 300))
    return [Answer(*scores_of(result), limit=LIMIT) for result in results]


def test_every_answer_is_the_one_alone(references: list[Reference], answers: list[Answer]) -> None:
    for reference, answer in zip(references, answers, strict=True):
        assert compare(reference, answer, EXACT).sentence == ""


def test_nobody_sees_a_tool_of_others(answers: list[Answer]) -> None:
    for (caller, _), answer in zip(CALLS, answers, strict=True):
        servers = {id.partition("/")[0] for id in answer.tools}
        assert servers <= ({caller.id} if caller.id in SERVERS else set(SERVERS))
        assert len(answer.tools) == LIMIT


def test_the_planted_fact_is_found(answers: list[Answer]) -> None:
    for (caller, query), answer in zip(CALLS, answers, strict=True):
        name = next(name for name, text in FACTS.items() if text.lower() == query)
        wanted = {f"{server}/{name}_{server}" for server in SERVERS if caller.id in (server, "both")}
        assert answer.tools[0] in wanted


def test_answers_that_are_swapped_are_found(references: list[Reference], answers: list[Answer]) -> None:
    for at, reference in enumerate(references):
        for other, answer in enumerate(answers):
            assert compare(reference, answer, EXACT).clean == (at == other)
