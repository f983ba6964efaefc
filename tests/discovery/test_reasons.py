"""Reasons are the tool's own words, the nearest ones to the request, and short."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_discovery.discovery.lexical import document, terms
from mcp_discovery.discovery.reasons import MAX_SENTENCE, nearest_sentence, reason
from tests.discovery.doubles import tool

ISSUES = tool(
    "github", "create_issue", "Talks to GitHub.\n\nOpens a new issue in a repository. Needs a token.", "title"
)


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("open an issue about the crash", "Its own text says: Opens a new issue in a repository."),
        ("which token do I need", "Its own text says: Needs a token."),
        ("something with this title", "It shares title with the request and takes title."),
        ("bonjour", "Its own text says: Talks to GitHub."),
    ],
)
def test_the_nearest_sentence_is_the_reason(query: str, sentence: str) -> None:
    assert reason(ISSUES, query, 0.4) == sentence


def test_without_a_description_names_and_parameters_tell() -> None:
    bare = tool("images", "resizeImage", "", "width", "height")
    assert (
        reason(bare, "resize it to a width of 800", 0.4)
        == "It shares resize and width with the request and takes width."
    )
    assert reason(bare, "plus petit", 0.4).endswith("the model's probability that it serves is 0.40.")


def test_a_long_sentence_is_cut_between_words() -> None:
    told = nearest_sentence(tool("a", "b", "Opens issues " + "and more " * 40), "open")
    assert 140 < len(told) <= MAX_SENTENCE
    assert told.endswith((" more…", " and…"))


@given(st.text(max_size=600), st.text(max_size=60))
def test_a_sentence_is_one_short_line_of_the_tools_own_words(description: str, query: str) -> None:
    described = tool("a", "b", description)
    sentence = nearest_sentence(described, query)
    assert len(sentence) <= MAX_SENTENCE
    assert "\n" not in sentence
    assert set(terms(sentence.removesuffix("…"))) <= set(terms(document(described))) or "…" in sentence
    assert bool(sentence) == bool(description.split())
