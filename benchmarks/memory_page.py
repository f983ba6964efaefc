"""Writes the generated part of docs/memory.md, and its picture, from a result of benchmarks.memory.

    python -m benchmarks.memory_page [--result benchmarks/results/memory.json] [--page docs/memory.md]

A result of benchmarks.engine will do: it has the plan and NVML's peak, and says less of what is between.
Where there is a result of benchmarks.fp8 (`--fp8`), what fp8 pages cost in quality stands below.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks.fp8 import table
from benchmarks.marked import replaced
from benchmarks.pictures import COLOURS, WIDTH, Axis
from engine.config import EngineConfig, ModelShape
from engine.cuda.admission import MEASURED_LINES
from engine.cuda.costs import CudaCosts, shipped_constants
from engine.memory import MemoryPlan, plan_memory

FOLDER = Path(__file__).resolve().parent
PAGE, PICTURE = FOLDER.parent / "docs" / "memory.md", "pictures/memory-plan.svg"
BEGIN = "<!-- begin: python -m benchmarks.memory_page -->"
NOT_TORCH = (*MEASURED_LINES, "guard")
NOT_TENSORS = (*NOT_TORCH, "cuBLAS workspace", "torch rounding", "torch guard")
QWEN3 = ModelShape(
    architecture="qwen3", layers=28, hidden=1024, heads=16, kv_heads=8, head_dim=128, intermediate=3072,
    vocabulary=151_936, context=40_960, rope_theta=1e6, norm_eps=1e-6, tied_embeddings=True, qk_norm=True,
)  # fmt: skip
QWEN3_STEP = 2048
LEFT, RIGHT, BAR, GAP, TOP = 190, 70, 16, 6, 44  # of the picture, in pixels


@dataclass(frozen=True, slots=True)
class Row:
    """Lines of a plan that the table and the picture show as one. MiB; `measured` None: not told apart."""

    name: str
    planned: float
    measured: float | None
    why: str


def rows_of(results: Mapping[str, Any]) -> list[Row]:
    """The plan's lines in groups, beside what was measured of each group."""
    plan, seen = results["plan_mib"], results.get("measured_mib", {})
    torchs = None if "torch" not in seen else seen["torch"] - seen["tensors"]
    return [
        Row("CUDA context", plan["CUDA context"], seen.get("CUDA context"), "NVML once CUDA is initialised"),
        Row("modules", plan["modules"], seen.get("modules"), "kernels that libraries load when first used"),
        Row("graphs", plan["graphs"], seen.get("graphs"), "captured steps, what the driver takes"),
        Row(
            "cuBLAS workspace, rounding",
            plan["cuBLAS workspace"] + plan["torch rounding"] + plan.get("torch guard", 0.0),
            torchs,
            "what torch reserves beside the tensors",
        ),
        *_tensors(plan, seen),
        Row("guard", plan["guard"], 0.0 if seen else None, "what was not foreseen"),
    ]


def _tensors(plan: Mapping[str, float], seen: Mapping[str, float]) -> Iterator[Row]:
    """The lines that are tensors. They are one allocation of the plan's own sizes: where it came out as large
    as planned, so did each."""
    groups = {"inputs of a step, logits": 0.0, "activations": 0.0, "weights, rope table": 0.0, "pages": 0.0}
    names = {"weights": "weights, rope table", "rope table": "weights, rope table", "pages": "pages"}
    for line, mib in plan.items():
        if line not in NOT_TENSORS:
            usual = "activations" if line.startswith("activations") else "inputs of a step, logits"
            groups[names.get(line, usual)] += mib
    exact = "tensors" in seen and abs(seen["tensors"] - sum(groups.values())) < 0.1
    for name, mib in groups.items():
        yield Row(name, mib, mib if exact else None, "by its shape, part of one allocation")


def section(result: Mapping[str, Any], file: str) -> Iterator[str]:
    """The generated lines of the page; `file` is the name of the result's."""
    results = result["results"]
    rows, peak = rows_of(results), results["nvml_peak_mib"]
    planned = sum(row.planned for row in rows)
    yield (
        f"{', '.join(result['hardware']['cards'])}, torch {result['versions']['torch']}, FlashInfer "
        f"{result['versions'].get('flashinfer-python', '-')}; {results['kernels']} "
        f"([{file}](../benchmarks/results/{file}), commit {result['commit'][:7]})."
    )
    yield from ("", f"![Predicted and measured MiB by line]({PICTURE})", "")
    yield from ("| line | predicted MiB | measured MiB | |", "| --- | --- | --- | --- |")
    for row in rows:
        yield f"| {row.name} | {row.planned:,.1f} | {_shown(row.measured)} | {row.why} |"
    yield f"| **all** | **{planned:,.1f}** | **{peak:,.1f}** | NVML's peak over a run at full load |"
    yield ""
    where = "below" if peak <= planned else "**above**"
    yield f"NVML's peak was {abs(planned - peak):,.1f} MiB {where} the plan."
    reserved = results.get("measured_mib", {}).get("torch", results.get("torch_peak_mib"))
    if reserved is not None:
        cap = sum(row.planned for row in rows if row.name not in NOT_TORCH)
        yield f"Torch reserved {reserved:,.1f} MiB at its peak and may reserve {cap:,.1f}."
    yield from _loads(results)
    yield from ("", *_qwen3(result["hardware"]["cards"], result["versions"]["torch"]))


def _loads(results: Mapping[str, Any]) -> Iterator[str]:
    if "failed_loads_leak_mib" not in results:
        return
    left = ", ".join(f"{mib:,.1f} ({stage})" for stage, mib in results["failed_loads_leak_mib"].items())
    yield f"Failed loads in a row left, in MiB, by the stage that failed: {left}."
    yield f"After the process had ended, {results['exit_leak_mib']:,.1f} MiB more were in use than before it."


def _qwen3(cards: list[str], torch_version: str) -> Iterator[str]:
    """The plan of a larger model: the pure function, nothing measured."""
    name, driver, _ = cards[0].split(", ")
    plan = qwen3_plan(name, driver, torch_version)
    cells = {line.name: line.bytes / 2**20 for line in plan.lines}
    yield (
        f"Qwen3-0.6B in the same {plan.allowance >> 20:,} MiB, with steps of {QWEN3_STEP:,} tokens "
        "(`tests/gpu/test_qwen3.py` loads it with random weights and holds it to this plan):"
    )
    yield from ("", "| line | predicted MiB |", "| --- | --- |")
    for row in rows_of({"plan_mib": cells}):
        yield f"| {row.name} | {row.planned:,.1f} |"
    yield f"| **all** | **{plan.total / 2**20:,.1f}** |"
    yield ""
    yield f"Its {plan.pages:,} pages hold {16 * plan.pages:,} tokens."


def fp8(result: Mapping[str, Any], file: str) -> Iterator[str]:
    """What pages of half the size cost."""
    results = result["results"]
    yield (
        f"Pages of fp8 (e4m3) are half as large. What they change in the answers of `discover_tools`, beside "
        f"16-bit pages, each with vectors of its own ([{file}](../benchmarks/results/{file})): rank "
        f"correlations of the {results['candidates']} candidates' scores, how often the first tool is the "
        "same, and nDCG@10 with its loss."
    )
    yield from ("", table(results["sets"]))


def qwen3_plan(card: str, driver: str, torch_version: str) -> MemoryPlan:
    constants = shipped_constants(card, driver, torch_version)
    return plan_memory(QWEN3, EngineConfig(step_tokens=QWEN3_STEP), CudaCosts(constants))


def _shown(mib: float | None) -> str:
    return "-" if mib is None else f"{mib:,.1f}"


def picture(rows: list[Row], peak: float) -> str:
    """An SVG with two bars a line, and two for all."""
    bars = [*rows, Row("all", sum(row.planned for row in rows), peak, "")]
    step = 2 * BAR + GAP
    height = TOP + len(bars) * (step + GAP) + GAP
    most = max(max(bar.planned, bar.measured or 0.0) for bar in bars)
    x = Axis(0.0, most, 0, LEFT, WIDTH - RIGHT)
    title = "Memory on a card by line, MiB: predicted (dark) and measured (light)"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'font-family="sans-serif" font-size="12" fill="#333"><title>{escape(title)}</title>',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="16" y="24" font-size="15">{escape(title)}</text>',
    ]
    for number, (bar, colour) in enumerate(zip(bars, cycle(COLOURS), strict=False)):
        top = TOP + number * (step + GAP)
        parts.append(f'<text x="{LEFT - 8}" y="{top + BAR + 4}" text-anchor="end">{escape(bar.name)}</text>')
        for value, at, opacity in ((bar.planned, top, 1.0), (bar.measured, top + BAR + 1, 0.45)):
            parts += _bar(value, at, x, f'fill="{colour}" fill-opacity="{opacity}"')
    return "\n".join([*parts, "</svg>\n"])


def _bar(value: float | None, top: int, x: Axis, fill: str) -> Iterator[str]:
    end = x.place(value or 0.0)
    if value is not None:
        yield f'<rect x="{LEFT}" y="{top}" width="{end - LEFT:.1f}" height="{BAR}" {fill}/>'
    text = "not told apart" if value is None else f"{value:,.1f}"
    yield f'<text x="{end + 5:.1f}" y="{top + BAR - 4}" font-size="10">{text}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    results = FOLDER / "results"
    usual = next(path for path in (results / "memory.json", results / "engine.json") if path.exists())
    parser.add_argument("--result", type=Path, default=usual)
    parser.add_argument("--fp8", type=Path, default=results / "fp8.json")
    parser.add_argument("--page", type=Path, default=PAGE)
    given = parser.parse_args()
    result = json.loads(given.result.read_text(encoding="utf-8"))
    lines = list(section(result, given.result.name))
    if given.fp8.exists():
        lines += ["", *fp8(json.loads(given.fp8.read_text(encoding="utf-8")), given.fp8.name)]
    given.page.write_text(replaced(given.page.read_text(encoding="utf-8"), lines, BEGIN), encoding="utf-8")
    drawn = given.page.parent / PICTURE
    drawn.parent.mkdir(parents=True, exist_ok=True)
    drawn.write_text(
        picture(rows_of(result["results"]), result["results"]["nvml_peak_mib"]), encoding="utf-8"
    )
    print(f"wrote {given.page} and {drawn}")


if __name__ == "__main__":
    main()
