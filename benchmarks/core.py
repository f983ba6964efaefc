"""What a request costs the host: the engine's core over a runner that computes nothing.

    python -m benchmarks.core [--profile NAME]

Costs are CPU time of this process, so that a busy machine does not show as a slow core. A scenario
submits all its requests at once, of eight callers and with a deadline, and then steps until they have
ended, two steps in flight; what its requests are made of is not counted. The garbage collector is set as
the server sets it. The device's share of a request is in none of these figures.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from benchmarks.engine import cold_scores, generations, resident_scores
from benchmarks.report import write
from engine.core import Core, CoreLimits, Step
from engine.errors import Refusal
from engine.pages import PagePool
from engine.request import Outcome, Request
from engine.runner import Output, Read, ReadPair, ReadToken, single_reads
from engine.schedule import StepLimits
from engine.task import Terms
from mcp_discovery.tuning import tune_interpreter

PAGES, PAGE_TOKENS = 4355, 16  # what the default allowance leaves on a card
WARM = 16  # requests before the first one that counts: they bring the resident prefixes in


@dataclass(frozen=True, slots=True)
class Scenario:
    requests: Callable[[], Iterator[Request]]
    count: int


SCENARIOS = {
    "resident_200_waiting": Scenario(lambda: resident_scores(80, 30), 200),
    "resident_2000_waiting": Scenario(lambda: resident_scores(80, 30), 2000),
    "cold_200_waiting": Scenario(lambda: cold_scores(66, 30), 200),
    "generate_700_12": Scenario(lambda: generations(700, 12), 400),
}


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU time of the host by request and by row of a step; `requests_per_s` is what it allows one core."""

    requests: int
    steps: int
    rows: int
    submit_us_per_request: float
    run_us_per_request: float
    run_us_per_row: float
    requests_per_s: float


class Loop:
    """Steps a core as the engine does, two steps in flight."""

    def __init__(self) -> None:
        limits = CoreLimits(
            step=StepLimits(tokens=8192, rows=512),
            depth=2,
            max_queue=4096,
            max_queued_tokens=8_000_000,
            vocabulary=49152,
            context=8192,
        )
        self.core = Core(PagePool(PAGES, PAGE_TOKENS), limits)
        self.core.not_ready = ""
        self.ended: list[Outcome] = []
        self.steps = self.rows = 0

    def submit(self, requests: list[Request]) -> None:
        for number, request in enumerate(requests):
            now = time.monotonic()
            terms = Terms(now, now + 60.0, f"caller {number % 8}", self.ended.append)
            self.core.submit(request, terms, now)

    def run(self) -> None:
        """Until nothing is left to run."""
        core, flights = self.core, deque[Step]()
        while True:
            step = core.begin_step(time.monotonic())
            if step is not None:
                flights.append(step)
                self.steps += 1
                self.rows += sum(part.rows for part in step.slices)
            if flights and (step is None or len(flights) >= core.limits.depth):
                ending = flights.popleft()
                outputs = [null_output(read) for read in single_reads(ending.parts, ending.reads)]
                core.end_step(ending, outputs, time.monotonic(), 0.005)
            elif step is None:
                return
            for event in core.take_events():
                event()


def null_output(read: Read) -> Output:
    if isinstance(read, ReadPair):
        return 0.5
    return 7 if isinstance(read, ReadToken) else (1.0,)


def measure(scenario: Scenario, profile: cProfile.Profile | None = None) -> Cost:
    """Raises RuntimeError where a request is refused or does not end."""
    source = scenario.requests()
    loop = Loop()
    loop.submit(list(islice(source, WARM)))
    loop.run()
    loop.ended.clear()
    loop.steps = loop.rows = 0
    requests = list(islice(source, scenario.count))
    if profile:
        profile.enable()
    started = time.process_time()
    loop.submit(requests)
    submitted = time.process_time()
    loop.run()
    ended = time.process_time()
    if profile:
        profile.disable()
    if len(loop.ended) < len(requests) or any(isinstance(outcome, Refusal) for outcome in loop.ended):
        raise RuntimeError("a request of the benchmark was refused or did not end")
    count = len(requests)
    return Cost(
        requests=count,
        steps=loop.steps,
        rows=loop.rows,
        submit_us_per_request=round((submitted - started) / count * 1e6, 1),
        run_us_per_request=round((ended - submitted) / count * 1e6, 1),
        run_us_per_row=round((ended - submitted) / loop.rows * 1e6, 2),
        requests_per_s=round(count / (ended - started), 1),
    )


def best(scenario: Scenario, repeats: int) -> Cost:
    """The cheapest of several runs: what disturbs a run only ever adds to it."""
    return max((measure(scenario) for _ in range(repeats)), key=lambda cost: cost.requests_per_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", choices=SCENARIOS, help="profile one scenario instead")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    tune_interpreter()
    if args.profile:
        profile = cProfile.Profile()
        measure(SCENARIOS[args.profile], profile)
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        return
    costs = {}
    for name in args.only:
        cost = costs[name] = best(SCENARIOS[name], args.repeats)
        print(
            f"{name}: {cost.requests_per_s:,.0f} requests/s, submit {cost.submit_us_per_request} us and run "
            f"{cost.run_us_per_request} us a request, {cost.run_us_per_row} us a row, {cost.steps} steps"
        )
    write("core", {name: asdict(cost) for name, cost in costs.items()}, out=args.out)


if __name__ == "__main__":
    main()
