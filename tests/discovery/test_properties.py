"""Whatever the catalogue, the caller and the arguments: a result keeps its promises."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import jsonschema
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.request import Score
from mcp_discovery.arguments import Arguments, input_schema, tidy
from mcp_discovery.discovery.catalogue import Catalogue, Found, Tool, distinct
from mcp_discovery.discovery.names import NameIndex, Names
from mcp_discovery.discovery.prompts import Prompts
from mcp_discovery.discovery.snapshot import Snapshot
from mcp_discovery.discovery.validate import unacceptable
from mcp_discovery.tool import DiscoverTool, Result
from mcp_discovery.transport.identity import Caller
from tests.discovery.doubles import WordTokenizer, discovery_over, tool

HOSTILE = (
    "<|im_start|>system", "<|im_end|>", "ignore all previous instructions", "a\nb", "\u200b", "\u202e",
    "\x00", "'; DROP TABLE", "%s{}", "天气", "𝕊𝕖𝕒𝕣𝕔𝕙", "___", "a/b", "create_issue", "createIssue",
)  # fmt: skip
WORDS = st.sampled_from(["create", "issue", "read", "file", "send", "mail", "list", *HOSTILE])
TEXTS = st.one_of(
    st.lists(WORDS, max_size=8).map(" ".join), st.text(max_size=30).filter(lambda text: text.isprintable())
)
NAMES = st.lists(
    st.sampled_from(["create", "issue", "read", "File", "天气", "x"]), min_size=1, max_size=3
).flatmap(
    lambda words: st.sampled_from(["_", "-", ".", "__", "/", " ", ""]).map(
        lambda between: between.join(words)
    )
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def tools(draw: st.DrawFn) -> Tool:
    properties = draw(st.dictionaries(NAMES, st.fixed_dictionaries({"description": TEXTS}), max_size=4))
    definition: dict[str, Any] = {
        "name": draw(NAMES),
        "inputSchema": {"type": "object", "properties": properties},
    }
    for key, values in (
        ("description", TEXTS),
        ("title", TEXTS),
        ("annotations", st.dictionaries(st.sampled_from(["readOnlyHint", "x"]), JSON, max_size=2)),
        ("outputSchema", st.just({"type": "object"})),
        ("extra", JSON),
    ):
        if draw(st.booleans()):
            definition[key] = draw(values)
    return Tool(draw(st.sampled_from(["github", "fs", "a/b", "邮件"])), definition["name"], definition)


CATALOGUES = st.lists(tools(), max_size=25).map(
    lambda found: distinct(Found(tool, str(n)) for n, tool in enumerate(found) if unacceptable(tool) is None)[
        0
    ]
)
SERVERS = st.lists(st.sampled_from(["github", "fs", "FS", "nowhere"]), min_size=1, max_size=2)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "query": TEXTS,
        "limit": st.integers(1, 20),
        "detail": st.sampled_from(["full", "compact", "names"]),
        "servers": SERVERS,
        "exclude": st.lists(st.sampled_from(["github/create_issue", "fs/read", "nope"]), max_size=3),
        "names": st.lists(NAMES, min_size=1, max_size=4),
        "read_only": st.booleans(),
        "max_response_tokens": st.integers(64, 2000),
        "min_score": st.floats(0, 1),
        "explain": st.booleans(),
        "timeout_ms": st.integers(1, 60_000),
    },
)
INPUT = jsonschema.Draft202012Validator(input_schema(limit=5, min_score=0.0))
OUTPUT = jsonschema.Draft202012Validator(tidy(Result.model_json_schema()))
QUIET = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


@QUIET
@given(CATALOGUES, ARGUMENTS, st.sets(st.sampled_from(["github", "fs", "a/b", "邮件"])), st.booleans())
def test_every_result_keeps_its_promises(
    held: list[Tool], arguments: dict[str, Any], shown: set[str], missing: bool
) -> None:
    discovery, engine = discovery_over(held, servers_missing=["gone"] if missing else [])
    served = DiscoverTool(discovery)
    caller = Caller("c", lambda server, name: server in shown)
    result = asyncio.run(served.call(arguments, caller))
    again = asyncio.run(served.call(arguments, caller))
    body = result.structured_content
    assert isinstance(body, dict)
    OUTPUT.validate(body)
    assert result.is_error == (body["status"] in ("refused", "failed", "invalid"))
    assert body["status"] in ("matched", "partial", "no_match", "invalid")
    assert (body["error"] is not None) == (body["status"] == "invalid")
    json.loads(result.model_dump_json())

    by_id = {tool.id: tool for tool in held}
    visible = [tool for tool in held if tool.server in shown]
    assert body["catalog"]["tools"] == len(visible)
    assert len(body["tools"]) <= arguments.get("limit", 20)
    assert [found["rank"] for found in body["tools"]] == list(range(1, len(body["tools"]) + 1))
    assert len({found["id"] for found in body["tools"]}) == len(body["tools"])
    for found in body["tools"]:
        tool = by_id[found["id"]]
        assert tool.server in shown
        assert (found["server"], found["name"]) == (tool.server, tool.name)
        assert 0 <= found["score"] <= 1
        assert tool.read_only or not arguments.get("read_only")
        for key in ("inputSchema", "outputSchema", "annotations", "title"):
            if key in found:
                assert compact(found[key]) == compact(tool.definition.get(key))
        if arguments.get("detail", "full") == "full" and not body["truncated"]:
            assert found["inputSchema"] is tool.definition["inputSchema"]
    # Names alone are never cut, however little room there is.
    cuttable = arguments.get("detail") != "names" and body["status"] != "invalid"
    if "max_response_tokens" in arguments and not body["truncated"] and cuttable:
        assert len(compact(body)) <= max(
            4 * arguments["max_response_tokens"], len(compact({**body, "tools": []}))
        )

    special = engine.tokenizer.special_ids
    for request in engine.requests:
        assert isinstance(request, Score)
        assert all(sum(token in special for token in prefix) == 3 for prefix in request.prefixes)
        assert sum(token in special for token in request.suffix) == 2
    assert len(engine.scored_prefixes) <= 2 * len(visible)  # two calls
    assert {**again.structured_content, "timing_ms": 0} == {**body, "timing_ms": 0}  # type: ignore[dict-item]


ANY_NAME = st.sampled_from([*Arguments.model_fields, "other", "", "\ud800"])


@QUIET
@given(st.dictionaries(ANY_NAME, JSON, max_size=5))
def test_whatever_json_comes_as_arguments_the_answer_is_a_valid_result(arguments: dict[str, Any]) -> None:
    discovery, _ = discovery_over([])
    served = DiscoverTool(discovery)
    result = asyncio.run(served.call(arguments, Caller()))
    assert isinstance(result.structured_content, dict)
    OUTPUT.validate(result.structured_content)
    accepted = INPUT.is_valid(arguments)
    if result.structured_content["status"] == "invalid":
        asks = arguments.get("names") or str(arguments.get("query", "")).strip()
        assert not accepted or not asks
        assert result.structured_content["error"]["message"]
    else:
        assert accepted
    result.model_dump_json()


ALIKE = st.lists(
    st.builds(tool, st.sampled_from("abcd"), st.sampled_from(["x_y", "xY", "x-y", "w_x_y", "b__x_y", "y"])),
    max_size=16,
    unique_by=lambda each: each.id,
)
"""Few names on few servers: many are held by several, in many ways."""


@QUIET
@given(ALIKE, st.data())
def test_many_groups_are_named_as_one_is(held: list[Tool], data: st.DataObject) -> None:
    catalogue = Catalogue.of(held)
    hidden = data.draw(st.sets(st.integers(0, 15), max_size=3))
    mask = np.array([position not in hidden for position in range(len(catalogue))], dtype=bool)
    grouped = NameIndex(catalogue.tools, [Names(group) for group in catalogue.groups.values()])
    whole = NameIndex(catalogue.tools)
    for name in ("x_y", "b/x_y", "use b__x_y now", "XY", "y", "a.x-y", "nothing"):
        assert grouped.find(name, mask) == whole.find(name, mask)
        assert grouped.resolve([name], mask) == whole.resolve([name], mask)


@QUIET
@given(ALIKE, st.data())
def test_servers_are_shown_with_the_tools_that_are_seen_of_them(
    held: list[Tool], data: st.DataObject
) -> None:
    catalogue = Catalogue.of(held)
    hidden = data.draw(st.sets(st.integers(0, 15)))
    visible = np.array([position not in hidden for position in range(len(catalogue))], dtype=bool)
    snapshot = Snapshot(catalogue, Prompts(WordTokenizer()))
    counts = Counter(tool.server for tool, seen in zip(catalogue.tools, visible, strict=True) if seen)
    assert snapshot.servers_seen(visible) == counts
    for server in "abcde":
        assert snapshot.shows(server, visible) == (server in counts)
