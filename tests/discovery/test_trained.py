"""Discovery by a model that is trained for it: vectors beside words, one admission, one scale."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engine.request import Embed, Rank, Score
from mcp_discovery.discovery.calibration import COSINE_WEIGHT, Calibration
from mcp_discovery.discovery.call import DiscoverRequest, DiscoverResult
from mcp_discovery.discovery.catalogue import Catalogue, Tool
from mcp_discovery.discovery.select import Discovery, Trained
from mcp_discovery.discovery.vectors import VectorCache
from mcp_discovery.discovery.warm import STORE_EVERY
from mcp_discovery.transport.identity import Caller
from tests.discovery.doubles import StubEngine, by_topic, discovery_over, refusal, tool

TOOLS = [
    tool("github", "create_issue", "Create an issue in a repository", "title"),
    tool("files", "read_file", "Read a file from disk", "path"),
    tool("weather", "outlook", "The forecast of the coming days", "city"),
    *(tool("zoo", f"feed_{number}", "Feeds an animal in a house", "animal") for number in range(40)),
]


def trained_over(
    folder: Path, tools: list[Tool] = TOOLS, calibration: Calibration | None = None, **settings: object
) -> tuple[Discovery, StubEngine]:
    trained = Trained(calibration or Calibration(), VectorCache(folder / "v"))
    discovery, engine = discovery_over(tools, trained=trained, **settings)  # type: ignore[arg-type]
    engine.judge = lambda prefix, suffix: 0.5
    return discovery, engine


def ask(discovery: Discovery, query: str, caller: Caller | None = None) -> DiscoverResult:
    return asyncio.run(discovery.discover(DiscoverRequest(query), caller or Caller()))


def found(result: DiscoverResult) -> list[str]:
    return [pick.tool.id for pick in result.picks]


def test_a_tool_that_shares_no_word_is_found_by_its_vector(tmp_path: Path) -> None:
    discovery, engine = trained_over(tmp_path, candidates=2)
    assert "weather/outlook" not in found(ask(discovery, "will umbrella"))
    asyncio.run(discovery.warm())
    result = ask(discovery, "will umbrella")
    assert found(result)[0] == "weather/outlook"
    assert (result.method, result.candidates) == ("bm25+vectors+score", 2)
    rank = [request for request in engine.requests if isinstance(request, Rank)][-1]
    assert rank.rows == 2


def test_one_admission_embeds_chooses_and_scores(tmp_path: Path) -> None:
    discovery, engine = trained_over(tmp_path)
    asyncio.run(discovery.discover(DiscoverRequest("read a file"), Caller("me"), 12.5))
    assert [type(request) for request in engine.requests] == [Rank, Score]
    assert (engine.deadlines, engine.callers) == ([12.5], ["me"])


def test_a_tool_that_the_caller_may_not_see_is_no_candidate(tmp_path: Path) -> None:
    discovery, engine = trained_over(tmp_path, candidates=2)
    asyncio.run(discovery.warm())
    hidden = Caller("x", lambda server, name: server != "weather")
    result = ask(discovery, "will umbrella rain weather forecast", hidden)
    assert "weather/outlook" not in found(result)
    assert result.candidates == 2
    assert not any("outlook" in prefix for prefix in engine.scored_prefixes)


def test_the_order_adds_the_cosine_to_the_log_odds(tmp_path: Path) -> None:
    discovery, engine = trained_over(tmp_path, calibration=Calibration(offset=0.0))
    engine.judge = lambda prefix, suffix: 0.9 if "issue" in prefix else 0.5
    asyncio.run(discovery.warm())
    ranking = asyncio.run(discovery.rank("disk umbrella", Caller()))
    tools = discovery.snapshot.catalogue.tools
    ids = [tools[position].id for position in ranking.scored]
    # 10 x cosine (0.71 for both topics of the request) outweighs log odds of 2.2
    assert set(ids[:2]) == {"files/read_file", "weather/outlook"}
    assert ids[2] == "github/create_issue"
    best = ranking.scored[0]
    cosine = ranking.cosines[best]
    assert ranking.scores[best] == pytest.approx(Calibration(offset=0.0).probability(COSINE_WEIGHT * cosine))


def test_it_is_degraded_until_every_tool_that_the_caller_sees_has_a_vector(tmp_path: Path) -> None:
    discovery, engine = trained_over(tmp_path)
    assert ask(discovery, "file").degraded
    snapshot = discovery.snapshot
    for position in snapshot.catalogue.servers["files"]:
        snapshot.vectors.put(position, by_topic("Tool: file"))
    assert not ask(discovery, "file", Caller("f", lambda server, name: server == "files")).degraded
    assert ask(discovery, "file").degraded
    assert asyncio.run(discovery.warm()) == len(TOOLS)
    assert not ask(discovery, "file").degraded
    assert sum(isinstance(request, Embed) for request in engine.requests) == len(TOOLS)


def test_another_start_takes_the_vectors_from_the_file_and_computes_only_pages(tmp_path: Path) -> None:
    first, _ = trained_over(tmp_path)
    asyncio.run(first.warm())
    second, engine = trained_over(tmp_path)
    assert not ask(second, "file").degraded
    engine.pages = 0  # no room for pages: nothing is left to compute
    assert asyncio.run(second.warm()) == 0


def test_a_changed_tool_alone_is_computed_again(tmp_path: Path) -> None:
    discovery, engine = trained_over(tmp_path)
    asyncio.run(discovery.warm())
    changed = tool("files", "read_file", "Read a document", "path")
    discovery.replace(discovery.index(Catalogue.of([*TOOLS[:1], changed, *TOOLS[2:]])))
    assert ask(discovery, "file").degraded
    engine.pages = 0
    assert asyncio.run(discovery.warm()) == 1
    assert not ask(discovery, "file").degraded


def test_vectors_stay_with_their_tools_when_positions_move(tmp_path: Path) -> None:
    discovery, engine = trained_over(tmp_path)
    asyncio.run(discovery.warm())
    before = discovery.snapshot
    new = tool("aaa", "first", "Comes before all others")
    groups = {"aaa": (new,), **before.catalogue.groups}
    discovery.replace(discovery.index(Catalogue.of_states(groups, (), "2026-01-02T03:04:05Z")))
    after = discovery.snapshot
    for held in TOOLS:
        old, moved = before.catalogue.positions[held.id], after.catalogue.positions[held.id]
        assert moved != old
        vector, same = before.vectors.get(old), after.vectors.get(moved)
        assert vector is not None
        assert same is not None
        assert vector.tolist() == same.tolist()
    assert after.vectors.get(after.catalogue.positions["aaa/first"]) is None
    engine.pages = 0
    assert asyncio.run(discovery.warm()) == 1


def test_vectors_are_computed_of_all_tools_and_pages_kept_of_those_that_fit(tmp_path: Path) -> None:
    discovery, engine = trained_over(tmp_path, pages=20)
    assert asyncio.run(discovery.warm()) == len(TOOLS)
    embeds = [request for request in engine.requests if isinstance(request, Embed)]
    assert 0 < sum(request.keep > 0 for request in embeds) < len(TOOLS)


def test_vectors_computed_before_a_refusal_are_kept(tmp_path: Path) -> None:
    discovery, engine = trained_over(tmp_path)
    embed, calls = engine.embed, 0

    def failing(text: str) -> tuple[float, ...]:
        nonlocal calls
        calls += 1
        if calls == 20:
            engine.answer = refusal()
        return embed(text)

    engine.embed = failing
    done = asyncio.run(discovery.warm())
    assert 0 < done < len(TOOLS) <= STORE_EVERY
    again, _ = trained_over(tmp_path)
    assert int(again.snapshot.vectors.present.sum()) >= done


def test_the_threshold_holds_for_the_published_score(tmp_path: Path) -> None:
    discovery, _ = trained_over(tmp_path, calibration=Calibration(offset=-COSINE_WEIGHT / 2), min_score=0.5)
    asyncio.run(discovery.warm())
    assert found(ask(discovery, "will umbrella")) == ["weather/outlook"]
    without = Caller("x", lambda server, name: server != "weather")
    assert ask(discovery, "will umbrella", without).status == "no_match"


def test_nothing_is_offered_where_no_tool_seems_to_serve_unless_asked_for(tmp_path: Path) -> None:
    calibration = Calibration(doubt_weight=50.0, doubt_below=25.0)
    discovery, _ = trained_over(tmp_path, calibration=calibration)
    asyncio.run(discovery.warm())
    nothing = ask(discovery, "will umbrella", Caller("x", lambda server, name: server != "weather"))
    assert (nothing.status, nothing.picks) == ("no_match", ())
    assert "seems to serve this; the best is" in nothing.notes[-1]
    assert found(ask(discovery, "will umbrella"))[0] == "weather/outlook"
    assert len(ask(discovery, "will umbrella").picks) > 1  # the best decides for all
    hidden = Caller("y", lambda server, name: server != "weather")
    request = DiscoverRequest("will umbrella", min_score=0.0)
    assert asyncio.run(discovery.discover(request, hidden)).status == "matched"


def test_the_more_tools_are_in_reach_the_nearer_the_best_must_be(tmp_path: Path) -> None:
    calibration = Calibration(doubt_weight=0.0, doubt_below=1.0, doubt_growth=1.0)
    discovery, engine = trained_over(tmp_path, calibration=calibration)
    engine.judge = lambda prefix, suffix: 0.5  # an assurance of 0: the bound among 50 tools
    asyncio.run(discovery.warm())
    assert len(TOOLS) == 43
    assert ask(discovery, "will umbrella").status == "matched"
    many = [*TOOLS, *(tool("depot", f"box_{number}", "Holds a thing") for number in range(10))]
    discovery.replace(discovery.index(Catalogue.of(many)))
    asyncio.run(discovery.warm())
    assert ask(discovery, "will umbrella").status == "no_match"
    few = Caller("x", lambda server, name: server != "depot")
    assert ask(discovery, "will umbrella", few).status == "matched"


def test_a_named_tool_is_given_whatever_the_doubt(tmp_path: Path) -> None:
    discovery, _ = trained_over(tmp_path, calibration=Calibration(doubt_below=1e6))
    asyncio.run(discovery.warm())
    assert found(ask(discovery, "use read_file")) == ["files/read_file"]


def test_a_tool_without_a_vector_yet_is_not_doubted(tmp_path: Path) -> None:
    discovery, _ = trained_over(tmp_path, calibration=Calibration(doubt_below=1e6))
    assert ask(discovery, "file").status == "matched"
