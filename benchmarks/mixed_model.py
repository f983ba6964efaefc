"""Mixed traffic on a modelled device: the real core on a virtual clock.

    python -m benchmarks.mixed_model [--machine card cpu] [--seconds S] [--limits share=4 fill=512]

Says what short requests wait in the engine with 0, 10 and 30% long ones at the same offered rate, so that a
change of the schedule can be judged in a minute and without a quiet machine. Neither the host's work nor what
is outside the engine is modelled. A step of n tokens takes `fixed_s + n x token_s`; the constants are
fitted to steps of each machine.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from engine.core import Core, CoreLimits, Step
from engine.pages import PagePool
from engine.request import Outcome, Rank, Score, Scored
from engine.runner import ReadPair, single_reads
from engine.schedule import StepLimits
from engine.task import RankTask, Task, Terms

CALLERS = 128
TOOLS = tuple(tuple([1] * 40 + [1000 + number] * 40) for number in range(322))
TOOL_TOKENS = 128  # the most that a tool may have
SHARES = (0.0, 0.1, 0.3)


@dataclass(frozen=True, slots=True)
class Kind:
    """A request: tokens of its query, rows, new tokens of each row."""

    query: int
    rows: int
    suffix: int


@dataclass(frozen=True, slots=True)
class Machine:
    step: StepLimits
    depth: int
    pages: int
    fixed_s: float
    token_s: float
    choice_s: float  # from the query's vector to the rows
    rate: float  # arrivals a second
    short: Kind
    long: Kind
    stall_s: float = 0.0  # by which a step takes longer once a second: the host was kept from the device


MACHINES = {
    "card": Machine(
        StepLimits(8192, 512), 2, 4355, 0.0012, 0.55e-6, 0.008, 500.0, Kind(30, 32, 30), Kind(256, 64, 265)
    ),
    "cpu": Machine(
        StepLimits.for_slow_steps(512, 512),
        1,
        5031,
        0.040,
        0.71e-3,
        0.003,
        0.7,
        Kind(30, 16, 30),
        Kind(256, 32, 265),
    ),
}


class Model:
    """One run: requests arrive, the device computes, latencies are written down."""

    def __init__(self, machine: Machine, seed: int) -> None:
        self.machine = machine
        self.random = random.Random(seed)
        self._arrivals = random.Random(seed)  # its own, so that two schedules meet the same arrivals
        self._stalls = random.Random(seed)
        limits = CoreLimits(machine.step, machine.depth, 4096, 8_000_000, 49_152, 8192)
        self.core = Core(PagePool(machine.pages, 16), limits)
        self.core.not_ready = ""
        self.now = 0.0
        self.latencies: dict[Kind, list[float]] = {machine.short: [], machine.long: []}
        self.refused = 0
        self._flights: deque[Step] = deque()
        self._stall_at = 1.0
        self._free_at = 0.0  # when the device has computed all that was launched
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._callers = itertools.cycle([f"caller {number}" for number in range(CALLERS)])
        self.core.submit(Score(TOOLS, (2,) * 4, 1, 2), Terms(0.0, None, "warm-up", lambda outcome: None), 0.0)
        self._run()

    def offer(self, rate: float, long_share: float, seconds: float) -> float:
        """Poisson arrivals, until all have ended: how long that takes, in `seconds`."""
        began, until = self.now, self.now + seconds

        def arrive() -> None:
            if self.now < until:
                is_long = self._arrivals.random() < long_share
                self._submit(self.machine.long if is_long else self.machine.short, lambda: None)
                self._at(self._arrivals.expovariate(rate), arrive)

        arrive()
        self._run()
        return (self.now - began) / seconds

    def saturate(self, clients: int, seconds: float) -> float:
        """Short answers a second that so many clients in closed loops get."""
        until, answered = self.now + seconds, 0

        def again() -> None:
            if self.now < until:
                self._submit(self.machine.short, ended)

        def ended() -> None:
            nonlocal answered
            answered += self.now < until
            self._at(0.0, again)

        for _ in range(clients):
            again()
        self._run()
        return answered / seconds

    def _at(self, delay: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self.now + delay, next(self._order), act))

    def _submit(self, kind: Kind, then: Callable[[], None]) -> None:
        core, began, new = self.core, self.now, self.random.randrange
        query = tuple(new(20_000, 49_000) for _ in range(kind.query))
        suffix = tuple(new(20_000, 49_000) for _ in range(kind.suffix))
        task: list[Task] = []

        def done(outcome: Outcome) -> None:
            if isinstance(outcome, Scored):
                self.latencies[kind].append(self.now - began)
            else:
                self.refused += 1
            then()

        def choose(vector: tuple[float, ...]) -> None:
            prefixes = tuple(self.random.sample(TOOLS, kind.rows))
            self._at(self.machine.choice_s, partial(supply, prefixes))

        def supply(prefixes: tuple[tuple[int, ...], ...]) -> None:
            if isinstance(task[0], RankTask):
                core.supply(task[0], prefixes, self.now)

        rank = Rank(query, kind.rows, TOOL_TOKENS, suffix, 1, 2)
        terms = Terms(began, began + 600.0, next(self._callers), done, choose)
        task.append(core.submit(rank, terms, began))

    def _run(self) -> None:
        self._advance()
        while self._agenda:
            self.now, _, act = heapq.heappop(self._agenda)
            act()
            self._advance()

    def _advance(self) -> None:
        """Launches what the device has room for."""
        machine = self.machine
        self._tell()
        while len(self._flights) < machine.depth:
            step = self.core.begin_step(self.now)
            self._tell()
            if step is None:
                return
            seconds = machine.fixed_s + machine.token_s * step.tokens
            if self.now >= self._stall_at:
                seconds += machine.stall_s
                self._stall_at = self.now + self._stalls.expovariate(1.0)
            self._free_at = max(self._free_at, self.now) + seconds
            self._flights.append(step)
            self._at(self._free_at - self.now, partial(self._collect, seconds))

    def _collect(self, seconds: float) -> None:
        step = self._flights.popleft()
        reads = single_reads(step.parts, step.reads)
        outputs = [0.5 if isinstance(read, ReadPair) else (1.0,) for read in reads]
        self.core.end_step(step, outputs, self.now, seconds)

    def _tell(self) -> None:
        while self.core.has_events:
            for event in self.core.take_events():
                event()


def quantile(values: Sequence[float], part: float) -> float:
    """In milliseconds; 0.0 of none."""
    return 1000.0 * sorted(values)[max(0, math.ceil(part * len(values)) - 1)] if values else 0.0


def report(machine: Machine, seconds: float, seed: int) -> None:
    peak = Model(machine, seed).saturate(4 if machine.depth == 1 else 256, seconds)
    print(f"peak of short ones alone {peak:.2f}/s, offered {machine.rate:g}/s", flush=True)
    alone = 0.0
    for share in SHARES:
        model = Model(machine, seed)
        lasted = model.offer(machine.rate, share, seconds)
        short, long = model.latencies[machine.short], model.latencies[machine.long]
        p99 = quantile(short, 0.99)
        alone = alone or p99
        print(
            f"{share:4.0%} long: short p50 {quantile(short, 0.5):.1f} ms, p99 {p99:.1f} ms, "
            f"{p99 / alone:.2f} x alone; long p50 {quantile(long, 0.5):.1f} ms, "
            f"p99 {quantile(long, 0.99):.1f} ms; {model.refused} refused; "
            f"all ended {lasted:.2f} x the time of arrivals",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machine", nargs="+", choices=list(MACHINES), default=list(MACHINES))
    parser.add_argument("--seconds", type=float, help="of arrivals; by default 20 on a card, 3,000 on a CPU")
    parser.add_argument("--limits", nargs="+", default=[], metavar="NAME=NUMBER", help="of a step")
    parser.add_argument("--rate", type=float, help="arrivals a second")
    parser.add_argument("--stall", type=float, default=0.0, help="seconds that a step a second takes longer")
    parser.add_argument("--seed", type=int, default=2)
    given = parser.parse_args()
    changes = {name: int(number) for name, number in (item.split("=") for item in given.limits)}
    for name in given.machine:
        machine = MACHINES[name]
        machine = replace(
            machine,
            step=replace(machine.step, **changes),
            rate=given.rate or machine.rate,
            stall_s=given.stall,
        )
        print(f"{name}: {machine.step}", flush=True)
        report(machine, given.seconds or (20.0 if name == "card" else 3000.0), given.seed)


if __name__ == "__main__":
    main()
