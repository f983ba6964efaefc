"""Whatever servers do, in whatever order, an answer holds tools of the revision that it names, and no other.

A model keeps, by revision, what each tool's definition was; it is built from what the servers were told
to serve, and shares nothing with the code under test but the revision's name.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mcp_discovery.discovery.sources.parts import Merger, Part
from mcp_discovery.discovery.sources.server import judged
from mcp_discovery.discovery.sources.specs import Spec, Stdio
from mcp_discovery.tool import DiscoverTool
from mcp_discovery.transport.identity import Caller
from tests.discovery.doubles import discovery_over

SERVERS = ("mail", "notes", "web")
NAMES = st.sampled_from(["find", "find_all", "send", "sendAll", "read", "drop"])
WORDS = ("mail", "note", "page", "all", "new")
INVALID = {"name": "broken", "inputSchema": {"type": "array"}}


@st.composite
def definitions(draw: st.DrawFn) -> dict[str, Any]:
    name = draw(NAMES)
    words = draw(st.lists(st.sampled_from(WORDS), max_size=3))
    parameter = draw(st.sampled_from(["", "address", "page"]))
    schema = {"type": "object", "properties": {parameter: {"type": "string"}} if parameter else {}}
    return {"name": name, "description": " ".join(words), "inputSchema": schema}


LISTS = st.lists(definitions(), max_size=5, unique_by=lambda definition: definition["name"])
QUERIES = st.one_of(
    st.lists(st.sampled_from([*WORDS, "find", "send", "read"]), min_size=1, max_size=3).map(" ".join),
    st.tuples(st.sampled_from(SERVERS), NAMES).map("/".join),
)


class LiveCatalogue(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.discovery, self.engine = discovery_over([])
        self.tool = DiscoverTool(self.discovery)
        self.merger = Merger()
        self.parts: dict[str, Part] = {}
        self.served: dict[str, dict[str, dict[str, Any]]] = {}  # the model: server -> name -> definition
        self.missing: set[str] = set()
        self.stale: set[str] = set()
        self.published: dict[str, dict[str, str]] = {}  # revision -> id -> definition
        self.waiting: tuple[asyncio.Task[Any], asyncio.Event] | None = None
        self.publish()

    def teardown(self) -> None:
        if self.waiting is not None:
            self.release()
        self.runner.close()

    # --- what servers do ----------------------------------------------------------------------

    @rule(server=st.sampled_from(SERVERS), tools=LISTS, broken=st.booleans())
    def list_tools(self, server: str, tools: list[dict[str, Any]], broken: bool) -> None:
        spec = Spec(server, f"mcp.json {server!r}", Stdio("x"), (), server)
        before = self.parts.get(server, Part(spec.entry, {server: ()}))
        sent = json.loads(json.dumps([*([INVALID] if broken else []), *tools]))
        self.parts[server] = replace(judged(spec, sent, before), presence="listed", listed_at=1.0)
        self.served[server] = {tool["name"]: tool for tool in tools}
        self.missing.discard(server)
        self.stale.discard(server)

    @rule(server=st.sampled_from(SERVERS), name=NAMES, other=NAMES)
    def rename_tool(self, server: str, name: str, other: str) -> None:
        tools = dict(self.served.get(server, {}))
        if name in tools and other not in tools:
            tools[other] = {**tools.pop(name), "name": other}
            self.list_tools(server, list(tools.values()), broken=False)

    @rule(server=st.sampled_from(SERVERS), other=st.sampled_from(SERVERS))
    def rename_server(self, server: str, other: str) -> None:
        tools = list(self.served.get(server, {}).values())
        if other not in self.parts:
            self.take_out(server)
            self.list_tools(other, tools, broken=False)
            self.publish()

    @rule(server=st.sampled_from(SERVERS), name=NAMES, words=st.sampled_from(WORDS))
    def reword(self, server: str, name: str, words: str) -> None:
        """The same tool with another text."""
        tools = dict(self.served.get(server, {}))
        if name in tools:
            tools[name] = {**tools[name], "description": words}
            self.list_tools(server, list(tools.values()), broken=False)

    @rule(server=st.sampled_from(SERVERS))
    def fail(self, server: str) -> None:
        """It does not answer: its last list is served where there is one."""
        part = self.parts.get(server)
        if part is None:
            self.parts[server] = Part(server, {server: ()}, presence="missing")
            self.missing.add(server)
        elif server not in self.missing:
            self.parts[server] = replace(part, presence="stale")
            self.stale.add(server)

    @rule(server=st.sampled_from(SERVERS))
    def take_out(self, server: str) -> None:
        """It is no longer configured."""
        self.parts.pop(server, None)
        self.served.pop(server, None)
        self.missing.discard(server)
        self.stale.discard(server)

    @rule()
    def publish(self) -> None:
        catalogue = self.merger.catalogue([self.parts[server] for server in sorted(self.parts)])
        held = {
            f"{server}/{name}": json.dumps(tool, sort_keys=True)
            for server, tools in self.served.items()
            for name, tool in tools.items()
        }
        known = self.published.setdefault(catalogue.revision, held)
        assert known == held, "one revision names two different catalogues"
        assert len({json.dumps(sorted(each.items())) for each in self.published.values()}) == len(
            self.published
        ), "two revisions name one catalogue"
        self.discovery.replace(self.discovery.index(catalogue))
        self.last_missing, self.last_stale = sorted(self.missing), sorted(self.stale)

    # --- what callers do ----------------------------------------------------------------------

    @rule(query=QUERIES)
    @precondition(lambda self: self.waiting is None)
    def ask(self, query: str) -> None:
        result = self.runner.run(self.tool.call({"query": query, "limit": 20, "min_score": 0}, Caller()))
        self.check(result.structured_content)
        catalog = result.structured_content["catalog"]  # type: ignore[index]
        assert self.published[catalog["revision"]] is self.published[self.now]
        assert catalog["servers_missing"] == self.last_missing
        assert set(catalog["servers_stale"]) <= set(self.last_stale)
        found = {tool["id"] for tool in result.structured_content["tools"]}  # type: ignore[index]
        if query in self.published[self.now]:
            assert query in found

    @rule(query=QUERIES)
    @precondition(lambda self: self.waiting is None)
    def ask_slowly(self, query: str) -> None:
        """A call that is under way while the catalogue changes."""

        async def begin() -> tuple[asyncio.Task[Any], asyncio.Event]:
            self.engine.hold = held = asyncio.Event()
            self.engine.entered.clear()
            arguments = {"query": query, "limit": 20, "min_score": 0}
            call = asyncio.ensure_future(self.tool.call(arguments, Caller()))
            entered = asyncio.ensure_future(self.engine.entered.wait())
            await asyncio.wait({call, entered}, return_when=asyncio.FIRST_COMPLETED)
            entered.cancel()
            return call, held

        self.waiting = self.runner.run(begin())

    @rule()
    @precondition(lambda self: self.waiting is not None)
    def release(self) -> None:
        assert self.waiting is not None
        call, held = self.waiting

        async def end() -> Any:
            held.set()
            return await call

        self.check(self.runner.run(end()).structured_content)
        self.engine.hold, self.waiting = None, None

    # --- what must hold -----------------------------------------------------------------------

    @property
    def now(self) -> str:
        return self.discovery.snapshot.catalogue.revision

    def check(self, body: dict[str, Any] | None) -> None:
        """Each tool is in the revision that the answer names, with the definition it had there."""
        assert body is not None
        assert body["status"] in ("matched", "no_match", "partial")
        held = self.published[body["catalog"]["revision"]]
        assert body["catalog"]["tools"] == len(held)
        told = [tool["id"] for tool in body["tools"]]
        told += [f"{other}/{tool['name']}" for tool in body["tools"] for other in tool.get("also_on", [])]
        assert len(set(told)) == len(told)
        for tool in body["tools"]:
            definition = json.loads(held[tool["id"]])
            assert tool["inputSchema"] == definition["inputSchema"]
            assert tool["description"] == definition["description"]
            for other in tool.get("also_on", []):
                assert held[f"{other}/{tool['name']}"] == held[tool["id"]]
        # At most 20 are offered and there are at most 15: with nothing refused, everything is found.
        assert sorted(told) == sorted(held)

    @invariant()
    def what_the_model_reads_is_what_is_there(self) -> None:
        """The prompt at each position is that of the tool at this position."""
        snapshot = self.discovery.snapshot
        for position, tool in enumerate(snapshot.catalogue.tools):
            text = self.engine.tokenizer.decode(snapshot.prefix(position))
            words = text.partition("Tool:")[2].partition("\n")[0].split(":")
            assert words[0].strip() == tool.server
            assert words[1].replace(" ", "") == tool.name.replace("_", "").lower()


TestLiveCatalogue = LiveCatalogue.TestCase
TestLiveCatalogue.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
