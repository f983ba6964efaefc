"""Drives the engine's core on a virtual clock, as the engine's own thread drives it.

What happens is drawn from one random generator and ordered by time, so a seed gives the same run
every time. After every event all that must hold is checked (`checks`).
"""

from __future__ import annotations

import hashlib
import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from benchmarks.simulation.checks import (
    Figures,
    Rounds,
    Service,
    Turns,
    awaits_choice,
    check_counts,
    check_load,
    check_pins,
    check_ready,
    check_rebuilt,
    check_refusal,
    check_step,
    figures,
    require,
)
from benchmarks.simulation.traffic import OUTPUT_TOKENS, Call, Traffic, World, random_world
from engine.core import Core, Step
from engine.errors import Refusal, RefusalCode
from engine.pages import PagePool
from engine.queue import Bypass, Turn, WaitQueue
from engine.request import Failed, Outcome, Rank
from engine.runner import Output, Read, ReadPair, ReadToken, single_reads
from engine.task import RankTask, SequenceTask, Task, Terms

REQUESTS_A_WORLD = 5_000
FIGURES_EVERY, STEPS_EVERY = 100, 20  # events of which one is checked by brute force
RATE_AGE_S = 60.0  # in which a rate that nothing corrects loses half its say
OUTLIER = 10.0  # times what a request takes, that a measured rate is wrong at most
FAULT = Failed("device_fault", "A step failed on the device; the engine has stopped.")


@dataclass(slots=True, eq=False)
class Asked:
    """A request and what became of it; `outcome` is "" until then."""

    call: Call
    deadline: float | None
    task: Task | None = None
    outcome: str = ""
    supplied: bool = False


@dataclass(slots=True)
class Tally:
    """What came of the requests of a run. `digest` is the hash of all its events, in order."""

    requests: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    cancelled_while: Counter[str] = field(default_factory=Counter)
    disturbances: Counter[str] = field(default_factory=Counter)
    events: int = 0
    steps: int = 0
    refusals_recomputed: int = 0
    pools_rebuilt: int = 0
    most_passed: int = 0
    virtual_s: float = 0.0
    digest: str = ""

    def add(self, other: Tally) -> None:
        for name in ("outcomes", "cancelled_while", "disturbances"):
            getattr(self, name).update(getattr(other, name))
        for name in ("requests", "events", "steps", "refusals_recomputed", "pools_rebuilt", "virtual_s"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.most_passed = max(self.most_passed, other.most_passed)
        self.digest = hashlib.blake2b((self.digest + other.digest).encode(), digest_size=16).hexdigest()


def simulate(seed: int, requests: int, requests_a_world: int = REQUESTS_A_WORLD) -> Tally:
    """`requests` in as many worlds as it takes. Raises Violation where a promise is broken."""
    tally = Tally()
    for number in range(-(-requests // requests_a_world)):
        tally.add(simulate_world(seed, number, min(requests_a_world, requests - tally.requests)))
    return tally


def simulate_world(seed: int, number: int, requests: int) -> Tally:
    """One world of a seed. Raises Violation where a promise is broken."""
    rng = random.Random(f"{seed} {number}")
    return Simulator(random_world(rng), rng, requests).run()


class Simulator:
    """One world, from its first request until every one of them has ended."""

    def __init__(self, world: World, rng: random.Random, requests: int) -> None:
        self.world = world
        self.rng = rng
        self.now = 0.0
        self.tally = Tally()
        self.turns = Turns(Bypass())
        self._traffic = Traffic(world, rng)
        self._to_come = requests
        self._open: dict[Task, Asked] = {}
        self._lingering: set[int] = set()  # ended under a step in flight: they hold their pages still
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._deadlines: list[tuple[float, int, Asked]] = []
        self._hash = hashlib.blake2b(digest_size=16)
        self._flights: deque[tuple[Step, float, float]] = deque()  # launched at, ready at
        self._busy_until = 0.0
        self._collecting = False
        self._wakes_at = math.inf  # with nothing to do before
        self._neighbour = 1.0  # by how much a neighbour on the device slows a step
        self._fault_at: int | None = None  # the step that the device fails
        self._constraint_faults = 0  # before the last step
        self._rebuild_every = 50 + world.pages // 4
        self.core = self._new_core()

    def run(self) -> Tally:
        self._disturb_at_random()
        self._at(0.0, self._arrive)
        while self._agenda:
            when, _, happen = heapq.heappop(self._agenda)
            require(
                self._collecting or when <= self._next_deadline(), "an idle engine sleeps past a deadline"
            )
            self.now = max(self.now, when)  # after a jump of the clock much is late
            happen()
            self._tell()
            if not self._collecting:
                self._advance()
            self._check()
        self._rest()
        return self.tally

    # What callers do.

    def _arrive(self) -> None:
        for _ in range(min(self._to_come, self._traffic.size())):
            self._submit(self._traffic.call())
            self._to_come -= 1
        if self._to_come:
            self._at(self._traffic.gap(), self._arrive)

    def _submit(self, call: Call) -> None:
        core = self.core
        deadline = None if call.timeout is None else self.now + call.timeout
        asked = Asked(call, deadline)
        wanted = figures(core, call.request) if self._is_sampled(FIGURES_EVERY) else None
        terms = Terms(
            self.now, deadline, call.caller, partial(self._ended, asked), partial(self._vector_came, asked)
        )
        task = asked.task = core.submit(call.request, terms, self.now)
        self.tally.requests += 1
        self._note("s", task.number)
        self._open[task] = asked
        if task in core.queue:
            self.turns.add(task)
        else:
            require(task.number in core.running or task.terminal.ended, "a request is nowhere")
        self._check_decision(task, wanted)
        if not task.terminal.ended:
            if deadline is not None:
                heapq.heappush(self._deadlines, (deadline, self.tally.requests, asked))
            if call.cancel_after is not None:
                self._at(call.cancel_after, partial(self._cancel, asked))
            if call.timeout is not None and call.has_timer:
                self._at(call.timeout, partial(self._expire, asked))

    def _check_decision(self, task: Task, wanted: Figures | None) -> None:
        """Of a submission."""
        outcome = task.terminal.outcome
        if isinstance(outcome, Refusal):
            late = outcome.code in (RefusalCode.DEADLINE, RefusalCode.PAGES_SHORT)
            require(not late or task.terms.deadline is not None, "no deadline, and refused for it")
            if late and task.terms.deadline is not None and self.core.idle:
                self._check_idle_refusal(task, task.terms.deadline - self.now)
        if wanted is None:
            return
        tokens = task.work.tokens
        require(tokens in (0, wanted.tokens), f"{tokens} tokens are to be computed, not {wanted.tokens}")
        self.tally.refusals_recomputed += isinstance(outcome, Refusal)
        if isinstance(outcome, Refusal):
            check_refusal(self.core, outcome, wanted)
        elif not task.terminal.ended:
            require(wanted.empty <= wanted.total, "a request that can never run was taken")

    def _check_idle_refusal(self, task: Task, left: float) -> None:
        """Too late says a rate that is not far off, and one that is old says it of little alone."""
        true = self._device_s(task)
        require(
            left < OUTLIER * true, f"an idle engine takes {left / true:.0f} times the time for too little"
        )
        work, step_tokens = task.work, self.core.limits.step.tokens
        measured = self.core.times.seconds(work.tokens, max(work.steps, work.tokens / step_tokens))
        age = (self.now - self._busy_until) / RATE_AGE_S
        require(measured >= left * (1.0 + age), "an idle engine believes an old rate")

    def _device_s(self, task: Task) -> float:
        """What a request really keeps the device busy with, alone."""
        steps = max(task.work.steps, task.work.tokens / self.core.limits.step.tokens)
        return (self.world.fixed_s * steps + self.world.token_s * task.work.tokens) * self._neighbour

    def _cancel(self, asked: Asked) -> None:
        task = asked.task
        if task is None:
            return
        self.tally.cancelled_while[self._stage(asked, task)] += 1
        self.core.cancel(task)
        self._tell()
        require(bool(asked.outcome), "a request goes on though it was cancelled")

    def _stage(self, asked: Asked, task: Task) -> str:
        if asked.outcome:
            return "ended"
        if task.number not in self.core.running:
            return "queued"
        if isinstance(task, RankTask) and not asked.supplied:
            return "choosing" if task.vector is not None else "embedding"
        decoding = isinstance(task, SequenceTask) and not task.prompt_left
        where = "decode" if decoding else "prefill"
        return f"{where}, in flight" if task.in_flight else where

    def _expire(self, asked: Asked) -> None:
        task, core = asked.task, self.core
        if task is None or asked.outcome:
            return
        running = task if task.number in core.running else None
        wanted = figures(core, asked.call.request, running) if self._is_sampled(10) else None
        core.expire(task)
        outcome = task.terminal.outcome
        require(isinstance(outcome, Refusal), "a request goes on though it has expired")
        if wanted is not None and isinstance(outcome, Refusal):
            self.tally.refusals_recomputed += 1
            check_refusal(core, outcome, wanted)

    def _vector_came(self, asked: Asked, vector: tuple[float, ...]) -> None:
        require(isinstance(asked.call.request, Rank) and not asked.supplied, "a vector that nobody awaits")
        self._at(asked.call.supply_after, partial(self._supply, asked))

    def _supply(self, asked: Asked) -> None:
        if not isinstance(asked.task, RankTask) or asked.outcome:
            return
        if asked.call.supplies is None:
            self._cancel(asked)
            return
        held, is_short = asked.task.pages_held, self.turns.is_short
        self.core.supply(asked.task, asked.call.supplies, self.now)
        require(not is_short or asked.task.pages_held <= held, "pages that somebody waits for went to a rank")
        asked.supplied = True

    def _ended(self, asked: Asked, outcome: Outcome) -> None:
        require(not asked.outcome, f"a request that is {asked.outcome} has ended once more")
        task = asked.task
        require(task is None or task in self._open, "a request ended that was not open")
        name = str(outcome.code) if isinstance(outcome, Refusal | Failed) else type(outcome).__name__.lower()
        asked.outcome = name
        self.tally.outcomes[name] += 1
        if task is not None:
            del self._open[task]
            self.turns.remove(task)
            self._note(name, task.number)
            if task.number in self.core.running:
                self._lingering.add(task.number)

    # What the engine's thread does.

    def _advance(self) -> None:
        """Steps until it would wait for the device or for somebody."""
        core = self.core
        while True:
            self._rounds.round.clear()
            step = core.begin_step(self.now)
            if self._rounds.round:
                self.turns.check_round(self._rounds.round, self.now)
            told = self._tell()
            if step is not None and not self._launch(step):
                return
            if self._flights and (step is None or len(self._flights) >= core.limits.depth):
                self._collecting = True
                self._at(self._flights[0][2] - self.now, self._collect)
                return
            if step is None and not told:  # what was told may have made room
                self._wait()
                return

    def _launch(self, step: Step) -> bool:
        """False where the device has failed."""
        core, self.tally.steps = self.core, self.tally.steps + 1
        self._note("l", step.tokens)
        for part in step.slices:
            task = core.running[part.key]
            require(not task.terminal.ended, "a request that has ended is computed")
            late = task.terms.deadline is not None and task.terms.deadline <= self.now
            require(not late, "a request is computed whose deadline has passed")
        is_checked = self._is_sampled(STEPS_EVERY)
        if is_checked:
            check_step(core, step)
        faults = self.tally.outcomes["constraint_fault"]
        is_whole = faults == self._constraint_faults  # else it was planned with a row that then failed
        self._constraint_faults = faults
        self.service.launched(core, step, is_checked=is_checked and is_whole)
        if self._fault_at is not None and self.tally.steps >= self._fault_at:
            self._fault_at = None
            self._fail()
            return False
        began = max(self.now, self._busy_until if not self._flights else self._flights[-1][2])
        self._flights.append((step, self.now, began + self.world.step_s(step.tokens) * self._neighbour))
        return True

    def _collect(self) -> None:
        self._collecting = False
        step, launched, _ = self._flights.popleft()
        alone = launched >= self._busy_until
        seconds = self.now - max(launched, self._busy_until)
        self._busy_until = self.now
        self._note("c", step.tokens)
        outputs = [self._output(read) for read in single_reads(step.parts, step.reads)]
        self.core.end_step(step, outputs, self.now, seconds, alone=alone)

    def _output(self, read: Read) -> Output:
        if isinstance(read, ReadPair):
            return 0.5
        return self.rng.randrange(OUTPUT_TOKENS) if isinstance(read, ReadToken) else (1.0,)

    def _wait(self) -> None:
        """Nothing can run: who runs must be waiting for its caller, and who waits for pages of these."""
        core = self.core
        for task in core.running.values():
            require(
                awaits_choice(task),
                f"request {task.number} runs, has all it needs and is not computed",
            )
        require(bool(core.running) or not len(core.queue), "requests wait while nothing runs")
        idle = any(turn is not Turn.NO_PAGES for _, turn, _ in self._rounds.round) and len(core.queue)
        require(not idle, "a request waits whose pages are free while the device has nothing to do")
        deadline = core.next_deadline()
        if deadline is not None and deadline != self._wakes_at:
            self._wakes_at = deadline
            heapq.heappush(self._agenda, (deadline, next(self._numbers), self._wake))

    def _wake(self) -> None:
        """The thread looks for something to do; it does after every event."""

    # What disturbs.

    def _disturb_at_random(self) -> None:
        span = self._to_come / self.world.rate
        kinds = (self._break, self._drain, self._jump, self._meet_neighbour)
        for _ in range(self.world.disturbances):
            self._at(self.rng.uniform(0.0, span), self.rng.choice(kinds))

    def _break(self) -> None:
        """One of the next steps fails on the device."""
        self._fault_at = self.tally.steps + self.rng.randint(1, 3)

    def _fail(self) -> None:
        """As the engine's thread ends after an exception; then another engine takes its place."""
        self.tally.disturbances["device fault"] += 1
        core = self.core
        core.not_ready = "a step failed on the device"
        core.end_all(lambda task: FAULT)
        core.abandon_steps()
        self._flights.clear()
        self._tell()
        require(core.idle and not self._open, "requests are left after a fault of the device")
        require(not core.pool.counts().held, "pages are held after a fault of the device")
        check_rebuilt(core)
        self._lingering.clear()
        self.core = self._new_core()
        self.core.not_ready = "it is loading"
        self._at(self.world.short_s, self._get_ready)
        self._wait()

    def _get_ready(self) -> None:
        self.core.not_ready = ""

    def _drain(self) -> None:
        self.tally.disturbances["drain"] += 1
        self.core.draining = True
        patience = self.world.short_s * 2.0 ** self.rng.uniform(-3.0, 4.0)
        self._at(patience, partial(self._drained, self.core))

    def _drained(self, core: Core) -> None:
        """What is left is refused; later the same engine takes requests again."""
        if core is not self.core:
            return
        core.end_all(lambda task: core.refusal(task, RefusalCode.DRAINING))
        self._tell()
        require(not self._open, "requests are left after a drain")
        core.draining = False

    def _jump(self) -> None:
        """The process was stopped: what should have happened meanwhile happens now."""
        self.tally.disturbances["jump"] += 1
        self.now += self.rng.choice((self.world.short_s, 10.0, 100.0))

    def _meet_neighbour(self) -> None:
        self.tally.disturbances["neighbour"] += 1
        self._neighbour = self.rng.choice((1.0, 1.5, 4.0))

    # Bookkeeping.

    def _next_deadline(self) -> float:
        """Of those that have not ended."""
        while self._deadlines and self._deadlines[0][2].outcome:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else math.inf

    def _new_core(self) -> Core:
        core = Core(PagePool(self.world.pages, self.world.page_tokens), self.world.limits)
        core.not_ready = ""
        self.service = Service()
        self._rounds = Rounds(lambda: not core._overdue_has_ended)
        core.queue = WaitQueue(Bypass(), self._rounds)
        return core

    def _at(self, delay: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self.now + delay, next(self._numbers), happen))

    def _is_sampled(self, every: int) -> bool:
        return self.rng.random() * every < 1.0

    def _note(self, what: str, number: int) -> None:
        self._hash.update(f"{what} {number} {self.now!r};".encode())

    def _tell(self) -> bool:
        """Calls back whoever has something coming. False where nobody had."""
        told = False
        while events := self.core.take_events():
            told = True
            for event in events:
                event()
        return told

    def _check(self) -> None:
        core = self.core
        self.tally.events += 1
        self._lingering.intersection_update(core.running)
        waiting, running = len(core.queue), len(core.running) - len(self._lingering)
        require(
            waiting + running == len(self._open) and waiting == len(self.turns),
            f"{len(self._open)} requests have not ended, {waiting} wait and {running} run",
        )
        limits = core.limits
        bounded = waiting <= limits.max_queue and core.queue.tokens <= limits.max_queued_tokens
        require(bounded, f"{waiting} requests of {core.queue.tokens} tokens wait")
        ended = sum(self.tally.outcomes.values())
        require(self.tally.requests == ended + len(self._open), "a request is unaccounted for")
        check_counts(core)
        check_ready(core)
        if self.tally.events % self._rebuild_every == 0:
            self.tally.pools_rebuilt += 1
            check_rebuilt(core)
            check_pins(core)
            check_load(core)
            self._check_places()

    def _check_places(self) -> None:
        """Every open request waits or runs, and not both."""
        core = self.core
        waiting = {task.number for task in core.queue}
        running = {number for number, task in core.running.items() if not task.terminal.ended}
        open_ = {task.number for task in self._open}
        tokens = sum(task.work.tokens for task in core.queue)
        require(tokens == core.queue.tokens, f"{core.queue.tokens} tokens count as waiting, {tokens} are")
        require(not waiting & running and waiting | running == open_, "a request is in no place or in two")

    def _rest(self) -> None:
        """Nothing is to come any more: everything has ended and every page has returned."""
        core = self.core
        require(core.idle and not self._open, f"{len(self._open)} requests never end")
        require(not core.pool.counts().held, f"{core.pool.counts().held} pages never return")
        check_rebuilt(core)
        self.tally.most_passed = self.turns.most_passed
        self.tally.virtual_s = self.now
        self.tally.digest = self._hash.hexdigest()
