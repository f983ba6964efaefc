"""What is told of an engine's memory: figures that add up, and the page and the picture made of them."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from itertools import islice
from typing import Any

import pytest

from benchmarks import marked, memory, memory_page
from engine.config import EngineConfig
from engine.cuda.costs import CudaCosts, shipped_constants
from engine.memory import MIB, plan_memory
from engine.request import Generate, Score
from tests.engine.qwen3 import WHOLE

CARD = ("NVIDIA H200", "580.159.04", "2.11.0+cu130")
PLAN = plan_memory(WHOLE, EngineConfig(step_tokens=2048), CudaCosts(shipped_constants(*CARD)))
TENSORS = PLAN.tensor_bytes


def stages() -> memory.Stages:
    """A load that takes what the plan says, 5 MiB less of them for modules."""
    beside = {"allocation": 527 * MIB, "weights": 530 * MIB, "graphs": 740 * MIB, "runner": 756 * MIB}
    return memory.Stages(0, beside, {"allocation": 0, "weights": TENSORS})


def result() -> dict[str, Any]:
    reserved, peak = TENSORS + 36 * MIB, (527 + 225 + 16) * MIB + TENSORS + 36 * MIB
    results = {
        "kernels": "some", "plan_mib": {line.name: line.bytes / MIB for line in PLAN.lines},
        "tensors_planned_mib": TENSORS / MIB, "measured_mib": memory.measured(stages(), reserved, peak),
        "nvml_peak_mib": peak / MIB, "failed_loads_leak_mib": {"graphs": 0.0, "weights": 2.0},
        "exit_leak_mib": 0.0,
    }  # fmt: skip
    return {
        "benchmark": "memory", "commit": "0123456789",
        "hardware": {"cards": ["NVIDIA H200, 580.159.04, 1 MiB"]}, "versions": {"torch": CARD[2]},
        "results": results,
    }  # fmt: skip


def test_what_is_measured_sums_to_the_peak() -> None:
    results = result()["results"]
    seen = results["measured_mib"]
    assert (seen["CUDA context"], seen["modules"], seen["graphs"]) == (527.0, 225.0, 16.0)
    parts = (seen[name] for name in ("CUDA context", "modules", "graphs", "torch"))
    assert sum(parts) == pytest.approx(results["nvml_peak_mib"])


def test_targets_are_about_the_plan() -> None:
    by_key = {target.key: target.measured for target in memory.targets(result()["results"])}
    assert by_key["memory.plan_torch_bytes_error"] == 0
    assert by_key["memory.failed_loads_leak_mib"] == 2.0
    assert by_key["memory.allowance_mib"] == pytest.approx(result()["results"]["nvml_peak_mib"])
    assert 0 < by_key["memory.plan_nvml_error_mib"] < 24


def test_a_mixed_run_has_every_scenario() -> None:
    some = list(islice(memory.mixed(), 10))
    assert {type(each) for each in some} == {Score, Generate}
    assert len({len(each.prefixes[0]) for each in some if isinstance(each, Score)}) == 3


def test_groups_of_lines_leave_nothing_out() -> None:
    rows = memory_page.rows_of(result()["results"])
    assert sum(row.planned for row in rows) == pytest.approx(PLAN.total / MIB)
    assert sum(row.measured or 0.0 for row in rows) == pytest.approx(
        result()["results"]["nvml_peak_mib"], abs=0.01
    )
    assert {row.name for row in rows if row.measured is None} == set()


def test_tensors_that_came_out_otherwise_are_not_shown_as_planned() -> None:
    results = result()["results"]
    results["measured_mib"]["tensors"] -= 1.0
    by_name = {row.name: row.measured for row in memory_page.rows_of(results)}
    assert by_name["pages"] is None
    assert by_name["graphs"] == 16.0


def test_the_page_is_replaced_between_its_marks_only() -> None:
    page = f"# before\n{memory_page.BEGIN}\nearlier\n{marked.END}\nafter\n"
    told = result()
    new = marked.replaced(page, memory_page.section(told, "memory.json"), memory_page.BEGIN)
    assert new.startswith("# before\n")
    assert new.endswith("after\n")
    assert "earlier" not in new
    assert "| modules | 230.0 | 225.0 |" in new
    assert "Torch reserved" in new
    assert "0.0 (graphs), 2.0 (weights)" in new
    assert new == marked.replaced(new, memory_page.section(told, "memory.json"), memory_page.BEGIN)
    with pytest.raises(ValueError, match="the page needs one"):
        marked.replaced("no marks", memory_page.section(told, "memory.json"), memory_page.BEGIN)


def test_a_result_of_the_engine_benchmark_will_do() -> None:
    told = result()
    for key in ("measured_mib", "failed_loads_leak_mib", "exit_leak_mib"):
        del told["results"][key]
    told["results"]["torch_peak_mib"] = 1950.0
    text = "\n".join(memory_page.section(told, "engine.json"))
    assert "| modules | 230.0 | - |" in text
    assert "Torch reserved 1,950.0 MiB" in text


def test_what_fp8_pages_cost_is_told_by_set() -> None:
    interval = {"mean": 0.01, "low": -0.01, "high": 0.02}
    figures = {"spearman": {"mean": 0.98}, "kendall": {"mean": 0.93}, "same_first": 0.9}
    told = {"set": "some", "queries": 7, "ndcg_at_10": [0.5, 0.49], "ndcg_at_10_lost": interval, **figures}
    text = "\n".join(memory_page.fp8({"results": {"candidates": 32, "sets": [told]}}, "fp8.json"))
    assert "| some | 7 | 0.9800 | 0.9300 | 90.0% | 0.5000 to 0.4900 | 0.0100 (-0.0100 to 0.0200) |" in text


def test_a_picture_has_two_bars_a_line_inside_the_frame() -> None:
    told = result()["results"]
    rows = memory_page.rows_of(told)
    root = ElementTree.fromstring(memory_page.picture(rows, told["nvml_peak_mib"]))
    svg = "{http://www.w3.org/2000/svg}"
    bars = root.findall(f"{svg}rect")[1:]
    assert len(bars) == 2 * (len(rows) + 1)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for bar in bars:
        assert float(bar.attrib["x"]) + float(bar.attrib["width"]) <= width
        assert float(bar.attrib["y"]) + float(bar.attrib["height"]) <= height


def test_the_larger_model_of_the_page_is_the_one_that_is_tested() -> None:
    assert memory_page.QWEN3 == WHOLE
    assert memory_page.qwen3_plan(*CARD) == PLAN
