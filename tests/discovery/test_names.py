"""Tools named by a query or by the `names` argument."""

from __future__ import annotations

import unicodedata

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mcp_discovery.discovery.catalogue import Catalogue
from mcp_discovery.discovery.names import _SEPARATORS, NameIndex, name_key
from tests.discovery.doubles import tool

CATALOGUE = Catalogue.of(
    [
        tool("editor", "find_symbol"),
        tool("editor", "find_referencing_symbols"),
        tool("github", "create_issue"),
        tool("github", "list_issues"),
        tool("jira", "create_issue"),
        tool("crm", "addPerson"),
        tool("crm", "addActivity"),
        tool("web", "search"),
        tool("web", "a-b-c"),
        tool("mail", "email"),
        tool("codex", "mcp__codex__ask_codex"),
        tool("lark", "bitable_v1_appTableRecord_search"),
        tool("twins", "a_b"),
        tool("twins", "a-b"),
        tool("地图", "查询天气"),
    ]
)
INDEX = NameIndex(CATALOGUE.tools)
ALL = np.ones(len(CATALOGUE), dtype=bool)


def found(query: str) -> list[str]:
    return [CATALOGUE.tools[position].id for position in INDEX.find(query, ALL)]


@pytest.mark.parametrize(
    "query",
    [
        "find_symbol",
        "find symbol",
        "Find Symbol",
        "find-symbol",
        "findSymbol",
        "FIND_SYMBOL",
        "find.symbol",
        "  `find_symbol`. ",
        '"find symbol"',
        "editor.find_symbol",
        "editor/find_symbol",
        "editor__find_symbol",
        "editor:find_symbol",
        "editor find symbol",
        "mcp__editor__find_symbol",
        "ｆｉｎｄ_symbol",
        "please use find_symbol here",
        "Use findSymbol, then stop.",
        "what does editor.find_symbol do?",
    ],
)
def test_a_name_is_found_however_it_is_written(query: str) -> None:
    assert found(query) == ["editor/find_symbol"]


@pytest.mark.parametrize(
    ("query", "ids"),
    [
        ("ask_codex", ["codex/mcp__codex__ask_codex"]),
        ("ask codex", ["codex/mcp__codex__ask_codex"]),
        ("call ask_codex now", ["codex/mcp__codex__ask_codex"]),
        ("search", ["web/search"]),
        ("Search?", ["web/search"]),
        ("a-b-c", ["web/a-b-c"]),
        ("run a-b-c twice", ["web/a-b-c"]),
        ("查询天气", ["地图/查询天气"]),
        ("create_issue", ["github/create_issue", "jira/create_issue"]),
        ("jira.create_issue", ["jira/create_issue"]),
        ("a_b", ["twins/a_b", "twins/a-b"]),
        ("a-b", ["twins/a-b", "twins/a_b"]),
        ("addPerson", ["crm/addPerson"]),
        ("search, email and find symbol", ["web/search", "mail/email", "editor/find_symbol"]),
        ("use list_issues and addActivity", ["github/list_issues", "crm/addActivity"]),
        ("list_issues\naddPerson\nsearch", ["github/list_issues", "crm/addPerson", "web/search"]),
    ],
)
def test_names_lists_and_unique_suffixes(query: str, ids: list[str]) -> None:
    assert found(query) == ids


@pytest.mark.parametrize(
    "query",
    [
        "search the web for cats",
        "find the symbol in this file",
        "send an e-mail to Anna",
        "an email and a search of the house",
        "symbol",
        "find_symbl",
        "symbols and issues",
        "",
        "   ",
        "___",
        "-",
        "...",
        "https://example.org/search",
        "create",
    ],
)
def test_ordinary_words_and_misspelt_names_name_nothing(query: str) -> None:
    assert found(query) == []


def test_a_product_is_not_the_end_of_a_tools_name() -> None:
    catalogue = Catalogue.of([tool("x", "export_as_cyclone_dx")])
    assert NameIndex(catalogue.tools).find("Export it in CycloneDX format", np.ones(1, bool)) == []


def test_what_the_mask_hides_cannot_be_named_and_does_not_make_a_name_ambiguous() -> None:
    mask = ALL.copy()
    mask[CATALOGUE.positions["jira/create_issue"]] = False
    assert [CATALOGUE.tools[p].id for p in INDEX.find("create_issue", mask)] == ["github/create_issue"]
    assert INDEX.find("jira.create_issue", mask) == []
    hidden = INDEX.resolve(["jira/create_issue"], mask).problems[0]
    unknown = INDEX.resolve(["jira/create_issuf"], mask).problems[0]
    assert hidden.replace("create_issue'", "create_issuf'") == unknown
    assert INDEX.resolve(["create_issue"], mask).problems == ()


def test_resolution_keeps_the_order_asked_for_and_returns_each_tool_once() -> None:
    resolved = INDEX.resolve(["search", "github/list_issues", "web.search", "listIssues"], ALL)
    assert [CATALOGUE.tools[p].id for p in resolved.positions] == ["web/search", "github/list_issues"]
    assert resolved.problems == ()


def test_an_ambiguous_name_is_named_with_its_choices() -> None:
    resolved = INDEX.resolve(["create_issue"], ALL)
    assert resolved.positions == ()
    assert resolved.problems == (
        "'create_issue' is ambiguous: name one of github/create_issue, jira/create_issue.",
    )


@pytest.mark.parametrize("misspelt", ["find_symbl", "find_symbols", "findsymbool", "editor/find_symbl"])
def test_a_misspelt_name_gets_a_suggestion_and_never_another_tool(misspelt: str) -> None:
    resolved = INDEX.resolve([misspelt], ALL)
    assert resolved.positions == ()
    assert "editor/find_symbol" in resolved.problems[0]
    assert found(misspelt) == []


def test_a_suffix_is_suggested_where_an_exact_name_is_asked_for() -> None:
    resolved = INDEX.resolve(["ask_codex"], ALL)
    assert resolved.positions == ()
    assert "codex/mcp__codex__ask_codex" in resolved.problems[0]


@given(st.text(st.characters(max_codepoint=127)) | st.text())
@example("".join(map(chr, range(128))))
def test_a_key_is_the_same_whatever_way_it_is_made(name: str) -> None:
    assert name_key(name) == _SEPARATORS.sub("", unicodedata.normalize("NFKC", name).casefold())
