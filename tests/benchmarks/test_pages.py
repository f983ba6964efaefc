"""The page and the pictures that are made of result files."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import page
from benchmarks.ladder.driver import Ran
from benchmarks.ladder.limits import limiting
from benchmarks.ladder.rung import summary
from benchmarks.pictures import PICTURES, Axis, Chart, Series, load
from tests.benchmarks.test_conditions import call

SVG = "{http://www.w3.org/2000/svg}"


def rung(clients: int, **more: Any) -> dict[str, Any]:
    calls = [call(ended=0.2, engine_ms=150.0)] * clients
    seen = {
        "memory_peak_mib": 2700.0, "card_busy_percent": None, "neighbour": None, "imbalance": "",
        "server": None, "handshake_ms": None, "limited_by": "nothing",
    }  # fmt: skip
    return summary(clients, [Ran(calls, offered=clients, began=0.0, stopped=1.0)], calls) | seen | more


def result(rungs: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    memory = {"plan_mib": 2740, "points": [[0.5, 2600.0], [1.0, 2700.0]], "marks": [[0.5, "1 clients"]]}
    return {
        "benchmark": "ladder", "command": "python -m benchmarks.ladder", "at": "2026-01-01T00:00:00+00:00",
        "commit": "0123456789abcdef", "hardware": {"cards": ["a card"], "cpu": "", "cores": 2},
        "targets": [], "results": {"drivers": 2, "memory": memory}, "rungs": rungs, "abort": None,
    } | more  # fmt: skip


def written(folder: Path, **files: dict[str, Any]) -> Path:
    for name, content in files.items():
        (folder / f"{name.replace('_', '-')}.json").write_text(json.dumps(content))
    return folder


def test_a_page_shows_every_target_hit_missed_or_not_measured() -> None:
    def target(measured: float, hit: bool) -> dict[str, Any]:
        told = {"key": "a.one", "target": 5, "good": "at least", "measured": measured, "hit": hit}
        return result([], targets=[told])

    files = {"first": target(4, False), "second": target(6, True)}
    lines = list(page.page({"a": {"one": 5, "two": 7}, "shape": {"rows": 3}}, files, []))
    text = "\n".join(lines)
    assert "0 hit in every file, 1 missed in at least one, 1 in no result file yet." in text
    assert "| `a.one` | at least | 5 | 4 | **miss** |" in text
    assert "| `a.one` | at least | 5 | 6 | hit |" in text
    assert "| `a.two` | | 7 | - | not measured | |" in text
    assert "rows" not in text


def test_a_page_names_the_abort_and_what_was_not_compared() -> None:
    abort = {"condition": "p99", "clients": 2, "reason": "it was slow"}
    stopped = result([rung(1), rung(2)], abort=abort)
    text = "\n".join(page.page({}, {"ladder-idle": stopped}, []))
    assert "**Stopped at 2 clients by its condition p99: it was slow.**" in text
    assert text.count("not compared") == 2


def test_every_table_row_of_a_page_has_its_columns(tmp_path: Path) -> None:
    verdict = {"short_p99_ratio": 1.5, "cause": "waiting"}
    mixed = [rung(2, long_share=0.0, verdict=None), rung(2, long_share=0.1, verdict=verdict)]
    files = {"ladder-cpu": result([rung(1)]), "mixed-cpu": result(mixed)}
    columns = 0
    for line in page.page({}, files, []):
        if line.startswith("| ---"):
            assert line.count("|") == columns
        if line.startswith("|"):
            columns = columns or line.count("|")
            assert line.count("|") == columns, line
        else:
            columns = 0


def test_pictures_are_drawn_from_what_is_there(tmp_path: Path) -> None:
    cold = {"time_line": {"handshakes": [[0.1, 1]], "answers": [[0.2, 1], [0.3, 2]]}}
    files = written(
        tmp_path,
        ladder_idle=result([rung(1, refused=1), rung(2)]),
        burst_idle=result([], results={"drivers": 1, "cold": cold}),
        other={"benchmark": "call", "targets": []},
    )
    results = load(files)
    assert set(results) == {"ladder-idle", "burst-idle"}
    for draw in PICTURES.values():
        assert ElementTree.fromstring(draw(results).svg()).tag == f"{SVG}svg"


def test_a_ladder_on_a_cpu_is_drawn_only_where_there_is_none_on_a_card(tmp_path: Path) -> None:
    on_cpu = result([rung(1)], hardware={"cards": [], "cpu": "a CPU", "cores": 2})
    assert set(load(written(tmp_path, ladder_cpu=on_cpu))) == {"ladder-cpu"}
    assert set(load(written(tmp_path, ladder_idle=result([rung(1)])))) == {"ladder-idle"}


def test_peers_are_shown_with_rates_abstention_and_quality() -> None:
    load = {
        "clients": 8, "calls_per_s": 1.5, "latency_ms": {"p50": 10.0, "p99": 20.0},
        "server_cpu_ms_per_call": 7.0, "bytes_per_answer": 12345,
    }  # fmt: skip
    metrics = {"hit@1": 0.5, "R@5": 0.6, "nDCG@10": 0.7, "C@10": 0.8}
    told = {
        "load": {"ours": [load], "theirs": [load]},
        "unanswerable": {"theirs": {"offered": 69, "asked": 72}},
        "quality": {"a set": {"queries": 3, "tools": 1200, "ours": metrics, "theirs": metrics}},
    }
    machine = {"cards": [], "cpu": "a CPU", "cores": 2, "load_average": [6.2, 4.0, 3.0]}
    lines = list(
        page.page({}, {"peers-cpu": result([], benchmark="peers", results=told, hardware=machine)}, [])
    )
    text = "\n".join(lines)
    assert "a CPU, 2 cores (load average at the end 6.2)" in text
    assert "| theirs | 8 | 1.5 | 10.0 | 20.0 | 7.0 | 12,345 |" in text
    assert "- theirs offers a tool for 69 of 72 requests that none serves." in text
    assert "| a set | 1,200 | 3 | ours | 0.500 | 0.600 | 0.700 | 0.800 |" in text


def test_a_picture_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no points"):
        Chart("empty", "x", "y", [Series("zero", [(0.0, 0.0)])], base_x=2).svg()


def test_more_is_higher_and_later_is_further_right() -> None:
    drawn = ElementTree.fromstring(Chart("two", "x", "y", [Series("one", [(1.0, 2.0), (3.0, 9.0)])]).svg())
    line = drawn.find(f"{SVG}polyline")
    assert line is not None
    (x1, y1), (x2, y2) = (tuple(map(float, point.split(","))) for point in line.attrib["points"].split())
    assert x1 < x2
    assert y1 > y2  # pixels count downwards


@given(
    st.lists(st.floats(0.01, 1e6), min_size=1, max_size=30),
    st.sampled_from([0, 2, 10]),
    st.booleans(),
)
def test_points_and_ticks_lie_on_their_axis(values: list[float], base: int, from_zero: bool) -> None:
    axis = Axis.over(values, base, 100.0, 300.0, from_zero)
    for value in [*values, *axis.ticks()]:
        assert 100.0 - 1e-6 <= axis.place(value) <= 300.0 + 1e-6
    assert axis.ticks()
    ordered = sorted(values)
    placed = [axis.place(value) for value in ordered]
    assert placed == sorted(placed)


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        ({"driver": {"busiest_share": 0.95}}, "the driver"),
        ({"server": {"threads": {"7/main": 0.97, "7/thread 9": 0.5}}}, "the event loop"),
        ({"server": {"threads": {"7/main": 0.5, "7/thread 9": 0.95}}}, "the step loop"),
        ({"card_busy_percent": 99.0}, "the card"),
        ({}, "100% of its time in the engine"),
    ],
)
def test_the_limiting_resource_is_named(seen: dict[str, Any], said: str) -> None:
    calls = [call(engine_ms=1000.0)]
    quiet = {"server": None, "card_busy_percent": 40.0, "neighbour": None, "driver": {"busiest_share": 0.1}}
    one = summary(1, [Ran(calls, offered=1, began=0.0, stopped=1.0)], calls) | quiet | seen
    assert said in limiting(one)
