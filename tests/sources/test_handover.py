"""Catalogues that one process follows and another takes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import anyio
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_discovery.discovery.catalogue import Catalogue
from mcp_discovery.discovery.handover import HandedOver, Received
from mcp_discovery.discovery.live import Sources
from tests.sources.world import QUICK, Seen, StdioServer, definition, ids_of, mcp_json


def test_others_get_what_the_owner_has_and_keep_what_has_not_changed(tmp_path: Path) -> None:
    one, two = (StdioServer(tmp_path, name, [definition("a"), {"name": "bad"}]) for name in ("one", "two"))
    config, folder = mcp_json(tmp_path, {"one": one.entry, "two": two.entry}), tmp_path / "handover"

    async def test() -> None:
        owner = Seen(HandedOver(Sources([config], timing=QUICK), folder))
        other = Seen(Received(Sources([config]), folder, look_s=0.01))
        async with anyio.create_task_group() as group:
            group.start_soon(owner.sources.run, owner)
            group.start_soon(other.sources.run, other)
            first = await other.until_ids("one/a", "two/a")
            one.set([definition("a"), definition("b")])
            one.tell()
            second = await other.until_ids("one/a", "one/b", "two/a")
            assert second.groups["two"] is first.groups["two"]
            two.kill()
            await other.until_presence("two", "stale")
            await owner.until_presence("two", "stale")
            assert other.last.revision == owner.last.revision
            assert {state.server for state in other.sources.states()} == {"one", "two"}
            assert list(other.sources.problems) == list(owner.sources.problems) != []
            await other.until(lambda _: len(list((folder / "groups").iterdir())) == 2)
            group.cancel_scope.cancel()

    asyncio.run(test())


def test_a_follower_that_finds_nothing_starts_with_the_files(tmp_path: Path) -> None:
    path = tmp_path / "tools.jsonl"
    path.write_text(json.dumps({"server": "fs", **definition("a")}))
    received = Received(Sources([path]), tmp_path / "nothing")
    assert ids_of(received.load()) == ["fs/a"]


def test_a_catalogue_that_cannot_be_read_is_taken_when_it_can(tmp_path: Path) -> None:
    tools, folder = tmp_path / "tools.jsonl", tmp_path / "handover"
    tools.write_text(json.dumps({"server": "fs", **definition("a")}))
    (folder / "catalogue.json").mkdir(parents=True)  # there, and an OSError for who reads it
    received = Received(Sources([tools]), folder, look_s=0.01)
    assert ids_of(received.load()) == ["fs/a"]

    async def test() -> None:
        other = Seen(received)
        async with anyio.create_task_group() as group:
            group.start_soon(received.run, other)
            await anyio.sleep(0)
            (folder / "catalogue.json").rmdir()
            tools.write_text(json.dumps({"server": "fs", **definition("b")}))
            HandedOver(Sources([tools]), folder).load()
            await other.until_ids("fs/b")
            group.cancel_scope.cancel()

    asyncio.run(test())


def test_what_an_earlier_owner_left_is_removed(tmp_path: Path) -> None:
    tools, folder = tmp_path / "tools.jsonl", tmp_path / "handover"

    def own(*servers: str) -> None:
        tools.write_text("\n".join(json.dumps({"server": server, **definition("a")}) for server in servers))
        HandedOver(Sources([tools]), folder).load()

    own("one", "two")
    assert len(list((folder / "groups").iterdir())) == 2
    for path in (folder, folder / "groups"):  # killed as it wrote
        (path / ".list-half").write_text("[{")
    own("two")
    assert len(list((folder / "groups").iterdir())) == 1
    assert sorted(file.name for file in folder.iterdir()) == ["catalogue.json", "groups"]
    assert ids_of(Received(Sources([tools]), folder).load()) == ["two/a"]


GROUPS = st.dictionaries(
    st.sampled_from(["a", "b", "c/d"]), st.sets(st.sampled_from(["x", "y", "z"]), min_size=1), max_size=3
)


class Given:
    """A source of catalogues that are given."""

    problems = ()

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue

    def load(self) -> Catalogue:
        return self.catalogue

    def states(self) -> list[Any]:
        return []

    async def run(self, on_catalogue: Any) -> None:
        raise NotImplementedError


@settings(max_examples=30, deadline=None)
@given(st.lists(GROUPS, min_size=1, max_size=6))
def test_each_revision_arrives_as_it_was(tmp_path_factory: Any, revisions: list[dict[str, set[str]]]) -> None:
    folder = tmp_path_factory.mktemp("handover")
    source = Given(Catalogue.of(()))
    owner = HandedOver(source, folder)
    received = Received(source, folder)
    for groups in revisions:
        found = [
            {"server": server, **definition(name, str(len(names)))}
            for server, names in groups.items()
            for name in names
        ]
        path = folder / "tools.json"
        path.write_text(json.dumps(found))
        source.catalogue = Sources([path]).load()
        left = owner.load()
        taken = received.load()
        assert taken.revision == left.revision
        assert [tool.definition for tool in taken.tools] == [tool.definition for tool in left.tools]
        assert taken.states == left.states
