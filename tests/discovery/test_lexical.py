"""Lexical order: terms, BM25 against its formula, masks, ties."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import mcp_discovery
from mcp_discovery.discovery.catalogue import Catalogue
from mcp_discovery.discovery.lexical import (
    STOP_WORDS,
    LexicalIndex,
    document,
    parameter_names,
    split_words,
    terms,
)
from mcp_discovery.discovery.sources.files import load
from tests.discovery.doubles import tool


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("createIssue", ["create", "issue"]),
        ("bitable_v1_appTableRecord_search", ["bitable", "v1", "app", "table", "record", "search"]),
        ("backend__action.do-it", ["backend", "action", "do"]),
        ("HTTPServer can read the JSON", ["http", "server", "read", "json"]),
        ("Café RÉSUMÉ", ["cafe", "resume"]),
        ("ｆｕｌｌ　ｗｉｄｔｈ", ["full", "width"]),
        ("天气", ["天", "气", "天气"]),
        ("searchの天気API", ["search", "の", "天", "気", "の天", "天気", "api"]),
        ("서울 날씨", ["서", "울", "서울", "날", "씨", "날씨"]),
        ("Создать задачу", ["создать", "задачу"]),
        ("Größe ändern", ["grosse", "andern"]),
        ("मौसम की", ["मौसम", "की"]),
        ("!!! ___ \u200b", []),
    ],
)
def test_terms(text: str, expected: list[str]) -> None:
    assert terms(text) == expected


@given(st.text("abAB1_-. '", max_size=12))
@example("bAb")
def test_case_splits_words_wherever_it_changes(text: str) -> None:
    words = re.findall("[a-z0-9]+", split_words(text).lower())
    assert terms(text) == [word for word in words if word not in STOP_WORDS]


def test_parameter_names_go_four_levels_deep_through_objects_and_arrays() -> None:
    leaf = {"type": "object", "properties": {"e": {}}}
    for name in ("d", "c", "b"):
        leaf = {"type": "object", "properties": {name: {"type": "array", "items": leaf}}}
    assert list(parameter_names({"properties": {"a": {"properties": {"x": {}}}}})) == ["a", "x"]
    assert list(parameter_names(leaf)) == ["b", "c"]
    assert list(parameter_names({"properties": "odd", "items": 3})) == []


def brute_force(documents: list[list[str]], query: list[str]) -> list[float]:
    """BM25 as Lucene computes it, term by term."""
    average = sum(map(len, documents)) / len(documents)
    scores = []
    for held in documents:
        score = 0.0
        for term in query:
            holding = sum(term in other for other in documents)
            idf = math.log(1 + (len(documents) - holding + 0.5) / (holding + 0.5))
            frequency = held.count(term)
            score += idf * frequency / (frequency + 1.5 * (1 - 0.75 + 0.75 * len(held) / average))
        scores.append(score)
    return scores


WORDS = st.sampled_from(["a", "b", "c", "d", "e"])


@given(st.lists(st.lists(WORDS, max_size=8), min_size=1, max_size=12), st.lists(WORDS, max_size=6))
def test_scores_agree_with_the_formula(documents: list[list[str]], query: list[str]) -> None:
    scores = LexicalIndex(documents).scores(query)
    np.testing.assert_allclose(scores, brute_force(documents, query) if any(documents) else 0.0, atol=1e-5)


def test_scores_are_those_of_bm25s() -> None:
    import bm25s

    folder = Path(mcp_discovery.__file__).parent / "data" / "demo"
    documents = [terms(document(tool)) for tool in load([folder]).tools]
    other = bm25s.BM25(k1=1.5, b=0.75, method="lucene")
    other.index(documents, create_empty_token=False, show_progress=False)
    index = LexicalIndex(documents)
    for query in ("create an issue", "list the files of a repository", "what time is it"):
        known = [term for term in terms(query) if term in other.vocab_dict]
        np.testing.assert_allclose(index.scores(terms(query)), other.get_scores(known), rtol=1e-4, atol=1e-5)


@given(
    st.lists(st.lists(WORDS, max_size=6), min_size=1, max_size=20),
    st.lists(WORDS, min_size=1, max_size=4),
    st.integers(1, 25),
    st.randoms(use_true_random=False),
)
def test_what_is_out_of_sight_changes_no_score_and_no_order(documents, query, most, random) -> None:  # type: ignore[no-untyped-def]
    index = LexicalIndex(documents)
    mask = np.array([random.random() < 0.7 for _ in documents])
    visible = np.flatnonzero(mask)
    alone = LexicalIndex([documents[position] for position in visible])
    asked = list(dict.fromkeys(term for term in query if term != "a"))  # "a" is a stop word
    scores = index.scores(asked, mask)
    np.testing.assert_allclose(scores[visible], alone.scores(asked), atol=1e-6)
    assert not scores[~mask].any()
    expected = [p for p in range(len(documents)) if scores[p] > 0]
    expected.sort(key=lambda p: (-scores[p], p))
    assert index.order(" ".join(query), mask, most) == expected[:most]


def test_nothing_indexed_and_nothing_asked_give_nothing() -> None:
    assert LexicalIndex([]).order("x", np.ones(0, bool), 5) == []
    assert LexicalIndex([[], []]).order("x", np.ones(2, bool), 5) == []
    assert LexicalIndex([["x"]]).order("the of", np.ones(1, bool), 5) == []


@pytest.mark.parametrize(
    ("query", "best"),
    [
        ("天气预报", "weather-zh"),
        ("今日の天気", "weather-ja"),
        ("날씨 알려줘", "weather-ko"),
        ("прогноз погоды", "weather-ru"),
        ("حالة الطقس", "weather-ar"),
        ("Wetter für Zürich", "weather-de"),
        ("พยากรณ์อากาศ", "weather-th"),
    ],
)
def test_a_request_finds_the_tool_of_its_language(query: str, best: str) -> None:
    texts = {
        "zh": "查询城市天气预报",
        "ja": "都市の天気を調べる",
        "ko": "도시의 날씨를 조회합니다",
        "ru": "Получить прогноз погоды в городе",
        "ar": "الحصول على حالة الطقس",
        "de": "Das Wetter einer Stadt",
        "th": "ดูพยากรณ์อากาศของเมือง",
        "en": "Get the forecast of a city",
    }
    catalogue = Catalogue.of([tool("s", f"weather-{language}", text) for language, text in texts.items()])
    order = LexicalIndex.of(catalogue.tools).order(query, np.ones(len(catalogue), bool), 8)
    assert catalogue.tools[order[0]].name == best


def test_a_document_holds_server_name_description_and_parameters() -> None:
    assert document(tool("srv", "doIt", "Does it.", "whoKnows")) == "srv doIt Does it. whoKnows"
