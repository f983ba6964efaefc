"""The pooled catalogue, the queries drawn for it, and what is told of calls on it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import large_catalogue_page as page
from benchmarks.large_calls import Asker, Call, TimedClient, at, figures, repeated
from benchmarks.large_catalogue import indexed, table
from benchmarks.pooled import catalogue_files, drawn_queries, pooled, write_pool
from engine.request import Scored, Usage
from mcp_discovery.discovery.calibration import Calibration
from mcp_discovery.discovery.catalogue import Catalogue
from mcp_discovery.discovery.prompts import Prompts
from mcp_discovery.discovery.select import Discovery, DiscoverySettings, Trained
from mcp_discovery.discovery.sources import files
from mcp_discovery.discovery.vectors import VectorCache
from tests.discovery.doubles import StubEngine, WordTokenizer, refusal, tool

COLD = Call(ms=30.0, words_ms=1.0, vectors_ms=2.0, queue_ms=4.0, prompt_tokens=1000, cached_tokens=50)
WARM = Call(ms=12.0, words_ms=1.0, vectors_ms=3.0, queue_ms=0.5, prompt_tokens=1000, cached_tokens=600)


def entry(server: str, name: str) -> dict[str, Any]:
    return {"server": server, "name": name, "description": f"does {name}", "inputSchema": {"type": "object"}}


def make_set(folder: Path, tools: list[dict[str, Any]], queries: list[str]) -> None:
    folder.mkdir(parents=True)
    (folder / "catalogue.jsonl").write_text("".join(json.dumps(each) + "\n" for each in tools))
    if queries:
        lines = (json.dumps({"id": text, "query": text, "relevant": []}) + "\n" for text in queries)
        (folder / "queries.jsonl").write_text("".join(lines))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    root = tmp_path / "data"
    make_set(root / "dev" / "one", [entry("a", "x"), entry("a", "y"), entry("b", "x")], ["p", "q", "r"])
    make_set(root / "dev" / "two", [entry("a", "x"), entry("c", "z")], ["q"])
    make_set(root / "train" / "one", [entry("a", "x"), entry("d", "z")], [])
    return root


def test_servers_of_two_sets_stay_apart(data: Path) -> None:
    servers = [each["server"] for each in pooled(catalogue_files(data))]
    assert servers == ["a", "a", "b", "a@two", "c", "a@train-one", "d"]


def test_every_entry_of_a_pool_is_served(data: Path, tmp_path: Path) -> None:
    write_pool(catalogue_files(data), tmp_path / "pool.jsonl")
    loaded = files.load([tmp_path / "pool.jsonl"])
    assert not loaded.problems
    assert len(loaded.tools) == 7
    assert len({each.form for each in loaded.tools}) == 3


def test_queries_come_of_each_set_in_turn_and_once(data: Path) -> None:
    queries = drawn_queries(data, 10)
    assert sorted(queries) == ["p", "q", "r"]
    assert queries == drawn_queries(data, 10)
    assert drawn_queries(data, 2) == queries[:2]
    assert "q" in queries[:2]  # the only one of its set


def test_a_folder_without_sets_is_told(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no catalogue\.jsonl"):
        catalogue_files(tmp_path)
    with pytest.raises(SystemExit, match=r"no queries\.jsonl"):
        drawn_queries(tmp_path, 1)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300), st.integers(1, 100))
def test_a_percentile_is_the_least_that_so_many_do_not_exceed(values: list[float], percent: int) -> None:
    found = at(values, percent)
    below = sum(round(value, 2) <= found for value in values)
    assert below * 100 >= percent * len(values)
    assert sum(round(value, 2) < found for value in values) * 100 < percent * len(values)


def test_stages_of_a_call_sum_to_it() -> None:
    assert COLD.words_ms + COLD.vectors_ms + COLD.engine_ms == COLD.ms
    told = figures([COLD, WARM, WARM], seconds=2.0)
    assert (told["calls"], told["p50_ms"], told["p99_ms"]) == (3, 12.0, 30.0)
    assert told["stages"]["engine"] == {"p50_ms": 8.0, "p99_ms": 27.0}
    assert (told["cached_share"], told["calls_per_s"]) == (0.6, 1.5)
    assert (COLD.is_cold, WARM.is_cold) == (True, False)


def test_an_index_that_was_cut_short_is_extrapolated_by_tokens() -> None:
    told = indexed([10, 30, 60, 100], [False, True, True, False], 9.0)
    assert (told["computed"], told["tokens_per_s"], told["all_s"]) == (2, 10, 20.0)
    assert indexed([10, 30], [True, True], 2.0)["all_s"] == 2.0
    assert indexed([10], [False], 0.1)["all_s"] is None


def test_repeated_queries_are_as_many_as_wanted() -> None:
    assert repeated(["a", "b"], 5) == ["a", "b", "a", "b", "a"]


class Paged(StubEngine):
    """Knows a prefix again that it has scored, as an engine with pages does."""

    def __init__(self) -> None:
        super().__init__(WordTokenizer())
        self.known: set[tuple[int, ...]] = set()

    async def rank(self, request: Any, choose: Any, **more: Any) -> Any:
        prefixes = tuple(choose((1.0, 0.0, 0.0, 0.0)))
        cached = sum(len(prefix) for prefix in prefixes if prefix in self.known)
        self.known |= set(prefixes)
        if self.answer is not None:
            return self.answer
        return Scored((0.5,) * len(prefixes), Usage(sum(map(len, prefixes)), cached + len(prefixes)))


def asker_over(engine: Paged, folder: Path) -> Asker:
    client = TimedClient(engine)
    catalogue = Catalogue.of([tool("s", f"tool_{word}", f"about {word}") for word in ("rain", "file", "bug")])
    trained = Trained(Calibration(), VectorCache(folder / "v"))
    prompts = Prompts(engine.tokenizer, 1)
    settings = DiscoverySettings(candidates=1, limit=1)
    discovery = Discovery(client, prompts, catalogue, settings, model="stub", trained=trained)
    return Asker(discovery, client, page_tokens=1)


def test_a_query_is_cold_once_and_warm_then(tmp_path: Path) -> None:
    asker = asker_over(Paged(), tmp_path)
    queries = ["about rain", "tool_file", "rain again", "about bug", "about file"]
    cold, warm, left_out = asyncio.run(asker.cold_and_warm(queries, 2))
    assert left_out == 1  # rain again; the one that names its tool counts as neither
    assert [call.is_cold for call in cold] == [True, True]
    assert [call.cached_share for call in warm] == [1.0, 1.0]
    assert all(call.vectors_ms > 0.0 and call.words_ms > 0.0 for call in cold + warm)


def test_several_callers_ask_every_query_once(tmp_path: Path) -> None:
    asker = asker_over(Paged(), tmp_path)
    calls, seconds = asyncio.run(asker.at_once(["about rain", "about bug", "about file"] * 3, 2))
    assert len(calls) == 9
    assert seconds > 0.0


def test_a_call_that_is_refused_ends_the_measurement(tmp_path: Path) -> None:
    engine = Paged()
    engine.answer = refusal()
    with pytest.raises(RuntimeError, match="not answered"):
        asyncio.run(asker_over(engine, tmp_path).ask("about rain"))


def result(**more: Any) -> dict[str, Any]:
    told: dict[str, Any] = {
        "model": "m", "candidates": 32, "kernels": "k", "pages": 100,
        "pool": {"tools": 15400, "definitions": 13842, "servers": 3951, "left_out": 7},
        "words": {
            "read_s": 4.0, "index_s": 3.0, "engine_ready_s": 10.0, "first_call_ms": 50.0,
            "first_call": {"status": "matched", "degraded": True}, "answers_after_s": 17.05,
        },
        "vectors": indexed([10, 30], [True, False], 1.0) | {"cache_mib": 33.0, "missing": 0},
        "memory_mib": {
            "catalogue": 47.0, "index": 65.0, "vectors": 33.8, "growth_while_indexing": 2.5,
            "process_peak": 2600.0,
        },
        "one_at_a_time": {"cold": figures([COLD]), "warm": figures([WARM]), "not_cold_and_left_out": 1},
    }  # fmt: skip
    return {
        "command": "python -m benchmarks.large_catalogue", "at": "2026-01-01T00:00:00+00:00",
        "commit": "0123456789abcdef", "results": told | more,
        "hardware": {"cards": [], "cpu": "a processor", "cores": 2, "load_average": [0.5, 0.4, 0.3]},
    }  # fmt: skip


def test_a_page_says_what_was_measured_and_what_extrapolated() -> None:
    at_once = {"callers": 32, "cold": figures([COLD], 1.0), "warm": figures([WARM], 1.0) | {"queries": 8}}
    lines = list(page.section({"large-catalogue-cpu": result(at_once=at_once)}))
    text = "\n".join(lines)
    assert "15,400 tools" in text
    assert "extrapolated from 1 of 2 tools" in text
    assert "32 at once, cold" in text
    rows = [line for line in lines if line.startswith("|")]
    assert len({row.count("|") for row in rows if "at once" in row or "alone" in row}) == 1
    assert "vectors of 1 tools were taken from an earlier run" in text
    whole = indexed([10, 30], [True, True], 2.0) | {"cache_mib": 33.0, "missing": 0}
    text = "\n".join(page.section({"large-catalogue-cpu": result(vectors=whole)}))
    assert "extrapolated" not in text
    assert "earlier run" not in text


def test_a_table_for_people_has_a_line_for_each_kind() -> None:
    assert len(table(result()["results"]).splitlines()) == 3
