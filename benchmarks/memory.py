"""The plan of an engine beside what a card gives: before, during and after a load.

    python -m benchmarks.memory --model FILE [--adapter FILE] [--kv-dtype fp8_e4m3] [--seconds 4] [--out FILE]

A child process loads the engine, serves scores, cold scores and continuations together at full load, lets
the engine go and then fails four loads, each at another stage; the parent looks at the card before it
starts and after it has ended. `benchmarks.memory_page` makes the table and the picture of docs/memory.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine import SCENARIOS, CardSampler, Load
from benchmarks.report import Target, write
from engine import Engine, EngineConfig, EngineFault
from engine.cuda.nvml import MIB, read_card
from engine.engine import new_core
from engine.request import Request

OUTSTANDING = 96
FAILING = ("allocation", "weights", "graphs", "verification")


@dataclass
class Stages:
    """Bytes that this process holds on the card when a stage of a load begins."""

    before: int  # the card's used bytes without this process
    beside_torch: dict[str, int] = field(default_factory=dict)
    requested: dict[str, int] = field(default_factory=dict)  # what tensors were asked for with, not rounded

    def note(self, stage: str) -> None:
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return
        torch.cuda.synchronize()
        self.beside_torch[stage] = read_card().used - self.before - torch.cuda.memory_reserved()
        self.requested[stage] = torch.cuda.memory_stats().get("requested_bytes.all.current", 0)


def measure(config: EngineConfig, model: Path, adapter: Path | None, seconds: float) -> dict[str, Any]:
    """Runs in a process of its own."""
    results = _serve(config, model, adapter, seconds)
    return results | {"failed_loads_leak_mib": _fail_loads(config, model, adapter)}


def _serve(config: EngineConfig, model: Path, adapter: Path | None, seconds: float) -> dict[str, Any]:
    """One load and a mixed run. Figures are MiB."""
    stages, sampler = Stages(read_card().used), CardSampler()
    from engine.cuda.load import load_cuda  # only now: these imports touch the card

    loaded = load_cuda(config, model, adapter, on_stage=stages.note)
    engine = Engine(new_core(config, loaded), loaded.runner, loaded)
    engine.start()
    engine.mark_ready()
    with engine:
        rate = Load(engine, mixed(), OUTSTANDING).run(seconds)
        kernels = engine.status().kernels
    peak = sampler.close()
    return {
        "kernels": kernels,
        "mixed": asdict(rate),
        "plan_mib": {line.name: _mib(line.bytes) for line in loaded.plan.lines},
        "tensors_planned_mib": _mib(loaded.plan.tensor_bytes),
        "measured_mib": measured(stages, torch.cuda.max_memory_reserved(), peak),
        "nvml_peak_mib": _mib(peak),
    }


def mixed() -> Iterator[Request]:
    """Every scenario of `benchmarks.engine` in turn."""
    return chain.from_iterable(zip(*(make() for make in SCENARIOS.values()), strict=True))


def measured(stages: Stages, reserved: int, peak: int) -> dict[str, float]:
    """By the names of the plan's lines; `torch` is all that torch reserved at its peak, `tensors` what the
    allocation of the plan's tensors asked for. Context, modules, graphs and torch sum to NVML's peak."""
    beside, requested = stages.beside_torch, stages.requested
    context = beside["allocation"]
    graphs = beside["runner"] - beside["graphs"]
    return {
        "CUDA context": _mib(context),
        "modules": _mib(peak - reserved - context - graphs),
        "graphs": _mib(graphs),
        "torch": _mib(reserved),
        "tensors": _mib(requested["weights"] - requested["allocation"]),
    }


def _fail_loads(config: EngineConfig, model: Path, adapter: Path | None) -> dict[str, float]:
    """What each of four failed loads in a row leaves on the card, beside what a good one left, in MiB."""
    from engine.cuda.load import load_cuda, release

    release()
    baseline, left = read_card().used, {}
    for failing in FAILING:

        def fail(stage: str, failing: str = failing) -> None:
            if stage == failing:
                raise EngineFault(f"planted at {failing}")

        try:
            load_cuda(config, model, adapter, on_stage=fail)
        except EngineFault:
            left[failing] = _mib(read_card().used - baseline)
    return left


def targets(results: dict[str, Any]) -> list[Target]:
    plan, seen = results["plan_mib"], results["measured_mib"]
    tensors = results["tensors_planned_mib"]
    return [
        Target("memory.allowance_mib", results["nvml_peak_mib"], "at most"),
        Target("memory.plan_torch_bytes_error", abs(seen["tensors"] - tensors) * MIB, "at most"),
        Target("memory.plan_nvml_error_mib", abs(sum(plan.values()) - results["nvml_peak_mib"]), "at most"),
        Target("memory.failed_loads_leak_mib", max(results["failed_loads_leak_mib"].values()), "at most"),
        Target("memory.exit_leak_mib", results["exit_leak_mib"], "at most"),
    ]


def _mib(size: int) -> float:
    """Exact: a float holds any number of bytes that a card has as MiB."""
    return size / MIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--adapter", type=Path)
    parser.add_argument("--kv-dtype", default="auto", choices=("auto", "float16", "bfloat16", "fp8_e4m3"))
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    config = EngineConfig(device="cuda", kv_dtype=given.kv_dtype)
    before = read_card().used
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as child:
        results = child.submit(measure, config, given.model, given.adapter, given.seconds).result()
    results["exit_leak_mib"] = _mib(read_card().used - before)
    print(results)
    write("memory", results, targets(results), out=given.out)


if __name__ == "__main__":
    main()
