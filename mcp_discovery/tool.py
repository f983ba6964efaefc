"""`discover_tools`: the only place that builds results.

Every result is one object whatever came of the call, so that refusals and errors fit the published
output schema too, and a text block that carries the same facts for clients that show only text.
"""

from __future__ import annotations

import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import mcp_types as types
from pydantic import BaseModel

from engine.errors import EngineError, Refusal, RefusalCode
from engine.request import Failed
from mcp_discovery.arguments import Arguments, input_schema, parse, tidy
from mcp_discovery.discovery.call import DiscoverResult, Pick
from mcp_discovery.discovery.scope import some
from mcp_discovery.discovery.select import Discovery
from mcp_discovery.discovery.snapshot import Snapshot
from mcp_discovery.pace import Pace
from mcp_discovery.transport.identity import Caller, Visibility

logger = logging.getLogger(__name__)

NAME = "discover_tools"
CHARACTERS_PER_TOKEN = 4
MAX_SERVERS_DESCRIBED = 40
MAX_DEFINITIONS = 64  # published definitions kept, one for each visibility
MAX_NOTES = 8  # sentences of a note; more are counted
BRIEF = 120  # characters of a description that was cut to fit

Status = Literal["matched", "no_match", "partial", "refused", "failed", "invalid"]
Level = Literal["full", "input", "compact", "brief", "names"]
LEVELS: tuple[Level, ...] = ("full", "input", "compact", "brief", "names")
"""What an item holds, most first; `max_response_tokens` goes down this list, last item first."""


class FoundTool(BaseModel):
    """A tool, its definition exactly as its server gave it. What `detail` leaves out is absent."""

    id: str
    server: str
    name: str
    title: str | None = None
    description: str | None = None
    parameters: list[str] | None = None
    inputSchema: dict[str, Any] | None = None
    outputSchema: dict[str, Any] | None = None
    annotations: dict[str, Any] | None = None
    rank: int
    score: float
    reason: str | None = None
    also_on: list[str] | None = None


class CatalogInfo(BaseModel):
    revision: str
    tools: int
    indexed_at: str
    servers_missing: list[str]
    servers_stale: list[str]


class RankingInfo(BaseModel):
    method: str
    model: str
    candidates: int
    degraded: bool


class UsageInfo(BaseModel):
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    pages: int
    query_truncated: bool


class TimingInfo(BaseModel):
    queue: float
    retrieve: float
    engine: float
    total: float


class RefusalInfo(BaseModel):
    code: str
    message: str
    pages_needed: int
    pages_free: int
    pages_total: int
    page_deficit: int
    page_tokens: int
    queue_depth: int
    retry_after_ms: int | None


class ErrorInfo(BaseModel):
    code: str
    message: str


class Result(BaseModel):
    """The one object of every answer, refusal and error."""

    status: Status
    tools: list[FoundTool]
    truncated: bool
    catalog: CatalogInfo
    ranking: RankingInfo
    usage: UsageInfo
    timing_ms: TimingInfo
    refusal: RefusalInfo | None
    error: ErrorInfo | None
    note: str | None


class DiscoverTool:
    """The tool as the transport sees it: its definition, and a call to its result."""

    def __init__(self, discovery: Discovery) -> None:
        self._discovery = discovery
        settings = discovery.settings
        self._input_schema = input_schema(limit=settings.limit, min_score=settings.min_score)
        self._output_schema: dict[str, Any] = tidy(Result.model_json_schema())
        self.answers = 0
        self.answer_tokens = 0  # of all answers together
        self._pace = Pace()
        self._defined_for: Snapshot | None = None
        self._definitions: OrderedDict[Visibility, types.Tool] = OrderedDict()

    def definition(self, caller: Caller | None = None) -> types.Tool:
        """What `tools/list` publishes. It names the servers that `caller` may see, with tool counts."""
        snapshot, sees = self._discovery.snapshot, (caller or Caller()).sees
        if self._defined_for is not snapshot:
            self._defined_for = snapshot
            self._definitions.clear()
        definition = self._definitions.get(sees)
        if definition is None:
            definition = self._definitions[sees] = types.Tool(
                name=NAME,
                title="Discover tools",
                description=describe(snapshot.servers_seen(snapshot.visible(sees))),
                input_schema=self._input_schema,
                output_schema=self._output_schema,
                annotations=types.ToolAnnotations(
                    title="Discover tools", read_only_hint=True, idempotent_hint=True, open_world_hint=False
                ),
            )
            if len(self._definitions) > MAX_DEFINITIONS:
                self._definitions.popitem(last=False)
        return definition

    async def call(
        self, arguments: dict[str, Any] | None, caller: Caller, begin: Callable[[], None] = lambda: None
    ) -> types.CallToolResult:
        """The result of one call. Bad arguments are found before the first await, and `begin` is called
        where there are none."""
        started = time.monotonic()
        parsed = parse(arguments)
        if isinstance(parsed, str):
            return self._invalid(parsed, caller, started)
        begin()
        deadline = started + parsed.timeout_ms / 1000.0
        await self._pace.turn()
        try:
            result = await self._discovery.discover(parsed.request, caller, deadline)
        except EngineError as error:
            logger.error("the engine failed a call: %s", error)
            result = self._empty("failed", caller, Failed("engine", str(error)))
        except Exception:
            # An internal fault must never pass for "no tool fits", nor show its traceback to a caller.
            logger.exception("a call failed")
            message = "An internal fault ended the call; it is logged, and the same call may work later."
            result = self._empty("failed", caller, Failed("internal", message))
        return self._rendered(result.status, result, parsed, started)

    def _empty(self, status: Literal["failed"], caller: Caller, failure: Failed) -> DiscoverResult:
        snapshot = self._discovery.snapshot
        visible = int(snapshot.visible(caller.sees).sum())
        return DiscoverResult(status, snapshot.catalogue, visible, (), failure=failure)

    def _invalid(self, sentence: str, caller: Caller, started: float) -> types.CallToolResult:
        result = self._empty("failed", caller, Failed("invalid_argument", sentence))
        return self._rendered("invalid", result, Arguments(), started)

    def _rendered(
        self, status: Status, result: DiscoverResult, arguments: Arguments, started: float
    ) -> types.CallToolResult:
        levels: list[Level] = [arguments.detail] * len(result.picks)
        structured = self._structured(status, result, started)
        if arguments.max_response_tokens is not None:
            room = arguments.max_response_tokens * CHARACTERS_PER_TOKEN - _size(structured)
            fitting = fit(result.picks, levels, room)
            structured["truncated"] = fitting != levels
            levels = fitting
        structured["tools"] = [
            item(pick, rank, level)
            for rank, (pick, level) in enumerate(zip(result.picks, levels, strict=True), start=1)
        ]
        text = text_of(structured, result, levels)
        if status in ("matched", "partial", "no_match"):
            self.answers += 1
            self.answer_tokens += len(text) // CHARACTERS_PER_TOKEN
        return types.CallToolResult(
            content=[types.TextContent(type="text", text=text)],
            structured_content=structured,
            is_error=status in ("refused", "failed", "invalid"),
        )

    def _structured(self, status: Status, result: DiscoverResult, started: float) -> dict[str, Any]:
        """The result object without its tools."""
        usage, timing, refusal, failure = result.usage, result.timing, result.refusal, result.failure
        return {
            "status": status,
            "tools": [],
            "truncated": False,
            "catalog": {
                "revision": result.catalogue.revision,
                "tools": result.visible_tools,
                "indexed_at": result.catalogue.indexed_at,
                "servers_missing": list(result.servers_missing),
                "servers_stale": list(result.servers_stale),
            },
            "ranking": {
                "method": result.method,
                "model": self._discovery.model,
                "candidates": result.candidates,
                "degraded": result.degraded,
            },
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "cached_tokens": usage.cached_tokens,
                "output_tokens": usage.output_tokens,
                "pages": usage.pages,
                "query_truncated": result.query_truncated,
            },
            "timing_ms": {
                "queue": round(timing.queue_ms, 2),
                "retrieve": round(result.retrieve_ms, 2),
                "engine": round(timing.run_ms, 2),
                "total": round((time.monotonic() - started) * 1000.0, 2),
            },
            "refusal": None if refusal is None else refusal_object(refusal),
            "error": None if failure is None else {"code": failure.code, "message": failure.message},
            "note": _note(result.notes),
        }


def refusal_object(refusal: Refusal) -> dict[str, Any]:
    """A refusal with all its numbers."""
    return {
        "code": str(refusal.code),
        "message": refusal.message,
        "pages_needed": refusal.pages_needed,
        "pages_free": refusal.pages_free,
        "pages_total": refusal.pages_total,
        "page_deficit": refusal.page_deficit,
        "page_tokens": refusal.page_tokens,
        "queue_depth": refusal.queue_depth,
        "retry_after_ms": refusal.retry_after_ms,
    }


def describe(servers: dict[str, int]) -> str:
    """The tool's description: what it does in two sentences, then what is behind it."""
    largest = sorted(servers, key=lambda name: (-servers[name], name))
    shown = sorted(largest[:MAX_SERVERS_DESCRIBED])
    listed = ", ".join(f"{name} ({servers[name]})" for name in shown)
    more = f" and {len(servers) - len(shown)} more servers" if len(servers) > len(shown) else ""
    total = f"{_count(sum(servers.values()), 'tool')} of {_count(len(servers), 'server')}"
    return (
        f"Finds the tools that serve a task among {total}, and returns their definitions, the most fitting "
        "first. Call it when no tool at hand does what is needed, then call the tools that it returns, on "
        "their own servers and under their own names."
        + (f" Servers, with tool counts: {listed}{more}." if servers else " There are no tools at present.")
    )


def item(pick: Pick, rank: int, level: Level) -> dict[str, Any]:
    """One entry of `tools`."""
    tool = pick.tool
    found: dict[str, Any] = {"id": tool.id, "server": tool.server, "name": tool.name}
    if level in ("full", "input"):
        found["title"] = tool.title
        found["description"] = tool.description
        found["inputSchema"] = tool.input_schema
        if level == "full":
            found["outputSchema"] = tool.output_schema
        found["annotations"] = tool.annotations
    elif level == "compact":
        found["description"] = tool.description
        found["parameters"] = list(tool.parameters)
    elif level == "brief":
        found["description"] = _cut(tool.description)
    found["rank"] = rank
    found["score"] = round(pick.score, 4)
    if pick.reason is not None:
        found["reason"] = pick.reason
    if pick.also_on:
        found["also_on"] = list(pick.also_on)
    return found


def fit(picks: Sequence[Pick], levels: Sequence[Level], room: int) -> list[Level]:
    """The most that `picks` may hold so that their items take at most `room` characters of JSON.

    All go down one level, last first, before any goes down the next; names are never dropped.
    """
    chosen = list(levels)
    sizes = [
        _size(item(pick, rank, level)) + 1
        for rank, (pick, level) in enumerate(zip(picks, levels, strict=True), 1)
    ]
    for target in LEVELS:
        for index in reversed(range(len(picks))):
            if sum(sizes) <= room:
                return chosen
            if LEVELS.index(chosen[index]) < LEVELS.index(target):
                smaller = _size(item(picks[index], index + 1, target)) + 1
                if smaller < sizes[index]:
                    chosen[index], sizes[index] = target, smaller
    return chosen


def text_of(structured: dict[str, Any], result: DiscoverResult, levels: Sequence[Level]) -> str:
    """The facts of a result for a reader of text: what was found or why not, and what to do next."""
    return "\n".join(_lines(structured, result, levels))


def _lines(structured: dict[str, Any], result: DiscoverResult, levels: Sequence[Level]) -> Iterator[str]:
    status, error = structured["status"], structured["error"]
    if error is not None:
        yield f"{'Invalid call' if status == 'invalid' else 'Failed'} ({error['code']}): {error['message']}"
        return
    if result.refusal is not None:
        yield from _refused(structured["refusal"])
        return
    catalog = structured["catalog"]
    among = f"of {_count(catalog['tools'], 'tool')} (catalogue {catalog['revision'][:19]})"
    if result.picks:
        yield f"{_count(len(result.picks), 'tool')} {among}, the most fitting first:"
    else:
        yield f"No tool {among} was found to serve this."
    for entry, pick, level in zip(structured["tools"], result.picks, levels, strict=True):
        yield from _item_lines(entry, pick, level)
    if structured["note"]:
        yield structured["note"]
    if result.servers_missing:
        yield f"Servers missing at present: {some(result.servers_missing)}."
    if result.servers_stale:
        yield f"Servers not answering at present, searched as last known: {some(result.servers_stale)}."
    if structured["usage"]["query_truncated"]:
        yield "The query was cut to its head and tail for the model."
    if structured["truncated"]:
        yield "Definitions were cut to fit max_response_tokens."
    yield _next_step(result, levels)


def _item_lines(entry: dict[str, Any], pick: Pick, level: Level) -> Iterator[str]:
    # White space is folded so that no description can pose as further lines of this text.
    cut = level not in ("full", "input", "compact")
    description = " ".join(entry.get("description", "").split()) if cut else pick.tool.description_line
    head = f"{entry['rank']}. {entry['id']} (score {entry['score']:g})"
    yield f"{head}: {description}" if description else head
    if pick.reason is not None:
        yield f"   reason: {pick.reason}"
    if pick.also_on:
        yield f"   the same tool on: {some(pick.also_on)}"
    if level in ("full", "input"):
        for label, value in pick.tool.details:
            if level == "full" or label != "output schema":
                yield f"   {label}: {value}"
    elif level == "compact":
        yield f"   parameters: {', '.join(' '.join(name.split()) for name in entry['parameters']) or 'none'}"


def _note(notes: Sequence[str]) -> str | None:
    """The sentences of an answer as one text; of many, such as a hundred unknown names, the first ones."""
    more = len(notes) - MAX_NOTES
    shown = [*notes[:MAX_NOTES], *([f"{more} more of the kind."] if more > 0 else [])]
    return " ".join(shown) or None


def _refused(refusal: dict[str, Any]) -> Iterator[str]:
    yield f"Refused ({refusal['code']}): {refusal['message']}"
    yield (
        f"Pages needed {refusal['pages_needed']}, free {refusal['pages_free']}, in all "
        f"{refusal['pages_total']}, short {refusal['page_deficit']}, of {refusal['page_tokens']} tokens; "
        f"requests waiting {refusal['queue_depth']}."
    )
    if refusal["code"] == RefusalCode.REQUEST_TOO_LARGE:
        yield "Do not retry: it can never fit. A shorter query or names may."
    elif refusal["retry_after_ms"] is not None:
        yield f"Retry after {refusal['retry_after_ms']} ms. This does not mean that no tool serves the task."
    elif refusal["code"] == RefusalCode.DEADLINE:
        yield "Retry with a larger timeout_ms. This does not mean that no tool serves the task."
    else:
        yield "Retry later. This does not mean that no tool serves the task."


def _next_step(result: DiscoverResult, levels: Sequence[Level]) -> str:
    if not result.picks:
        return "Say the task in other words or go on without a tool; the same call gives the same answer."
    if any(level not in ("full", "input") for level in levels):
        return f"Call {NAME} with names=[...] for whole definitions; then call each tool on its own server."
    return f"Call a tool on its own server under its own name; {NAME} finds tools and does not call them."


def _cut(text: str) -> str:
    return text if len(text) <= BRIEF else text[: BRIEF - 1] + "…"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _size(value: object) -> int:
    """Characters of compact JSON."""
    return len(json.dumps(value, separators=(",", ":"), ensure_ascii=False))
