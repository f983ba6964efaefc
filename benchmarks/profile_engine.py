"""Where a steady second of the engine goes: kernels on the card, and parts of the step loop on the host.

    python -m benchmarks.profile_engine --model FILE [--adapter FILE] [--out FILE]

One run at full load, two windows of it. In the first the parts of the step loop are timed, by wrapping the
calls that they are; in the second torch.profiler records the card's kernels, which slows the engine, so that
rates are of the first. Neither is a throughput to be quoted: `benchmarks.engine` measures that. The tables
are printed; `benchmarks.profile_page` puts them into docs/performance.md.
"""

from __future__ import annotations

import argparse
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from itertools import cycle, islice
from pathlib import Path
from typing import Any, cast

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.engine import AHEAD, SCENARIOS
from benchmarks.profile_page import section
from benchmarks.report import write
from engine import Engine, EngineConfig
from engine.batch import Part
from engine.core import Core
from engine.request import Outcome, Request
from engine.runner import Read
from mcp_discovery.tuning import tune_interpreter

STEP_THREAD = "engine"
WARM_S = 2.0
GROUPS = {  # the first whose pattern is found in a kernel's name
    "attention": r"BatchPrefill|BatchDecode|flashinfer",
    "MLP activation": r"_silu_mul",
    "norms": r"_rms_norm",
    "rotation and append": r"_rotate_append",
    "matrix products": r"gemm|gemv|nvjet|cutlass|cublas|splitk",
    "copies": r"memcpy|memset",
    "gathers, scaling, likeliest token": r"index|gather|elementwise|reduce|argmax",
}
OTHER, IDLE = "other kernels", "nothing to run"


@dataclass
class Spent:
    """Of one part: seconds on the clock, seconds of CPU, calls."""

    wall: float = 0.0
    cpu: float = 0.0
    calls: int = 0


@dataclass
class Stopwatch:
    """Times named parts, by thread, while it is `on`. What a part spends inside another counts for the
    other alone."""

    clock: Callable[[], float] = time.perf_counter
    cpu_clock: Callable[[], float] = time.thread_time
    on: bool = False
    spent: dict[tuple[str, str], Spent] = field(default_factory=dict)
    _local: threading.local = field(default_factory=threading.local)

    def wrap(self, owner: object, method: str, part: str) -> None:
        """Puts a timed method in place of `owner`'s."""
        setattr(owner, method, self.timed(getattr(owner, method), part))

    def timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            inside = self._inside()
            inside.append((0.0, 0.0))
            wall, cpu = self.clock(), self.cpu_clock()
            try:
                return function(*arguments, **named)
            finally:
                whole = self.clock() - wall, self.cpu_clock() - cpu
                others = inside.pop()
                if inside:
                    inside[-1] = (inside[-1][0] + whole[0], inside[-1][1] + whole[1])
                if self.on:
                    self._add(part, whole[0] - others[0], whole[1] - others[1])

        return call

    def _inside(self) -> list[tuple[float, float]]:
        """What the parts that this thread is in have spent in others, the innermost last."""
        if not hasattr(self._local, "inside"):
            self._local.inside = []
        inside: list[tuple[float, float]] = self._local.inside
        return inside

    def _add(self, part: str, wall: float, cpu: float) -> None:
        spent = self.spent.setdefault((threading.current_thread().name, part), Spent())
        spent.wall, spent.cpu, spent.calls = spent.wall + wall, spent.cpu + cpu, spent.calls + 1


class Replaced:
    """Another object, some of whose methods are replaced though it may not let them be: a compiled core does
    not. What is set on it is set on the other."""

    def __init__(self, inner: object, methods: Mapping[str, Callable[..., Any]]) -> None:
        vars(self).update({"_inner": inner, **methods})  # not through its own __setattr__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._inner, name, value)


def attach(engine: Engine, watch: Stopwatch) -> None:
    """Times the parts of `engine`'s step loop from now on."""
    core, runner = engine._core, engine._runner
    parts = {
        "submit": "submit: take a request in",
        "begin_step": "begin_step: admit and schedule",
        "end_step": "end_step: hand results out",
    }
    timed = {method: watch.timed(getattr(core, method), part) for method, part in parts.items()}
    engine._core = cast(Core, Replaced(core, timed))
    watch.wrap(engine, "_tell", "callbacks")
    watch.wrap(runner, "launch", "launch: queue graph and copies")
    if hasattr(runner, "_steps"):
        watch.wrap(runner._steps, "_prepare", "launch: inputs and attention plan")
    if hasattr(runner, "collect"):
        watch.wrap(runner, "collect", "collect: read results")
    launch = runner.launch

    def launched(parts: list[Part], reads: list[Read]) -> Any:
        flight = launch(parts, reads)
        return Replaced(flight, {"wait": watch.timed(flight.wait, "wait for the card")})

    runner.launch = launched  # type: ignore[method-assign]


class Pump:
    """Keeps `outstanding` requests in the engine from a thread of its own; a context manager."""

    def __init__(self, engine: Engine, requests: Iterator[Request], outstanding: int) -> None:
        self.answered = 0
        self._engine = engine
        self._requests = cycle(list(islice(requests, AHEAD)))
        self._outstanding = outstanding
        self._slots = threading.Semaphore(outstanding)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)

    def __enter__(self) -> Pump:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        for _ in range(self._outstanding):
            self._slots.acquire()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._slots.acquire()
            self._engine.submit(next(self._requests), on_done=self._done)

    def _done(self, outcome: Outcome) -> None:
        self.answered += 1  # the engine's thread alone calls this, but for refusals
        self._slots.release()


def host_window(engine: Engine, pump: Pump, watch: Stopwatch, seconds: float) -> dict[str, Any]:
    """What the step thread did, in ms a second, and beside it what submitting cost other threads."""
    answered, steps, began = pump.answered, engine.status().steps, time.perf_counter()
    watch.on = True
    time.sleep(seconds)
    watch.on = False
    whole = time.perf_counter() - began
    steps = engine.status().steps - steps
    parts: list[dict[str, Any]] = [
        {
            "thread": "step" if thread == STEP_THREAD else "others",
            "part": part,
            "ms_a_second": round(spent.wall / whole * 1e3, 2),
            "cpu_ms_a_second": round(spent.cpu / whole * 1e3, 2),
            "calls_a_second": round(spent.calls / whole, 1),
        }
        for (thread, part), spent in watch.spent.items()
    ]
    step = [each for each in parts if each["thread"] == "step"]
    rest = round(1e3 - sum(each["ms_a_second"] for each in step), 2)
    parts.append({"thread": "step", "part": "the loop itself, locks, waiting for work", "ms_a_second": rest})
    return {
        "requests_per_s": round((pump.answered - answered) / whole, 1),
        "steps_per_s": round(steps / whole, 1),
        "parts": sorted(parts, key=lambda each: (each["thread"] != "step", -each["ms_a_second"])),
    }


def card_window(pump: Pump, seconds: float) -> dict[str, Any]:
    """What the card did, in ms a second, by group of kernels."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        answered, began = pump.answered, time.perf_counter()
        time.sleep(seconds)
        whole, answered = time.perf_counter() - began, pump.answered - answered
    ran = [
        (event.name, float(event.time_range.elapsed_us()))
        for event in profiler.events() or ()
        if event.device_type.name == "CUDA"
    ]
    if not ran:
        raise SystemExit("the profiler saw no kernel on the card")
    return {"requests_per_s_profiled": round(answered / whole, 1), **kernels(ran, whole)}


def kernels(ran: Iterable[tuple[str, float]], seconds: float) -> dict[str, Any]:
    """(name, microseconds) of each kernel that ran in a window, by group; the longest names of each group
    show what is in it."""
    groups: dict[str, dict[str, float]] = {}
    launches: dict[str, int] = {}
    for name, us in ran:
        group = group_of(name)
        names = groups.setdefault(group, {})
        names[name] = names.get(name, 0.0) + us
        launches[group] = launches.get(group, 0) + 1
    busy = sum(sum(names.values()) for names in groups.values())
    found: list[dict[str, Any]] = [
        {
            "group": group,
            "ms_a_second": round(sum(names.values()) / seconds / 1e3, 2),
            "share_of_kernel_time": round(sum(names.values()) / busy, 4),
            "launches_a_second": round(launches[group] / seconds),
            "longest": sorted(names, key=lambda name: -names[name])[:2],
        }
        for group, names in groups.items()
    ]
    found.append({"group": IDLE, "ms_a_second": round(max(0.0, 1e3 - busy / seconds / 1e3), 2)})
    return {"kernels": sorted(found, key=lambda each: -each["ms_a_second"])}


def group_of(kernel: str) -> str:
    return next((name for name, found in GROUPS.items() if re.search(found, kernel, re.IGNORECASE)), OTHER)


def measure(engine: Engine, scenario: str, outstanding: int, seconds: float, on_card: bool) -> dict[str, Any]:
    watch = Stopwatch()
    attach(engine, watch)
    results: dict[str, Any] = {"scenario": scenario, "outstanding": outstanding}
    with Pump(engine, SCENARIOS[scenario](), outstanding) as pump:
        time.sleep(WARM_S)
        results["host"] = host_window(engine, pump, watch, seconds)
        if on_card:
            results["card"] = card_window(pump, seconds)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--adapter", type=Path)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="a CPU has the host's part")
    parser.add_argument("--kv-dtype", default="auto", choices=("auto", "float16", "bfloat16", "fp8_e4m3"))
    parser.add_argument("--scenario", default="score_resident", choices=tuple(SCENARIOS))
    parser.add_argument("--outstanding", type=int, default=96)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each window")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    on_card = given.device == "cuda"
    tune_interpreter()  # as the server does
    config = EngineConfig(device=given.device, kv_dtype=given.kv_dtype)
    with Engine.create(config, given.model, given.adapter) as engine:
        results = {"kernels": engine.status().kernels, "torch": torch.__version__}
        results |= measure(engine, given.scenario, given.outstanding, given.seconds, on_card)
    path = write("profile_engine", results, out=given.out)
    print("\n".join(section(results, path.name)))


if __name__ == "__main__":
    main()
