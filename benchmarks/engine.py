"""The engine alone: score and generate rates on the shapes of `targets.toml`, memory sampled throughout.

    python -m benchmarks.engine --model FILE [--device cuda] [--seconds 6] [--only NAME ...]

Requests are made of random tokens, ahead, and kept coming by one thread, `--outstanding` of them at any time.
"""

from __future__ import annotations

import argparse
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import Target, write
from engine import Engine, EngineConfig, Generate, Generated, Outcome, Score, Scored
from engine.request import Request, Tokens
from mcp_discovery.tuning import tune_interpreter

VOCABULARY = 40_000
POSITIVE, NEGATIVE = 100, 200
AHEAD = 4096


@dataclass(frozen=True, slots=True)
class Rate:
    """What a scenario reached. Latencies are milliseconds from submission to outcome."""

    requests: int
    seconds: float
    requests_per_s: float
    tokens_per_s: float  # prompt tokens computed, cached ones not counted
    p50_ms: float
    p99_ms: float
    failed: int


class Text:
    """Random tokens that cost the load next to nothing: slices of one long list, at random places."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._all = tuple(self.random.randrange(1000, VOCABULARY) for _ in range(500_000))

    def take(self, count: int) -> Tokens:
        at = self.random.randrange(len(self._all) - count)
        return self._all[at : at + count]


def resident_scores(prefix: int, suffix: int, tools: int = 120, rows: int = 32) -> Iterator[Request]:
    """Groups over a set of tools that all stay resident."""
    source = Text(1)
    known = [source.take(prefix) for _ in range(tools)]
    while True:
        prefixes = tuple(source.random.sample(known, rows))
        yield Score(prefixes, source.take(suffix), POSITIVE, NEGATIVE)


def cold_scores(prefix: int, suffix: int, rows: int = 32) -> Iterator[Request]:
    """Groups over tools that hardly anybody asked for before: one of 500,000 texts a row."""
    source = Text(2)
    while True:
        prefixes = tuple(source.take(prefix) for _ in range(rows))
        yield Score(prefixes, source.take(suffix), POSITIVE, NEGATIVE)


def generations(prompt: int, output: int) -> Iterator[Request]:
    source = Text(3)
    while True:
        yield Generate(source.take(prompt), max_tokens=output)


SCENARIOS: dict[str, Callable[[], Iterator[Request]]] = {
    "score_resident": lambda: resident_scores(80, 30),  # 66 tokens filled up to a page, as served
    "score_resident_unaligned": lambda: resident_scores(66, 30),  # 64 cached, 32 new
    "score_resident_38_new": lambda: resident_scores(56, 30),  # 48 cached, 38 new
    "score_cold": lambda: cold_scores(66, 30),
    "generate_700_12": lambda: generations(700, 12),
}


class Load:
    """Keeps `outstanding` requests in the engine for `seconds`, after a warm-up of a quarter of it."""

    def __init__(self, engine: Engine, requests: Iterator[Request], outstanding: int) -> None:
        self._engine = engine
        # Made ahead, so that making them takes no time from the engine. When they begin anew, nothing of the
        # first is resident any more that was not meant to be.
        self._requests = cycle(list(islice(requests, AHEAD)))
        self._slots = threading.Semaphore(outstanding)
        self._outstanding = outstanding
        self._ended: list[tuple[float, float, Outcome]] = []  # submitted, ended

    def run(self, seconds: float) -> Rate:
        began = time.perf_counter()
        counted_from, until = began + seconds / 4, began + seconds * 5 / 4
        while time.perf_counter() < until:
            self._slots.acquire()
            self._submit(next(self._requests))
        for _ in range(self._outstanding):
            self._slots.acquire()
        return self._rate(counted_from, until)

    def _submit(self, request: Request) -> None:
        submitted = time.perf_counter()

        def done(outcome: Outcome) -> None:
            self._ended.append((submitted, time.perf_counter(), outcome))
            self._slots.release()

        self._engine.submit(request, on_done=done)

    def _rate(self, start: float, stop: float) -> Rate:
        inside = [entry for entry in self._ended if start <= entry[1] < stop]
        answers = [outcome for _, _, outcome in inside if isinstance(outcome, Scored | Generated)]
        waited = sorted((ended - submitted) * 1e3 for submitted, ended, _ in inside)
        computed = sum(o.usage.prompt_tokens - o.usage.cached_tokens for o in answers)
        failed = sum(not isinstance(o, Scored | Generated) for _, _, o in self._ended)
        return Rate(
            requests=len(answers),
            seconds=round(stop - start, 3),
            requests_per_s=round(len(answers) / (stop - start), 1),
            tokens_per_s=round(computed / (stop - start)),
            p50_ms=round(statistics.median(waited), 2) if waited else 0.0,
            p99_ms=round(waited[int(len(waited) * 0.99)], 2) if waited else 0.0,
            failed=failed,
        )


class BusyThread:
    """A Python thread that computes 40% of the time, in bursts of 4 ms."""

    def __init__(self, share: float = 0.4, burst_s: float = 0.004) -> None:
        self._share, self._burst = share, burst_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> BusyThread:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._burst * (1 - self._share) / self._share):
            until = time.perf_counter() + self._burst
            while time.perf_counter() < until:
                pass


class CardSampler:
    """The card's used bytes every 5 ms, as differences to before the engine."""

    def __init__(self) -> None:
        from engine.cuda.nvml import read_card

        self._read = read_card
        self._before = read_card().used
        self._stop = threading.Event()
        self.peak = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.005):
            self.peak = max(self.peak, self._read().used - self._before)

    def close(self) -> int:
        self._stop.set()
        self._thread.join()
        return self.peak


def measure(engine: Engine, names: list[str], seconds: float, outstanding: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in names:
        results[name] = asdict(Load(engine, SCENARIOS[name](), outstanding).run(seconds))
        print(f"{name}: {results[name]}", flush=True)
    if "score_resident" in names:
        with BusyThread():
            rate = Load(engine, SCENARIOS["score_resident"](), outstanding).run(seconds)
        results["score_resident_beside_busy_thread"] = asdict(rate)
        print(f"beside a busy thread: {rate}", flush=True)
        alone = Load(engine, SCENARIOS["score_resident"](), 1).run(min(seconds, 2.0))
        results["score_resident_one_at_a_time"] = asdict(alone)
    return results


def targets(results: dict[str, Any]) -> list[Target]:
    def rate(name: str) -> float:
        return float(results[name]["requests_per_s"])

    found = []
    if "score_resident" in results:
        busy = rate("score_resident_beside_busy_thread") / rate("score_resident")
        found.append(Target("engine.score_resident_requests_per_s", rate("score_resident"), "at least"))
        found.append(Target("engine.score_beside_busy_thread_ratio", busy, "at least"))
    if "score_cold" in results:
        found.append(Target("engine.score_cold_requests_per_s", rate("score_cold"), "at least"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--adapter", type=Path)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--kv-dtype", default="auto", choices=("auto", "float16", "bfloat16", "fp8_e4m3"))
    parser.add_argument("--step-tokens", type=int)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--outstanding", type=int, default=96)
    parser.add_argument("--only", nargs="+", choices=tuple(SCENARIOS), default=list(SCENARIOS))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    config = EngineConfig(device=given.device, kv_dtype=given.kv_dtype, step_tokens=given.step_tokens)
    tune_interpreter()  # as the server does
    sampler = CardSampler() if given.device == "cuda" else None
    started = time.perf_counter()
    with Engine.create(config, given.model, given.adapter) as engine:
        results = {"ready_s": round(time.perf_counter() - started, 2), "kernels": engine.status().kernels}
        results |= measure(engine, given.only, given.seconds, given.outstanding)
        status, loaded = engine.status(), engine.loaded
        results["pages"] = asdict(status.pages)
        if loaded is not None:
            results["plan_mib"] = {line.name: round(line.bytes / 2**20, 1) for line in loaded.plan.lines}
    if sampler is not None:
        results["nvml_peak_mib"] = round(sampler.close() / 2**20, 1)
        results["torch_peak_mib"] = round(torch.cuda.max_memory_reserved() / 2**20, 1)
        print(f"NVML peak {results['nvml_peak_mib']} MiB")
    write("engine", results, targets(results), out=given.out)


if __name__ == "__main__":
    main()
