"""The catalogue follows live servers and files, whatever they do."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mcp_discovery.discovery.sources.server as server_module
from mcp_discovery.discovery.sources.server import LiveServer, Timing, Turns
from mcp_discovery.discovery.sources.specs import Spec, Stdio
from mcp_discovery.discovery.sources.stored import ListStore
from tests.sources.world import (
    PATIENCE_S,
    QUICK,
    StdioServer,
    definition,
    following,
    ids_of,
    mcp_json,
    state_of,
)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


def test_all_pages_come_with_definitions_untouched_and_without_invalid_ones(tmp_path: Path) -> None:
    odd = definition(
        "odd",
        title="Odd",
        outputSchema={"type": "object", "$defs": {"a": {"$ref": "https://example.org/b.json"}}},
        annotations={"readOnlyHint": True, "x": None},
        _meta={"z": [1.5, "é工\u200b"]},
        unknown={"kept": True},
    )
    invalid = {"name": "bad", "inputSchema": {"type": "object", "properties": {"a": {"type": "any"}}}}
    tools = [definition("b"), invalid, odd, 5, definition("a"), definition("a", "again")]
    server = StdioServer(tmp_path, "one", tools, page=2)

    async def test() -> None:
        async with following([mcp_json(tmp_path, {"one": server.entry})]) as seen:
            catalogue = await seen.until_ids("one/a", "one/b", "one/odd")
            found = catalogue.tools[catalogue.positions["one/odd"]]
            assert json.dumps(found.definition) == json.dumps(odd)
            assert state_of(catalogue, "one").tools == 3
            told = [str(problem) for problem in seen.sources.problems]
            assert len(told) == 3
            assert "one tools[1]: inputSchema is not a valid JSON Schema" in told[0]
            assert "one tools[3]: a tool must be an object" in told[1]
            assert "one tools[5]: 'one/a' is listed twice" in told[2]

    run(test)


def test_a_change_that_the_server_tells_of_is_a_new_revision(tmp_path: Path) -> None:
    server = StdioServer(tmp_path, "one", [definition("a"), definition("b")])

    async def test() -> None:
        async with following([mcp_json(tmp_path, {"one": server.entry})]) as seen:
            before = await seen.until_ids("one/a", "one/b")
            server.set([definition("b"), definition("c")])
            server.tell()
            after = await seen.until_ids("one/b", "one/c")
            assert after.revision != before.revision
            kept = after.tools[after.positions["one/b"]]  # neither validated nor embedded again
            assert kept is before.tools[before.positions["one/b"]]

    run(test)


class Told(ListStore):
    """Tells when the list of one server has been confirmed."""

    def __init__(self, folder: Path, server: str) -> None:
        super().__init__(folder)
        self.has_confirmed = anyio.Event()
        self._server = server

    def confirm(self, spec: Spec) -> None:
        super().confirm(spec)
        if spec.name == self._server:
            anyio.from_thread.run_sync(self.has_confirmed.set)


def test_word_of_a_change_that_is_none_makes_no_catalogue(tmp_path: Path) -> None:
    server, other = StdioServer(tmp_path, "one", [definition("a")]), StdioServer(tmp_path, "two")

    async def test() -> None:
        path = mcp_json(tmp_path, {"one": server.entry, "two": other.entry})
        store = Told(tmp_path / "lists", "one")
        async with following([path], gather_s=0.0, store=store) as seen:
            await seen.until(lambda catalogue: not catalogue.servers_missing)
            count = len(seen.catalogues)
            first = seen.sources.states()[0].listed_at
            server.tell()
            with anyio.fail_after(PATIENCE_S):
                await store.has_confirmed.wait()
            assert seen.sources.states()[0].listed_at != first
            other.set([definition("b")])
            other.tell()
            await seen.until_ids("one/a", "two/b")
            assert len(seen.catalogues) == count + 1

    run(test)


def test_a_server_that_tells_nothing_is_listed_at_intervals(tmp_path: Path) -> None:
    server = StdioServer(tmp_path, "one", [definition("a")], tells=False)
    timing = dataclasses.replace(QUICK, refresh_s=0.05)

    async def test() -> None:
        async with following([mcp_json(tmp_path, {"one": server.entry})], timing=timing) as seen:
            await seen.until_ids("one/a")
            server.set([definition("b")], tells=False)
            await seen.until_ids("one/b")

    run(test)


def test_a_server_that_lists_its_tools_and_ends_is_started_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Ended:
        """A session that is over once its tools are listed."""

        has_ended, tells_of_changes = True, False

        async def tools(self, timeout_s: float) -> list[dict[str, Any]]:
            return [definition("a")]

        async def wait(self, timeout_s: float) -> None: ...

    @contextlib.asynccontextmanager
    async def open_session(spec: Spec, timeout_s: float) -> AsyncIterator[Ended]:
        yield Ended()

    class Recorded(Timing):
        """Waits for nothing, and ends after a few attempts."""

        def delay(self, failures: int, random_: float) -> float:
            delays.append(failures)
            if len(delays) == 4:
                raise EOFError
            return 0.0

    delays: list[int] = []
    monkeypatch.setattr(server_module, "open_session", open_session)
    spec = Spec("one", "mcp.json 'one'", Stdio("one"), (), "one")
    live = LiveServer(
        spec, Turns(1, 1.0), anyio.CapacityLimiter(1), lambda: None, timing=Recorded(), store=None
    )
    with pytest.raises(EOFError):
        asyncio.run(live.run())
    assert delays == [1, 2, 3, 4]
    assert Timing().failures_after(7, served_s=61.0) == 0


def test_a_killed_server_is_marked_its_tools_stay_and_it_comes_back(tmp_path: Path) -> None:
    server = StdioServer(tmp_path, "one", [definition("a")])

    async def test() -> None:
        async with following([mcp_json(tmp_path, {"one": server.entry})]) as seen:
            await seen.until_ids("one/a")
            server.set([definition("a")], exit=True, stderr="the licence has run out")
            server.kill()
            state = await seen.until_presence("one", "stale")
            assert ids_of(seen.last) == ["one/a"]
            assert seen.last.servers_stale == ("one",)
            assert not seen.last.servers_missing
            assert state.error
            await seen.until(lambda catalogue: "licence" in state_of(catalogue, "one").error)
            server.set([definition("a"), definition("b")])
            await seen.until_presence("one", "listed")
            assert ids_of(seen.last) == ["one/a", "one/b"]
            assert seen.last.servers_stale == ()

    run(test)


def test_servers_that_cannot_be_had_are_missing_with_the_reason_and_delay_nobody(tmp_path: Path) -> None:
    servers: dict[str, Any] = {
        "absent": {"command": "no-such-program-anywhere"},
        "ends": StdioServer(tmp_path, "ends", exit=True, stderr="no key").entry,
        "endless": StdioServer(tmp_path, "endless", [definition("x")], endless=True).entry,
        "mute": StdioServer(tmp_path, "mute", waits=True).entry,
        "refused": {"url": "http://127.0.0.1:1/mcp"},
        "unset": {"command": "x", "env": {"KEY": "${NOT_SET_ANYWHERE}"}},
        "works": StdioServer(tmp_path, "works", [definition("a")], prints="no message").entry,
    }
    timing = dataclasses.replace(QUICK, at_once=1, patience_s=0.1)

    async def test() -> None:
        async with following([mcp_json(tmp_path, servers)], timing=timing, environment={}) as seen:
            await seen.until_ids("works/a")
            assert state_of(seen.last, "mute").presence == "missing"
            assert seen.last.servers_missing == ("absent", "endless", "ends", "mute", "refused", "unset")
            for server, words in (
                ("absent", "not installed or not on the PATH"),
                ("ends", "its last words were: no key"),
                ("endless", "leads back to a page"),
                ("refused", "cannot be reached"),
                ("unset", "the environment variable NOT_SET_ANYWHERE is not set"),
                ("mute", "has not answered yet"),
            ):
                await seen.until(lambda now, s=server, w=words: w in state_of(now, s).error)  # type: ignore[misc]

    run(test)


def test_a_server_that_does_not_answer_in_time_is_given_up_and_tried_again(tmp_path: Path) -> None:
    server = StdioServer(tmp_path, "mute", waits=True)
    timing = dataclasses.replace(QUICK, connect_timeout_s=0.5)

    async def test() -> None:
        async with following([mcp_json(tmp_path, {"mute": server.entry})], timing=timing) as seen:
            await seen.until(lambda now: "did not answer in time" in state_of(now, "mute").error)

    run(test)


def test_the_last_good_list_serves_as_stale_until_the_server_answers(tmp_path: Path) -> None:
    server = StdioServer(tmp_path, "one", [definition("a")])
    config, store = mcp_json(tmp_path, {"one": server.entry}), ListStore(tmp_path / "lists")

    async def first() -> None:
        async with following([config], store=store) as seen:
            await seen.until_ids("one/a")
            with anyio.fail_after(PATIENCE_S):
                await seen.sources.tried()

    async def second() -> None:
        async with following([config], store=store) as seen:
            at_start = seen.catalogues[0]
            assert ids_of(at_start) == ["one/a"]
            state = state_of(at_start, "one")
            assert (state.presence, state.tools) == ("stale", 1)
            assert state.listed_at is not None
            await seen.until_presence("one", "listed")
            await seen.until_ids("one/b")

    run(first)
    server.set([definition("b")])
    run(second)


def test_a_damaged_stored_list_counts_as_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = StdioServer(tmp_path, "one", [definition("a")])
    config, store = mcp_json(tmp_path, {"one": server.entry}), ListStore(tmp_path / "lists")

    async def test() -> None:
        async with following([config], store=store) as seen:
            await seen.until_ids("one/a")
            with anyio.fail_after(PATIENCE_S):
                await seen.sources.tried()

    run(test)
    (file,) = (tmp_path / "lists").iterdir()
    assert file.stat().st_mode & 0o077 == 0
    for content in (b"{", b"[]", b'{"tools": 5}', b"\xff"):
        file.write_bytes(content)
        caplog.clear()
        run(test)
        assert "cannot be used" in caplog.text


def test_files_are_watched_and_a_broken_edit_does_not_lose_what_was_there(tmp_path: Path) -> None:
    folder = tmp_path / "tools"
    folder.mkdir()
    line = json.dumps({"server": "fs", **definition("a")})
    (folder / "one.jsonl").write_text(line)

    async def test() -> None:
        async with following([folder]) as seen:
            assert ids_of(seen.last) == ["fs/a"]
            (folder / "two.json").write_text(json.dumps([{"server": "web", **definition("b")}]))
            await seen.until_ids("fs/a", "web/b")
            (folder / "two.json").write_text("[{")
            state = await seen.until_presence("web", "stale")
            assert "not JSON" in state.error
            assert ids_of(seen.last) == ["fs/a", "web/b"]
            (folder / "two.json").write_text(json.dumps([{"server": "web", **definition("changed")}]))
            await seen.until_ids("fs/a", "web/changed")
            (folder / "one.jsonl").unlink()
            await seen.until_ids("web/changed")

    run(test)


def test_servers_come_and_go_with_the_configuration(tmp_path: Path) -> None:
    one, two = (StdioServer(tmp_path, name, [definition("a")]) for name in ("one", "two"))

    async def test() -> None:
        async with following([mcp_json(tmp_path, {"one": one.entry})]) as seen:
            await seen.until_ids("one/a")
            pid = one.pid
            mcp_json(tmp_path, {"one": one.entry, "two": two.entry})
            await seen.until_ids("one/a", "two/a")
            assert one.pid == pid  # what is configured as before goes on
            mcp_json(tmp_path, {"two": two.entry, "one": {**one.entry, "disabled": True}})
            await seen.until_ids("two/a")
            renamed = StdioServer(tmp_path, "other", [definition("b")])
            mcp_json(tmp_path, {"two": renamed.entry})
            await seen.until_ids("two/b")

    run(test)


def test_one_tool_name_on_two_servers_is_two_tools(tmp_path: Path) -> None:
    entries = {
        name: StdioServer(tmp_path, name, [definition("search", about)]).entry
        for name, about in (("mail", "Searches mail"), ("web", "Searches the web"))
    }

    async def test() -> None:
        async with following([mcp_json(tmp_path, entries)]) as seen:
            await seen.until_ids("mail/search", "web/search")

    run(test)


@given(st.integers(0, 200), st.floats(0, 1))
def test_delays_grow_from_the_first_to_the_longest_with_half_of_each_left_to_chance(
    failures: int, chance: float
) -> None:
    timing = Timing(first_delay_s=0.5, longest_delay_s=60.0)
    full = min(60.0, 0.5 * 2**failures)
    assert full / 2 <= timing.delay(failures, chance) <= full


def test_a_servers_log_is_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    lines = "\n".join(["x" * 5000] * 2000 + ["last"])
    server = StdioServer(tmp_path, "loud", stderr=lines, exit=True)

    async def test() -> None:
        async with following([mcp_json(tmp_path, {"loud": server.entry})]) as seen:
            await seen.until(lambda now: "its last words were: last" in state_of(now, "loud").error)

    run(test)
    first = [record.getMessage() for record in caplog.records if record.name.endswith("child")]
    assert 0 < len(first[0]) < 400
    assert any("not logged" in line for line in first)
