"""`discover_tools`: definition, arguments, result objects, text, budget, cancellation."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema
import mcp_types
import pytest

from engine.errors import RefusalCode
from mcp_discovery.discovery.catalogue import Tool
from mcp_discovery.tool import MAX_NOTES, DiscoverTool
from mcp_discovery.transport.identity import Caller
from tests.discovery.doubles import StubEngine, discovery_over, refusal, tool

TOOLS = [
    tool(
        "github",
        "create_issue",
        "Create an issue",
        "title",
        "body",
        title="Create issue",
        outputSchema={"type": "object", "properties": {"number": {"type": "integer"}}},
        annotations={"readOnlyHint": False},
    ),
    tool("github", "list_issues", "List issues", "repo", annotations={"readOnlyHint": True}),
    tool("files", "read_file", "Read a file", "path"),
]
KEYS = [
    "status", "tools", "truncated", "catalog", "ranking", "usage", "timing_ms", "refusal", "error", "note",
]  # fmt: skip
FULL = [
    "id",
    "server",
    "name",
    "title",
    "description",
    "inputSchema",
    "outputSchema",
    "annotations",
    "rank",
    "score",
]


def served(tools: list[Tool] | None = None, **settings: Any) -> tuple[DiscoverTool, StubEngine]:
    discovery, engine = discovery_over(TOOLS if tools is None else tools, **settings)
    return DiscoverTool(discovery), engine


def call(tool: DiscoverTool, arguments: Any) -> tuple[mcp_types.CallToolResult, dict[str, Any], str]:
    result = asyncio.run(tool.call(arguments, Caller()))
    assert isinstance(result.structured_content, dict)
    (block,) = result.content
    assert isinstance(block, mcp_types.TextContent)
    jsonschema.validate(result.structured_content, tool.definition().output_schema or {})
    return result, result.structured_content, block.text


def size(value: object) -> int:
    return len(json.dumps(value, separators=(",", ":"), ensure_ascii=False))


def test_the_definition_is_flat_and_read_only() -> None:
    definition = served()[0].definition()
    dumped = definition.model_dump(by_alias=True, exclude_none=True)
    assert (dumped["name"], dumped["title"]) == ("discover_tools", "Discover tools")
    hints = dumped["annotations"]
    assert hints["readOnlyHint"] is True
    assert hints["idempotentHint"] is True
    assert hints["openWorldHint"] is False
    schema = definition.input_schema
    jsonschema.Draft202012Validator.check_schema(schema)
    assert list(schema["properties"]) == [
        "query", "limit", "detail", "servers", "exclude", "names", "read_only", "max_response_tokens",
        "min_score", "explain", "timeout_ms",
    ]  # fmt: skip
    assert schema["additionalProperties"] is False
    assert all(isinstance(value["type"], str) for value in schema["properties"].values())
    assert "anyOf" not in json.dumps(schema)
    assert "null" not in json.dumps(schema)
    limit = schema["properties"]["limit"]
    assert (limit["minimum"], limit["maximum"], limit["default"]) == (1, 20, 5)
    assert schema["properties"]["timeout_ms"]["default"] == 10_000
    assert schema["properties"]["query"]["maxLength"] == 4000
    output = definition.output_schema or {}
    jsonschema.Draft202012Validator.check_schema(output)
    assert output["type"] == "object"
    assert "anyOf" not in output
    assert output["required"] == KEYS


def test_the_definition_follows_the_site_and_the_caller() -> None:
    tool, _ = served(limit=7, min_score=0.25)
    properties = tool.definition().input_schema["properties"]
    assert (properties["limit"]["default"], properties["min_score"]["default"]) == (7, 0.25)
    guest = Caller("guest", lambda server, name: server == "files")
    assert "github" not in (tool.definition(guest).description or "")
    assert "files (1), github (2)" in (tool.definition().description or "")
    assert tool.definition() is tool.definition()
    many, _ = served([Tool(f"s{n}", "x", TOOLS[1].definition) for n in range(50)])
    assert "and 10 more servers" in (many.definition().description or "")
    assert "no tools at present" in (served([])[0].definition().description or "")


def test_a_full_answer() -> None:
    tool, _ = served()
    result, body, text = call(tool, {"query": "please create issue", "explain": True, "limit": 2})
    assert list(body) == KEYS
    assert (result.is_error, body["status"]) == (False, "matched")
    first = body["tools"][0]
    assert list(first) == [*FULL, "reason"]
    assert first["id"] == "github/create_issue"
    assert first["title"] == "Create issue"
    assert first["inputSchema"] is TOOLS[0].definition["inputSchema"]
    assert first["outputSchema"] is TOOLS[0].definition["outputSchema"]
    assert body["catalog"] == {
        "revision": tool._discovery.snapshot.catalogue.revision,
        "tools": 3,
        "indexed_at": "2026-01-02T03:04:05Z",
        "servers_missing": [],
        "servers_stale": [],
    }
    assert body["ranking"] == {"method": "bm25+score", "model": "stub", "candidates": 3, "degraded": False}
    assert body["usage"] == {
        "prompt_tokens": 70, "cached_tokens": 48, "output_tokens": 0, "pages": 3, "query_truncated": False,
    }  # fmt: skip
    assert (body["timing_ms"]["queue"], body["timing_ms"]["engine"]) == (1.25, 20.5)
    assert body["refusal"] is body["error"] is body["note"] is None
    for fact in (first["id"], "Create an issue", first["reason"], size_text(first["inputSchema"]), "number"):
        assert fact in text


def size_text(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


@pytest.mark.parametrize(
    ("detail", "keys"),
    [
        ("full", FULL),
        ("compact", ["id", "server", "name", "description", "parameters", "rank", "score"]),
        ("names", ["id", "server", "name", "rank", "score"]),
    ],
)
def test_detail_says_what_an_item_holds(detail: str, keys: list[str]) -> None:
    _, body, text = call(served()[0], {"query": "create an issue", "detail": detail})
    assert all(list(found) == keys for found in body["tools"])
    assert ("title, body" in text) == (detail == "compact")
    assert not body["truncated"]


@pytest.mark.parametrize("code", list(RefusalCode))
def test_a_refusal_has_its_numbers_in_structure_and_text(code: RefusalCode) -> None:
    tool, engine = served()
    engine.answer = refusal(code)
    result, body, text = call(tool, {"query": "x"})
    assert result.is_error
    assert (body["status"], body["tools"], body["error"]) == ("refused", [], None)
    too_large = code is RefusalCode.REQUEST_TOO_LARGE
    assert body["refusal"] == {
        "code": str(code),
        "message": "The request needs 96 pages and 71 are free.",
        "pages_needed": 96,
        "pages_free": 71,
        "pages_total": 80,
        "page_deficit": 16 if too_large else 25,
        "page_tokens": 16,
        "queue_depth": 3,
        "retry_after_ms": None if too_large else 400,
    }
    for number in ("96", "71", "80", "16" if too_large else "25", str(code)):
        assert number in text
    assert ("Do not retry" in text) == too_large
    assert ("Retry after 400 ms" in text) == (not too_large)


INVALID: list[tuple[Any, tuple[str, ...]]] = [
    (None, ("'query'", "1 to 4,000")),
    ({}, ("'query'", "required")),
    ({"query": ""}, ("'query'", "empty")),
    ({"query": " \t\n\u3000"}, ("'query'", "white space")),
    ({"query": "\u200b\u2060\x00"}, ("'query'", "white space")),
    ({"query": "x" * 4001}, ("'query'", "1 to 4,000", "4,001")),
    ({"query": None}, ("'query'", "null")),
    ({"query": 3}, ("'query'", "3")),
    ({"query": "\ud800"}, ("'query'", "Unicode")),
    ({"query": "x", "querry": "y"}, ("'querry'", "unknown", "max_response_tokens")),
    ({"query": "x", "limit": 0}, ("'limit'", "1 to 20", "0")),
    ({"query": "x", "limit": 21}, ("'limit'", "1 to 20", "21")),
    ({"query": "x", "limit": "5"}, ("'limit'", "integer", "'5'")),
    ({"query": "x", "limit": 1.5}, ("'limit'", "1.5")),
    ({"query": "x", "limit": True}, ("'limit'", "true")),
    ({"query": "x", "limit": None}, ("'limit'", "null")),
    ({"query": "x", "detail": "all"}, ("'detail'", "full, compact and names", "'all'")),
    ({"query": "x", "servers": "github"}, ("'servers'", "a list of", "'github'")),
    ({"query": "x", "servers": [["github"]]}, ("'servers'", "holds a list")),
    ({"query": "x", "exclude": [None]}, ("'exclude'", "holds null")),
    ({"names": [""]}, ("'names'", "0 characters")),
    ({"names": ["n"] * 101}, ("'names'", "at most 100", "101")),
    ({"names": []}, ("'query'", "required")),
    ({"query": "x", "read_only": "yes"}, ("'read_only'", "true or false", "'yes'")),
    ({"query": "x", "max_response_tokens": 63}, ("'max_response_tokens'", "at least 64", "63")),
    ({"query": "x", "min_score": 1.01}, ("'min_score'", "0 to 1", "it is 1.01.")),
    ({"query": "x", "min_score": float("nan")}, ("'min_score'", "it is no finite number.")),
    ({"query": "x", "explain": 1}, ("'explain'", "true or false")),
    ({"query": "x", "timeout_ms": 0}, ("'timeout_ms'", "1 to 60,000")),
    ({"query": "x", "timeout_ms": 10**400}, ("'timeout_ms'", "1 to 60,000", "more than 15 digits")),
    ({"query": {"text": "x"}, "limit": []}, ("'query'", "an object", "'limit'", "a list")),
]


@pytest.mark.parametrize(("arguments", "words"), INVALID)
def test_a_bad_argument_is_named_with_its_range(arguments: Any, words: tuple[str, ...]) -> None:
    tool, engine = served()
    result, body, text = call(tool, arguments)
    assert result.is_error
    assert (body["status"], body["tools"], body["refusal"]) == ("invalid", [], None)
    assert body["error"]["code"] == "invalid_argument"
    for word in words:
        assert word in body["error"]["message"]
    assert body["error"]["message"] in text
    assert engine.requests == []
    result.model_dump_json()


@pytest.mark.parametrize("arguments", [{"query": "x", "limit": 5.0}, {"query": "x", "min_score": 1}])
def test_json_numbers_are_taken_by_value(arguments: dict[str, Any]) -> None:
    assert not call(served()[0], arguments)[0].is_error


def test_the_longest_query_is_answered_and_said_to_be_cut() -> None:
    _, body, text = call(served()[0], {"query": "word " * 799 + "issue"})
    assert body["status"] == "matched"
    assert body["usage"]["query_truncated"]
    assert "cut to its head and tail" in text


def test_an_empty_catalogue_answers_no_match_with_its_reason() -> None:
    result, body, text = call(served([])[0], {"query": "anything"})
    assert not result.is_error
    assert (body["status"], body["note"]) == ("no_match", "The catalogue holds no tools.")
    assert body["note"] in text


def test_missing_servers_are_named_in_structure_and_text() -> None:
    _, body, text = call(served(servers_missing=["mail"])[0], {"query": "send a mail", "min_score": 0.99})
    assert (body["status"], body["catalog"]["servers_missing"]) == ("partial", ["mail"])
    assert "mail" in text


@pytest.mark.parametrize("budget", [64, 200, 300, 400, 600, 1000, 5000])
def test_a_token_budget_cuts_detail_from_the_end_and_keeps_every_name(budget: int) -> None:
    tools = [
        tool("s", f"tool_{n}", "word " * 60, *(f"p{i}" for i in range(10)), outputSchema={"type": "object"})
        for n in range(5)
    ]
    _, whole, _ = call(served(tools)[0], {"query": "word"})
    _, body, text = call(served(tools)[0], {"query": "word", "max_response_tokens": budget})
    assert [found["id"] for found in body["tools"]] == [found["id"] for found in whole["tools"]]
    names_only = [
        {key: found[key] for key in ("id", "server", "name", "rank", "score")} for found in body["tools"]
    ]
    smallest = {**body, "tools": names_only}
    assert size(body) <= max(budget * 4, size(smallest))
    assert body["truncated"] == (body["tools"] != whole["tools"]) == (size(whole) > budget * 4)
    assert ("cut to fit" in text) == body["truncated"]
    kept = [len(found) for found in body["tools"]]
    assert kept == sorted(kept, reverse=True)


def test_the_deadline_is_the_start_plus_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcp_discovery.tool.time.monotonic", lambda: 1000.0)
    tool, engine = served()
    call(tool, {"query": "x", "timeout_ms": 2500})
    call(tool, {"query": "x"})
    assert engine.deadlines == [1002.5, 1010.0]


def test_a_cancelled_call_cancels_what_it_waits_for() -> None:
    async def scenario() -> None:
        tool, engine = served()
        engine.hold = asyncio.Event()
        task = asyncio.create_task(tool.call({"query": "x"}, Caller()))
        await asyncio.wait_for(engine.entered.wait(), 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())


def test_bad_arguments_are_answered_before_the_first_await() -> None:
    coroutine = served()[0].call({"query": ""}, Caller(), lambda: pytest.fail("an invalid call has begun"))
    with pytest.raises(StopIteration) as done:
        coroutine.send(None)
    assert done.value.value.is_error


def test_a_valid_call_has_begun_before_the_first_await() -> None:
    async def scenario() -> None:
        tool, engine = served()
        engine.hold = asyncio.Event()
        begun: list[None] = []
        coroutine = tool.call({"query": "x"}, Caller(), lambda: begun.append(None))
        coroutine.send(None)
        assert len(begun) == 1
        coroutine.close()

    asyncio.run(scenario())


def test_refusals_and_errors_survive_the_wire() -> None:
    tool, engine = served()
    engine.answer = refusal()
    for arguments in ({"query": "x"}, {"query": ""}):
        result, body, _ = call(tool, arguments)
        sent = json.loads(result.model_dump_json(by_alias=True, exclude_none=True))
        assert sent["isError"] is True
        assert sent["structuredContent"] == body


def test_of_many_unknown_names_the_note_names_some_and_counts_the_rest() -> None:
    names = [f"no_such_tool_{number}" for number in range(100)]
    _, result, _ = call(served()[0], {"names": names})
    assert result["note"].count("No tool is named") == MAX_NOTES
    assert f"{100 - MAX_NOTES} more of the kind." in result["note"]
