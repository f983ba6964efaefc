"""Evaluation: the metrics by hand, the sampling, the baseline, the report."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from mcp_discovery.discovery.catalogue import Catalogue
from mcp_discovery.discovery.prompts import Prompts
from mcp_discovery.discovery.select import Discovery, DiscoverySettings
from mcp_discovery.evaluate import (
    METRICS,
    RANKERS,
    Baseline,
    LabelledSet,
    Report,
    baseline_terms,
    evaluate,
    metrics_of,
)
from tests.discovery.doubles import StubEngine, WordTokenizer, by_shared_words, refusal, tool

SCHEMA = {"type": "object", "properties": {}}


def entry(name: str, description: str = "", server: str = "s") -> dict[str, Any]:
    return {"server": server, "name": name, "description": description, "inputSchema": SCHEMA}


def folder(path: Path, tools: list[Any], queries: list[Any]) -> Path:
    for name, lines in (("catalogue", tools), ("queries", queries)):
        text = "\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
        (path / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return path


def small_set(path: Path) -> Path:
    tools = [entry("read_file", "Read a file"), entry("send_mail", "Send mail"), entry("forecast", "Weather")]
    queries = [
        {"id": "1", "query": "read this file", "relevant": ["s/read_file"]},
        {"id": "2", "query": "send it by mail", "relevant": ["s/send_mail"]},
        {"id": "3", "query": "will it rain", "relevant": ["s/forecast"]},
    ]
    return folder(path, tools, queries)


def run(
    path: Path,
    engine: StubEngine | None = None,
    limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    **settings: Any,
) -> Report:
    engine = engine or StubEngine(WordTokenizer())

    def discovery_of(catalogue: Catalogue) -> Discovery:
        return Discovery(
            engine, Prompts(engine.tokenizer), catalogue, DiscoverySettings(**settings), model="stub"
        )

    return asyncio.run(evaluate(path, discovery_of, limit, progress))


def test_metrics_of_one_label() -> None:
    assert set(metrics_of([["b"]], ["a", "b"])) == set(METRICS)
    assert set(metrics_of([["a"]], ["a", "b"]).values()) == {1.0}
    third = metrics_of([["c"]], ["a", "b", "c"])
    assert (third["hit@1"], third["R@1"], third["R@5"], third["C@5"]) == (0, 0, 1, 1)
    assert third["nDCG@5"] == third["nDCG@10"] == pytest.approx(0.5)
    assert set(metrics_of([["x"]], ["a", "b"]).values()) == {0.0}
    assert set(metrics_of([["x"]], []).values()) == {0.0}


def test_metrics_of_several_labels_with_alternatives() -> None:
    values = metrics_of([["a"], ["x", "c"], ["y"]], ["a", "b", "c"])
    assert values["hit@1"] == 1
    assert values["R@1"] == pytest.approx(1 / 3)
    assert values["R@5"] == pytest.approx(2 / 3)
    assert values["C@10"] == 0
    ideal = 1 + 1 / math.log2(3) + 1 / 2
    assert values["nDCG@5"] == pytest.approx((1 + 1 / 2) / ideal)
    seven = metrics_of([[str(n)] for n in range(7)], [str(n) for n in range(7)])
    assert seven["nDCG@5"] == pytest.approx(1.0)
    assert seven["C@5"] == 0


def test_a_large_set_is_sampled_as_the_protocol_says(tmp_path: Path) -> None:
    queries = [{"id": str(n), "query": f"q {n}", "relevant": ["s/a"]} for n in range(1100)]
    path = folder(tmp_path, [entry("a")], queries)
    expected = [query["id"] for query in random.Random(13).sample(queries, 1000)]
    assert [query.id for query in LabelledSet.load(path).queries] == expected
    fewer = [query["id"] for query in random.Random(13).sample(queries, 10)]
    assert [query.id for query in LabelledSet.load(path, 10).queries] == fewer


def test_the_baseline_keeps_file_order_for_equals_and_splits_as_defined() -> None:
    assert baseline_terms("appTableRecord of the é工 X2") == ["app", "table", "record", "é", "工", "x2"]
    tools = [tool("z", "last"), tool("a", "first"), tool("m", "sendMail", "Mail it")]
    baseline = Baseline(tools)
    assert baseline.order("send mail") == ["m/sendMail", "z/last", "a/first"]
    assert baseline.order("nothing known") == ["z/last", "a/first", "m/sendMail"]


def test_a_report_holds_every_ranker_over_the_same_queries(tmp_path: Path) -> None:
    progress: list[tuple[int, int]] = []
    report = run(small_set(tmp_path), progress=lambda done, total: progress.append((done, total)))
    assert progress == [(1, 3), (2, 3), (3, 3)]
    assert tuple(report.means) == RANKERS
    assert (report.tools, report.queries, report.unanswered) == (3, 3, {})
    assert report.means["BM25 baseline"]["hit@1"] == pytest.approx(2 / 3)
    assert report.means["discover_tools"]["R@5"] == 1
    assert report.as_json()["metrics"]["score alone"]["R@5"] == 1
    text = report.as_text()
    assert all(ranker in text for ranker in RANKERS)
    assert run(small_set(tmp_path), limit=2).queries == 2


def test_score_alone_is_the_models_order(tmp_path: Path) -> None:
    engine = StubEngine(WordTokenizer(), lambda prefix, suffix: float("forecast" in prefix))
    report = run(small_set(tmp_path), engine)
    assert report.means["score alone"]["hit@1"] == pytest.approx(1 / 3)
    assert report.means["bm25 alone"]["hit@1"] == pytest.approx(2 / 3)
    assert report.means["discover_tools"]["R@5"] == 1


def test_queries_that_the_engine_refuses_are_counted_and_score_nothing(tmp_path: Path) -> None:
    engine = StubEngine(WordTokenizer(), by_shared_words)
    engine.answer = refusal()
    report = run(small_set(tmp_path), engine)
    assert report.unanswered == {"pages_short": 3}
    assert set(report.means["discover_tools"].values()) == {0.0}
    assert report.means["BM25 baseline"]["hit@1"] > 0
    assert "3 queries were not answered: pages_short" in report.as_text()


def test_tools_beyond_the_candidates_follow_in_lexical_order(tmp_path: Path) -> None:
    tools = [entry(f"tool_{n}", "common") for n in range(40)]
    path = folder(tmp_path, tools, [{"id": "1", "query": "common", "relevant": ["s/tool_3"]}])
    report = run(path, candidates=2)
    assert report.means["discover_tools"]["R@32"] == 1


@pytest.mark.parametrize(
    ("tools", "queries", "words"),
    [
        ([entry("a")], [{"id": "1", "query": "x", "relevant": []}], "no list of labelled queries"),
        ([entry("a")], [{"id": "1", "relevant": ["s/a"]}], "no list of labelled queries"),
        ([entry("a")], [5], "no list of labelled queries"),
        ([entry("a")], [], "no queries"),
        ([], [{"id": "1", "query": "x", "relevant": ["s/a"]}], "no tools"),
    ],
)
def test_a_folder_that_is_no_labelled_set_is_one_sentence(
    tmp_path: Path, tools: list[Any], queries: list[Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        LabelledSet.load(folder(tmp_path, tools, queries))


def test_a_folder_without_the_files_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"it has no catalogue\.jsonl"):
        LabelledSet.load(tmp_path)


def test_alternatives_of_a_label_count_as_the_label(tmp_path: Path) -> None:
    tools = [entry("read_file", "Read a file", "a"), entry("read_file", "Read a file", "b")]
    query = {"id": "1", "query": "read a file", "relevant": ["b/read_file"]}
    assert run(folder(tmp_path, tools, [query])).means["BM25 baseline"]["hit@1"] == 0
    query["alt"] = {"b/read_file": ["a/read_file", "gone/read_file"]}
    assert run(folder(tmp_path, tools, [query])).means["BM25 baseline"]["hit@1"] == 1


def test_entries_that_are_not_served_are_reported(tmp_path: Path) -> None:
    path = small_set(tmp_path)
    broken = json.dumps({**entry("bad"), "inputSchema": {"type": "array"}})
    with (path / "catalogue.jsonl").open("a", encoding="utf-8") as file:
        file.write("\n" + broken)
    report = run(path)
    assert report.tools == 3
    assert "catalogue.jsonl:4" in report.as_text()
