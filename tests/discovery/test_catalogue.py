"""Catalogues: order, revision, duplicates."""

from __future__ import annotations

import random

import pytest

from mcp_discovery.discovery.catalogue import Catalogue, Found, distinct
from tests.discovery.doubles import tool

TOOLS = [tool("b", "one"), tool("a", "two", "text"), tool("a", "one"), tool("c", "工具", "中文")]


def test_the_same_tools_have_the_same_order_and_revision_whatever_order_they_come_in() -> None:
    shuffled = list(TOOLS)
    random.Random(1).shuffle(shuffled)
    first, second = Catalogue.of(TOOLS), Catalogue.of(shuffled)
    assert [tool.id for tool in first.tools] == ["a/one", "a/two", "b/one", "c/工具"]
    assert first.tools == second.tools
    assert first.revision == second.revision
    assert first.revision.startswith("sha256:")
    assert len(first.revision) == len("sha256:") + 64


@pytest.mark.parametrize(
    "changed",
    [
        tool("a", "two", "other text"),
        tool("a", "two", "text", "parameter"),
        tool("a", "two", "text", annotations={"readOnlyHint": True}),
        tool("a", "two", "text", unknownField=1),
        tool("z", "two", "text"),
    ],
)
def test_any_change_of_a_definition_changes_the_revision(changed: object) -> None:
    assert Catalogue.of([TOOLS[0], TOOLS[1]]).revision != Catalogue.of([TOOLS[0], changed]).revision  # type: ignore[list-item]


def test_positions_and_servers_index_the_tools() -> None:
    catalogue = Catalogue.of(TOOLS)
    for position, held in enumerate(catalogue.tools):
        assert catalogue.positions[held.id] == position
        assert position in catalogue.servers[held.server]
    assert sum(map(len, catalogue.servers.values())) == len(catalogue) == 4


def test_two_tools_of_one_id_are_no_catalogue() -> None:
    with pytest.raises(ValueError, match="distinct"):
        Catalogue.of([tool("a", "b/c"), tool("a/b", "c")])


def test_identical_repeats_collapse_and_of_conflicting_ones_the_first_is_served() -> None:
    first, same, other = tool("a", "x", "one"), tool("a", "x", "one"), tool("a", "x", "two")
    elsewhere = tool("b", "x", "one")
    found = [Found(first, "f:1"), Found(same, "f:2"), Found(other, "f:3"), Found(elsewhere, "f:4")]
    tools, problems = distinct(found)
    assert tools == [first, elsewhere]
    assert [(problem.entry, problem.kept) for problem in problems] == [("f:2", True), ("f:3", False)]
    assert "f:1" in problems[0].sentence
    assert "f:1" in problems[1].sentence


def test_a_read_only_tool_says_so_with_true_and_nothing_else() -> None:
    assert tool("a", "x", annotations={"readOnlyHint": True}).read_only
    for hints in ({"readOnlyHint": "true"}, {"readOnlyHint": 1}, {"readOnlyHint": False}, {}, None):
        assert not tool("a", "x", annotations=hints).read_only
