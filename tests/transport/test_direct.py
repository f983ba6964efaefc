"""The way past the SDK beside the SDK's own: whatever comes, the same answer, call and count."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import mcp_types as types
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_discovery.observe.accounting import Accounting
from mcp_discovery.transport import direct
from mcp_discovery.transport.app import create_app
from mcp_discovery.transport.direct import DirectCalls
from mcp_discovery.transport.identity import Caller
from tests.clients.raw import (
    ERAS,
    LEGACY,
    MODERN,
    call_message,
    connect,
    headers,
    message,
    request_bytes,
)
from tests.transport.serving import WAIT_S, EchoTool, Served
from tests.transport.test_app import hostile_bodies

Fields = Sequence[tuple[bytes, bytes]]


class Recorder(EchoTool):
    """An `EchoTool` that keeps the arguments, and echoes them beside what JSON can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Any] = []

    async def call(self, arguments: Any, caller: Caller, begin: Any) -> types.CallToolResult:
        self.asked.append(arguments)
        result = await super().call(arguments, caller, begin)
        more = {"none": None, "deep": {"a": [None, {}, 1.5, -0.0, 1e300, "é \u2028 😀"]}, "big": 1 << 70}
        result.structured_content = {**(result.structured_content or {}), **more, "arguments": arguments}
        if arguments == {"query": "half a pair"}:
            result.structured_content["echo"] = "\ud800"
        return result


@dataclass
class Side:
    """One app, and what it has seen."""

    direct: bool
    tool: Recorder = field(default_factory=Recorder)
    accounting: Accounting = field(default_factory=Accounting)

    def __post_init__(self) -> None:
        self.app = create_app(self.tool, accounting=self.accounting, direct=self.direct)

    async def post(self, body: bytes, fields: Fields, query: bytes = b"") -> tuple[int, dict[str, str], Any]:
        """Status, headers and the body as JSON where it is."""
        sent: list[Any] = []
        parts = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if parts:
                return parts.pop()
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
            "scheme": "https", "path": "/mcp", "raw_path": b"/mcp", "root_path": "", "query_string": query,
            "headers": [(b"content-length", b"%d" % len(body)), *fields],
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 443), "state": {"connection": "tls-1"},
        }  # fmt: skip
        await self.app(scope, receive, send)
        start, *rest = sent
        content = b"".join(part.get("body", b"") for part in rest)
        told = {name.decode().lower(): value.decode() for name, value in start["headers"]}
        assert told.pop("content-length", str(len(content))) == str(len(content))
        try:
            return start["status"], told, json.loads(content)
        except ValueError:
            return start["status"], told, content


class Both:
    """The same request to both sides; what comes back is held against each other."""

    def __init__(self) -> None:
        self.ours, self.theirs = Side(direct=True), Side(direct=False)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Both]:
        async with AsyncExitStack() as held:
            for side in (self.ours, self.theirs):
                await held.enter_async_context(side.app.router.lifespan_context(side.app))
            yield self

    async def post(self, body: bytes | dict[str, Any], fields: Fields, query: bytes = b"") -> int:
        content = json.dumps(body).encode() if isinstance(body, dict) else body
        ours = await self.ours.post(content, fields, query)
        assert ours == await self.theirs.post(content, fields, query)
        assert self.ours.tool.asked == self.theirs.tool.asked
        assert self.ours.accounting.counts() == self.theirs.accounting.counts()
        return ours[0]


def fields_of(era: str, **changed: str | None) -> list[tuple[bytes, bytes]]:
    """The headers of a call; a value of None leaves one out."""
    named = {"host": "127.0.0.1:8443", "user-agent": "test", **headers(era)}
    named |= {name.replace("_", "-"): value for name, value in changed.items()}  # type: ignore[misc]
    return [(name.encode(), value.encode("latin-1")) for name, value in named.items() if value is not None]


@pytest.fixture
def learnt(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each message that could go past the SDK, whether it did."""
    found: list[bool] = []
    frame = DirectCalls.frame

    def watched(self: DirectCalls, parsed: direct.Parsed) -> direct.Frame | None:
        found.append((known := frame(self, parsed)) is not None)
        return known

    monkeypatch.setattr(DirectCalls, "frame", watched)
    return found


@pytest.mark.parametrize("era", [*ERAS, "2025-06-18", "2025-03-26"])
def test_the_second_message_of_an_envelope_goes_past_the_sdk(era: str, learnt: list[bool]) -> None:
    async def main() -> None:
        async with Both().running() as both:
            for query in ("one", "two", "refuse", "break", 5, "é😀"):
                assert await both.post(call_message(era, query), fields_of(era)) == 200
            assert both.ours.accounting.counts().as_json()["received"] == 5

    asyncio.run(main())
    assert learnt == [False, *[True] * 5]


@pytest.mark.parametrize("era", ERAS)
def test_half_a_surrogate_pair_in_a_result_is_escaped(era: str) -> None:
    """The one difference: in the older revisions the SDK ends such a call with a fault of the server."""

    async def main() -> None:
        async with Both().running() as both:
            await both.post(call_message(era, "x"), fields_of(era))
            body = json.dumps(call_message(era, "half a pair")).encode()
            status, _, told = await both.ours.post(body, fields_of(era))
            assert (status, told["result"]["structuredContent"]["echo"]) == (200, "\ud800")
            assert ((await both.theirs.post(body, fields_of(era)))[0] == 200) == (era == MODERN)

    asyncio.run(main())


@pytest.mark.parametrize("era", ERAS)
def test_an_envelope_that_the_sdk_refuses_is_never_learnt(era: str, learnt: list[bool]) -> None:
    async def main() -> None:
        async with Both().running() as both:
            for _ in range(2):
                unknown = message(era, "tools/call", {"name": "nope", "arguments": {}})
                await both.post(unknown, fields_of(era, mcp_name="nope" if era == MODERN else None))
                await both.post(call_message(era, "x"), fields_of(era, host="evil.example.org"))
                await both.post(call_message(era, "break"), fields_of(era))

    asyncio.run(main())
    assert learnt == [False] * 6


METAS: dict[str, Any] = {
    "none": None,
    "null": {"io.modelcontextprotocol/clientCapabilities": None},
    "another revision": {"io.modelcontextprotocol/protocolVersion": LEGACY},
    "capabilities a list": {"io.modelcontextprotocol/clientCapabilities": []},
    "capabilities": {"io.modelcontextprotocol/clientCapabilities": {"sampling": {}}},
    "capability a number": {"io.modelcontextprotocol/clientCapabilities": {"sampling": 5}},
    "client": {"io.modelcontextprotocol/clientInfo": {"name": "x", "version": "1"}},
    "client a number": {"io.modelcontextprotocol/clientInfo": 5},
    "token": {"progressToken": "p"},
    "token an object": {"progressToken": {}},
    "more": {"example.org/more": [1, {"a": None}]},
}


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize("name", METAS)
def test_a_meta_that_differs_is_the_sdks_to_judge(era: str, name: str) -> None:
    async def main() -> None:
        async with Both().running() as both:
            body, fields = call_message(era, "x"), fields_of(era, accept="application/json")
            await both.post(body, fields)
            changed = call_message(era, "x")
            if METAS[name] is None:
                changed["params"].pop("_meta", None)
            else:
                changed["params"]["_meta"] = {**changed["params"].get("_meta", {}), **METAS[name]}
            for _ in range(2):
                await both.post(changed, fields)
            await both.post(body, fields)

    asyncio.run(main())


def test_what_is_unusual_is_left_to_the_sdk() -> None:
    whole, scope = call_message(MODERN, "x"), {"headers": fields_of(MODERN), "query_string": b""}
    calls = DirectCalls()

    def parsed(**changed: Any) -> direct.Parsed | None:
        return calls.parse(scope, json.dumps({**whole, **changed}).encode())

    def of_params(**changed: Any) -> direct.Parsed | None:
        return parsed(params={**whole["params"], **changed})

    plain = parsed()
    assert plain is not None
    assert (plain.id, plain.arguments) == (1, {"query": "x"})
    assert of_params(arguments={"names": ["a", "b"]}) is not None
    assert parsed(more=1) is None
    assert of_params(more=1) is None
    assert of_params(arguments={"query": {"a": 1}}) is None
    assert of_params(arguments={"query": [["a"]]}) is None
    assert of_params(_meta={"progressToken": 1}) is None
    assert of_params(arguments={"query": "x" * direct.MAX_BODY_BYTES}) is None
    deep = json.dumps(whole).replace('"_meta": {', '"_meta": {"a": ' + "[" * 20_000 + "]" * 20_000 + ", ")
    assert calls.parse(scope, deep.encode()) is None
    other = calls.parse({**scope, "query_string": b"a=b"}, json.dumps(whole).encode())
    assert other is not None
    assert other.envelope != plain.envelope


VARIANTS: dict[str, dict[str, str | None]] = {
    "host": {"host": "evil.example.org"},
    "no host": {"host": None},
    "origin": {"origin": "https://evil.example.org"},
    "type": {"content_type": "text/plain"},
    "no accept": {"accept": None},
    "accepts html": {"accept": "text/html"},
    "another era": {"mcp_protocol_version": "2031-01-01"},
    "no era": {"mcp_protocol_version": None},
    "the other era": {"mcp_protocol_version": LEGACY},
    "method": {"mcp_method": "tools/list"},
    "no method": {"mcp_method": None},
    "name": {"mcp_name": "nope"},
    "session": {"mcp_session_id": "abc"},
    "parameter": {"mcp_param_query": "x"},
    "user agent": {"user_agent": "another"},
    "trace": {"traceparent": "00-1-2-01"},
}


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_header_that_differs_is_the_sdks_to_judge(era: str, name: str) -> None:
    async def main() -> None:
        async with Both().running() as both:
            body = call_message(era, "x")
            assert [await both.post(body, fields_of(era)) for _ in range(2)] == [200, 200]
            changed = fields_of(era, **VARIANTS[name])
            await both.post(body, changed)
            await both.post(body, changed)
            repeated = [*fields_of(era), *(f for f in changed if f not in fields_of(era))]
            await both.post(body, repeated)
            await both.post(body, fields_of(era), b"a=b")

    asyncio.run(main())


@pytest.mark.parametrize("era", ERAS)
def test_hostile_bodies_after_a_good_one(era: str) -> None:
    async def main() -> None:
        async with Both().running() as both:
            await both.post(call_message(era, "x"), fields_of(era))
            for body in hostile_bodies().values():
                await both.post(body, fields_of(era))
            whole = json.dumps(call_message(era, "x"))
            for old, new in (
                ('"id": 1', '"id": 1.0'), ('"id": 1', '"id": true'), ('"id": 1', '"id": "a\\u00e9"'),
                ('"id": 1', '"id": 1, "id": 2'), ('"id": 1', f'"id": {1 << 70}'), ('"id": 1', '"id": -0'),
                ('"2.0"', '"1.0"'), ('"2.0"', '"2.\\u0030"'), ('"id": 1', '"id": 1, "x": 1'),
                ('"x"', "1e400"), ('"x"', "[[1]]"), ('"x"', '"\\ud83d\\ude00"'), ('"x"', "9" * 5000),
                ('"query"', '"query": "y", "query"'), ("}", " }"), ('"arguments"', '"more": 1, "arguments"'),
                ("discover_tools", "discover_tool\\u0073"), ('"x"', "[" * 300 + "]" * 300),
            ):  # fmt: skip
                assert old in whole
                await both.post(whole.replace(old, new, 1).encode(), fields_of(era))
                await both.post(whole.replace(old, new, 1).encode(), fields_of(era))

    asyncio.run(main())


flat = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
values = st.recursive(flat, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner))


@settings(max_examples=60, deadline=None)
@given(
    era=st.sampled_from(ERAS),
    calls=st.lists(
        st.tuples(
            st.integers() | st.text(max_size=5),
            st.dictionaries(st.sampled_from(["query", "names", "é"]), values) | st.none() | st.integers(),
            st.booleans(),
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_any_id_and_any_arguments(era: str, calls: list[tuple[int | str, Any, bool]]) -> None:
    async def main() -> None:
        async with Both().running() as both:
            for number, arguments, escaped in calls:
                body = call_message(era, "x") | {"id": number}
                body["params"] = {**body["params"], "arguments": arguments}
                if arguments is None:
                    del body["params"]["arguments"]
                await both.post(json.dumps(body, ensure_ascii=escaped).encode("utf-8"), fields_of(era))

    asyncio.run(main())


def test_envelopes_are_kept_in_bounds(monkeypatch: pytest.MonkeyPatch, learnt: list[bool]) -> None:
    monkeypatch.setattr(direct, "MAX_ENVELOPES", 2)
    long = "x" * direct.MAX_ENVELOPE_BYTES

    async def main() -> None:
        async with Both().running() as both:
            for tag in ("a", "b", "a", "c", "a", "b"):
                await both.post(call_message(MODERN, "x"), fields_of(MODERN, x_tag=tag))
            await both.post(call_message(MODERN, "x"), fields_of(MODERN, x_tag=long))

    asyncio.run(main())
    assert learnt == [False, False, True, False, True, False]


@pytest.mark.parametrize("era", ERAS)
def test_a_client_that_hangs_up_past_the_sdk_is_cancelled(
    fresh: Served, era: str, learnt: list[bool]
) -> None:
    with connect(fresh.host, fresh.port, fresh.ca) as tls:
        tls.sendall(request_bytes(era, call_message(era, "first"), fresh.host))
        assert tls.recv(1 << 16).startswith(b"HTTP/1.1 200")
        tls.sendall(request_bytes(era, call_message(era, "hold"), fresh.host))
        assert fresh.tool.started.wait(WAIT_S)
    assert fresh.tool.cancelled.wait(WAIT_S)
    assert learnt == [False, True]
    counts = fresh.run(fresh.accounting.counts)
    assert (counts.received, counts.cancelled, counts.answered, counts.in_flight) == (2, 1, 1, 0)
