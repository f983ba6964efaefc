"""Runs the simulation over seeds, several processes at once, and writes what came of it.

A run that finds a violation names its seed, world and sentence, and exits 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.report import write
from benchmarks.simulation.checks import Violation
from benchmarks.simulation.simulator import REQUESTS_A_WORLD, Tally, simulate_world
from mcp_discovery.tuning import tune_interpreter

WORLDS_A_TASK = 4


@dataclass(frozen=True, slots=True)
class Part:
    """Some worlds of one seed: what came of them, CPU seconds, and the violation that ended it, or ""."""

    seed: int
    tally: Tally
    cpu_s: float
    violation: str = ""


def run_part(seed: int, first: int, requests: list[int]) -> Part:
    """Worlds `first`, `first` + 1 ... of a seed, with so many requests each."""
    started = time.process_time()
    tally, violation = Tally(), ""
    for number, count in enumerate(requests, first):
        try:
            tally.add(simulate_world(seed, number, count))
        except Violation as found:
            violation = f"seed {seed}, world {number} of {count} requests: {found}"
            break
    return Part(seed, tally, time.process_time() - started, violation)


def parts_of(seed: int, requests: int) -> list[tuple[int, int, list[int]]]:
    """The arguments of `run_part` for one seed, in order."""
    sizes = [min(REQUESTS_A_WORLD, requests - at) for at in range(0, requests, REQUESTS_A_WORLD)]
    return [(seed, at, sizes[at : at + WORLDS_A_TASK]) for at in range(0, len(sizes), WORLDS_A_TASK)]


def gather(parts: list[Part]) -> dict[str, Any]:
    """Results by seed and in all."""
    seeds: dict[int, Tally] = {}
    total = Tally()
    for part in parts:  # in order, which the digest of a seed depends on
        seeds.setdefault(part.seed, Tally()).add(part.tally)
        total.add(part.tally)
    cpu_s = sum(part.cpu_s for part in parts)
    return {
        "violations": [part.violation for part in parts if part.violation],
        "requests_per_s_per_core": round(total.requests / max(cpu_s, 1e-9)),
        "all": _as_json(total),
        "seeds": {seed: _as_json(tally) for seed, tally in seeds.items()},
    }


def _as_json(tally: Tally) -> dict[str, Any]:
    values: dict[str, Any] = {each.name: getattr(tally, each.name) for each in fields(tally)}
    return {**values, "virtual_s": round(tally.virtual_s, 1)}


def seeds_of(text: str) -> list[int]:
    """`0-9` or `3` or `1,5-7`."""
    seeds: list[int] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        seeds.extend(range(int(low), int(high or low) + 1))
    return seeds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=seeds_of, default=[0], help="such as 0-9")
    parser.add_argument("--requests", type=int, default=20_000, help="of each seed")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    tune_interpreter()
    work = [part for seed in given.seeds for part in parts_of(seed, given.requests)]
    parts: list[Part] = []
    with ProcessPoolExecutor(given.processes, initializer=tune_interpreter) as pool:
        for part in pool.map(run_part, *zip(*work, strict=True)):
            parts.append(part)
            print(f"\r{len(parts)} of {len(work)} parts", end="", flush=True)
            if part.violation:
                print(f"\n{part.violation}")
    results = gather(parts)
    total = results["all"]
    print(
        f"\n{total['requests']:,} requests, {total['events']:,} events, "
        f"{len(results['violations'])} violations, {results['requests_per_s_per_core']:,} requests/s a core"
    )
    write("simulation", results, out=given.out)
    return 1 if results["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
