"""A request's way through names, candidates, scores and the decision."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine.errors import EngineFault, RefusalCode
from engine.request import Cancelled, Embed, Embedded, Failed, Score, Scored
from mcp_discovery.discovery.call import DiscoverRequest, DiscoverResult
from mcp_discovery.discovery.catalogue import Catalogue
from mcp_discovery.discovery.select import Discovery
from mcp_discovery.transport.identity import Caller
from tests.discovery.doubles import StubEngine, discovery_over, refusal, tool

TOOLS = [
    tool("github", "create_issue", "Create an issue in a repository", "title", "body"),
    tool("github", "list_issues", "List the issues of a repository", annotations={"readOnlyHint": True}),
    tool("files", "read_file", "Read a file from disk", "path", annotations={"readOnlyHint": True}),
    tool("files", "delete_file", "Delete a file from disk", "path"),
    tool("weather", "forecast", "Weather of the coming days", "city", annotations={"readOnlyHint": True}),
]


def ask(
    discovery: Discovery, query: str = "", caller: Caller | None = None, **arguments: Any
) -> DiscoverResult:
    return asyncio.run(discovery.discover(DiscoverRequest(query, **arguments), caller or Caller()))


def ids(result: DiscoverResult) -> list[str]:
    return [pick.tool.id for pick in result.picks]


def many(count: int) -> list[Any]:
    return [tool("s", f"tool_{number:03}", "does things") for number in range(count)]


def test_the_best_score_comes_first_and_is_published() -> None:
    discovery, engine = discovery_over(TOOLS, lexical_weight=0.0)
    result = ask(discovery, "delete a file")
    assert ids(result)[0] == "files/delete_file"
    assert result.status == "matched"
    assert result.picks[0].score == max(pick.score for pick in result.picks)
    assert result.method == "bm25+score"
    assert result.candidates == len(TOOLS)
    assert len(engine.requests) == 1


def test_one_score_group_with_deadline_and_caller_goes_to_the_engine() -> None:
    discovery, engine = discovery_over(TOOLS)
    asyncio.run(discovery.discover(DiscoverRequest("x"), Caller("me"), 123.5))
    assert engine.deadlines == [123.5]
    assert engine.callers == ["me"]
    (request,) = engine.requests
    assert isinstance(request, Score)
    assert len(request.prefixes) == len(TOOLS)


def test_equal_scores_keep_catalogue_order_and_calls_repeat_exactly() -> None:
    discovery, _ = discovery_over(many(12), judge=lambda prefix, suffix: 0.5)
    first = ask(discovery, "zzz", limit=12)
    assert ids(first) == [f"s/tool_{number:03}" for number in range(12)]
    assert ids(ask(discovery, "zzz", limit=12)) == ids(first)


@pytest.mark.parametrize(("limit", "scored"), [(1, 32), (10, 32), (11, 64), (20, 64)])
def test_twice_as_many_candidates_are_scored_above_limit_ten(limit: int, scored: int) -> None:
    discovery, engine = discovery_over(many(100))
    result = ask(discovery, "does", limit=limit)
    assert len(engine.scored_prefixes) == result.candidates == scored
    assert len(result.picks) == limit


def test_a_paraphrase_that_shares_no_word_still_has_a_chance_in_a_small_catalogue() -> None:
    discovery, _ = discovery_over(TOOLS, judge=lambda prefix, suffix: float("forecast" in prefix))
    assert ids(ask(discovery, "will I need an umbrella"))[0] == "weather/forecast"


def test_lexical_weight_zero_orders_by_score_alone_and_more_lets_bm25_vote() -> None:
    def judge(prefix: str, suffix: str) -> float:
        return 0.9 if "read" in prefix else 0.8 if "delete" in prefix else 0.1

    by_score, _ = discovery_over(TOOLS, judge=judge, lexical_weight=0.0)
    fused, _ = discovery_over(TOOLS, judge=judge, lexical_weight=10.0)
    assert ids(ask(by_score, "delete"))[0] == "files/read_file"
    assert ids(ask(fused, "delete"))[0] == "files/delete_file"


def test_the_threshold_drops_tools_and_says_what_came_nearest() -> None:
    discovery, _ = discovery_over(TOOLS, judge=lambda prefix, suffix: 0.4 if "forecast" in prefix else 0.1)
    assert ids(ask(discovery, "paint a picture", min_score=0.4)) == ["weather/forecast"]
    nothing = ask(discovery, "paint a picture", min_score=0.41)
    assert nothing.status == "no_match"
    assert nothing.picks == ()
    assert "weather/forecast with 0.40" in nothing.notes[-1]
    site, _ = discovery_over(TOOLS, judge=lambda prefix, suffix: 0.4, min_score=0.5)
    assert ask(site, "paint").status == "no_match"
    assert ask(site, "paint", min_score=0.0).status == "matched"


def test_a_named_tool_ranks_first_is_not_scored_and_passes_the_threshold() -> None:
    discovery, engine = discovery_over(TOOLS, judge=lambda prefix, suffix: 0.99)
    result = ask(discovery, "read file", min_score=1.0)
    assert ids(result) == ["files/read_file"]
    assert result.picks[0].score == 1.0
    assert not any("read file" in prefix for prefix in engine.scored_prefixes)


def test_names_that_fill_the_answer_need_no_model() -> None:
    discovery, engine = discovery_over(TOOLS)
    result = ask(discovery, "read_file", limit=1)
    assert ids(result) == ["files/read_file"]
    assert result.method == "names"
    assert engine.requests == []


def test_a_query_that_names_more_than_the_default_limit_gets_them_all_but_no_more_than_asked_for() -> None:
    discovery, _ = discovery_over(many(30))
    names = [f"tool_{number:03}" for number in range(20, 27)]
    assert ids(ask(discovery, " ".join(names))) == [f"s/{name}" for name in names]
    assert len(ask(discovery, " ".join(names), limit=3).picks) == 3


def test_the_names_argument_loads_exactly_those_without_the_model() -> None:
    discovery, engine = discovery_over(TOOLS)
    result = ask(discovery, names=("weather/forecast", "read_file"))
    assert ids(result) == ["weather/forecast", "files/read_file"]
    assert (result.status, result.method, result.candidates) == ("matched", "names", 0)
    assert engine.requests == []


@pytest.mark.parametrize(
    ("arguments", "status", "found", "note"),
    [
        ({"names": ("read_file", "nope")}, "partial", ["files/read_file"], "No tool is named 'nope'"),
        ({"names": ("nope",)}, "no_match", [], "No tool is named 'nope'"),
        ({"names": ("read_file",), "servers": ("github",)}, "no_match", [], "left out by servers"),
        ({"names": ("delete_file",), "read_only": True}, "no_match", [], "left out by servers"),
        ({"names": ("read_file", "forecast"), "limit": 1}, "partial", ["files/read_file"], "limit 1"),
    ],
)
def test_names_that_are_not_given_are_accounted_for(
    arguments: dict[str, Any], status: str, found: list[str], note: str
) -> None:
    result = ask(discovery_over(TOOLS)[0], **arguments)
    assert (result.status, ids(result)) == (status, found)
    assert note in " ".join(result.notes)


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        ({"servers": ("files",)}, {"files/read_file", "files/delete_file"}),
        ({"servers": ("Files", "weather")}, {"files/read_file", "files/delete_file", "weather/forecast"}),
        ({"read_only": True}, {"github/list_issues", "files/read_file", "weather/forecast"}),
        (
            {"exclude": ("files/read_file", "github.create_issue", "no/such")},
            {"github/list_issues", "files/delete_file", "weather/forecast"},
        ),
        ({"servers": ("files",), "read_only": True, "exclude": ("files/read_file",)}, set()),
        ({"servers": ("nowhere",)}, set()),
    ],
)
def test_filters_apply_before_the_model_reads_anything(arguments: dict[str, Any], left: set[str]) -> None:
    discovery, engine = discovery_over(TOOLS)
    result = ask(discovery, "file issue weather", **arguments)
    assert set(ids(result)) == left
    assert len(engine.scored_prefixes) == len(left)
    assert result.status == ("matched" if left else "no_match")
    assert result.visible_tools == len(TOOLS)


def test_an_unknown_server_is_named_with_the_known_ones() -> None:
    result = ask(discovery_over(TOOLS)[0], "file", servers=("files", "flies"))
    assert result.notes == ("No server is named flies; there are files, github, weather.",)


@pytest.mark.parametrize(
    ("tools", "note"), [([], "The catalogue holds no tools."), (TOOLS, "No tool is visible to this caller.")]
)
def test_nothing_to_see_is_no_match_with_its_reason(tools: list[Any], note: str) -> None:
    discovery, engine = discovery_over(tools)
    result = ask(discovery, "anything", Caller("x", lambda server, name: False))
    assert (result.status, result.picks, result.notes) == ("no_match", (), (note,))
    assert engine.requests == []


@pytest.mark.parametrize("code", list(RefusalCode))
def test_a_refusal_is_passed_on(code: RefusalCode) -> None:
    discovery, engine = discovery_over(TOOLS)
    engine.answer = refusal(code)
    result = ask(discovery, "read")
    assert (result.status, result.refusal, result.picks) == ("refused", engine.answer, ())


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (Failed("device", "It broke."), "device"),
        (Cancelled(), "cancelled"),
        (Embedded((1.0,)), "wrong_answer"),
    ],
)
def test_a_fault_of_the_engine_is_never_no_match(answer: Any, code: str) -> None:
    discovery, engine = discovery_over(TOOLS)
    engine.answer = answer
    result = ask(discovery, "read")
    assert result.status == "failed"
    assert result.failure is not None
    assert result.failure.code == code


def test_an_engine_that_is_gone_raises() -> None:
    discovery, engine = discovery_over(TOOLS)
    engine.answer = EngineFault("The engine is gone.")
    with pytest.raises(EngineFault):
        ask(discovery, "read")


def test_a_missing_server_makes_an_answer_partial_where_it_may_have_mattered() -> None:
    discovery, _ = discovery_over(TOOLS, servers_missing=["mail"], judge=lambda prefix, suffix: 0.5)
    assert ask(discovery, "send mail", min_score=0.9).status == "partial"
    assert ask(discovery, "anything", limit=5).status == "matched"
    assert ask(discovery, "anything", limit=6).status == "partial"
    assert ask(discovery, "anything", servers=("files",)).status == "matched"
    assert ask(discovery, "anything", servers=("mail",)).status == "partial"
    assert ask(discovery, names=("mail/send",)).status == "partial"
    assert ask(discovery, names=("read_file",)).status == "matched"
    hidden = Caller("x", lambda server, name: server == "files")
    assert ask(discovery, "anything", hidden, limit=6).servers_missing == ()


def test_reasons_come_from_the_tools_own_text() -> None:
    discovery, _ = discovery_over(TOOLS)
    reasons = {
        p.tool.id: p.reason for p in ask(discovery, "Delete the file at this path", explain=True).picks
    }
    assert reasons["files/delete_file"] == "Its own text says: Delete a file from disk"
    assert reasons["weather/forecast"] == "Its own text says: Weather of the coming days"
    named = ask(discovery, "forecast", explain=True).picks[0]
    assert named.reason == "The request names this tool."
    assert all(pick.reason is None for pick in ask(discovery, "Delete the file").picks)


def test_a_call_keeps_its_revision_while_another_takes_its_place() -> None:
    async def scenario() -> tuple[DiscoverResult, DiscoverResult]:
        discovery, engine = discovery_over(TOOLS)
        engine.hold = asyncio.Event()
        call = asyncio.create_task(discovery.discover(DiscoverRequest("read a file"), Caller()))
        await asyncio.wait_for(engine.entered.wait(), 5)
        discovery.replace(discovery.index(Catalogue.of([tool("new", "only")])))
        engine.hold.set()
        return await call, await discovery.discover(DiscoverRequest("read a file"), Caller())

    before, after = asyncio.run(scenario())
    assert set(ids(before)) == {held.id for held in TOOLS}
    assert before.catalogue.revision == Catalogue.of(TOOLS).revision
    assert ids(after) == ["new/only"]


def test_prefixes_of_unchanged_tools_are_carried_into_the_next_revision() -> None:
    discovery, _ = discovery_over(TOOLS)
    catalogue = discovery.snapshot.catalogue
    before = {held.id: discovery.snapshot.prefix(catalogue.positions[held.id]) for held in TOOLS}
    changed = [*TOOLS[1:], tool("github", "create_issue", "Other text")]
    after = discovery.index(Catalogue.of(changed))
    for position, held in enumerate(after.catalogue.tools):
        is_carried = after.prefix(position) is before[held.id]
        assert is_carried == (held.id != "github/create_issue")


def test_visibility_is_asked_once_a_revision_and_caller() -> None:
    asked: list[str] = []

    def sees(server: str, name: str) -> bool:
        asked.append(name)
        return server == "files"

    discovery, engine = discovery_over(TOOLS)
    for _ in range(3):
        assert set(ids(ask(discovery, "issue file weather", Caller("x", sees)))) == {
            "files/read_file",
            "files/delete_file",
        }
    assert len(asked) == len(TOOLS)
    assert not any("github" in prefix or "weather:" in prefix for prefix in engine.scored_prefixes)


def test_warming_computes_what_fits_once_each_and_reports_progress() -> None:
    discovery, engine = discovery_over(many(40))
    progress: list[tuple[int, int]] = []
    assert asyncio.run(discovery.warm(lambda done, total: progress.append((done, total)))) == 40
    embeds = [request for request in engine.requests if isinstance(request, Embed)]
    assert len({request.tokens for request in embeds}) == len(embeds) == 40
    assert all(request.keep == len(request.tokens) for request in embeds)
    assert progress == [(16, 40), (32, 40), (40, 40)]


def test_after_a_change_only_what_is_new_is_warmed() -> None:
    tools = many(40)
    discovery, engine = discovery_over(tools)
    asyncio.run(discovery.warm())
    changed = [*tools[1:], tool(tools[0].server, "another", "Said in other words")]
    discovery.replace(discovery.index(Catalogue.of(changed)))
    engine.requests.clear()
    assert asyncio.run(discovery.warm()) == 1
    (request,) = engine.requests
    assert isinstance(request, Embed)
    assert "other words" in engine.tokenizer.decode(request.tokens)
    assert asyncio.run(discovery.warm()) == 0


def test_warming_stays_inside_its_share_of_the_pool() -> None:
    discovery, engine = discovery_over(many(40), pages=20)
    count = asyncio.run(discovery.warm())
    prefixes = [request.tokens for request in engine.requests if isinstance(request, Embed)]
    pages = {prefix[:end] for prefix in prefixes for end in range(16, len(prefix) + 1, 16)}
    assert 0 < count < 40
    assert len(pages) <= 15


def test_warming_stops_where_the_engine_refuses() -> None:
    discovery, engine = discovery_over(many(40))
    engine.answer = refusal()
    assert asyncio.run(discovery.warm()) == 0
    assert len(engine.requests) == 16


def test_evaluation_sees_the_whole_order_before_threshold_and_limit() -> None:
    discovery, _ = discovery_over(many(50), min_score=0.9, limit=2, candidates=8)
    ranking = asyncio.run(discovery.rank("does tool_007", Caller()))
    assert isinstance(ranking.outcome, Scored)
    assert len(ranking.named) == 1
    assert len(ranking.scored) == len(ranking.probabilities) == 8
    assert len(ranking.lexical) == 50


def test_the_engine_double_is_a_client() -> None:
    from engine.client import EngineClient
    from tests.discovery.doubles import WordTokenizer

    client: EngineClient = StubEngine(WordTokenizer())
    assert client.status().ready


def test_a_hidden_server_of_a_like_name_hides_none_that_is_seen() -> None:
    tools = [tool("git-hub", "create_issue", "Create an issue"), tool("github", "create_issue", "Create one")]
    discovery, _ = discovery_over(tools)
    caller = Caller("me", lambda server, name: server == "git-hub")
    result = ask(discovery, "create an issue", caller, servers=("Git Hub",))
    assert ids(result) == ["git-hub/create_issue"]
    assert not any("No server" in note for note in result.notes)
