"""The engine without its thread and device: every change of state is a method, time an argument.

A request is submitted, waits, is admitted with its pages, runs in steps and ends in one outcome.
`begin_step` says what to run next, `end_step` takes what came out. Whoever holds the lock calls;
what is to be told to callers is gathered in `events` and told outside it.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from functools import partial

from engine.admission import (
    Load,
    Moment,
    Need,
    Running,
    Sizes,
    Work,
    refuse,
    retry_after_ms,
    too_late,
)
from engine.batch import Part
from engine.client import EngineStatus
from engine.errors import Refusal, RefusalCode
from engine.pages import PagePool
from engine.queue import Turn, WaitQueue
from engine.rate import StepTimes
from engine.request import Cancelled, Failed, Outcome, Request, Score, Scored, Tokens
from engine.runner import Output, Read, ReadToken
from engine.schedule import Lane, Slice, StepLimits, plan_step, preference
from engine.sequence import RowBlock, Sequence
from engine.task import GroupTask, RankTask, Task, Terms, WindowLimits, new_task
from engine.validate import check_tokens

Event = Callable[[], None]
COMPILED = not __file__.endswith(".py")
_NO_NEED = Need(0, 0, 0)
_RATE_AGE_S = 60.0  # of a rate that is believed to within a factor of two
_MOST_RESERVED = 4  # 1 / of the pool, that may be held for rows that are not known yet
_FEW_STEPS = 4  # with fewer behind it, a rate may be that of a process that was stopped


@dataclass(frozen=True, slots=True)
class CoreLimits:
    """Step sizes, steps in flight, and the bounds of the queue."""

    step: StepLimits
    depth: int
    max_queue: int
    max_queued_tokens: int
    vocabulary: int
    context: int

    @property
    def backlog_tokens(self) -> int:
        """Prompt tokens of admitted requests that keep the device fed: the steps in flight and one more."""
        return (self.depth + 1) * self.step.tokens


@dataclass(frozen=True, slots=True)
class Step:
    """What to run: `parts` for the runner, `reads` for those with an output; `slices` are whose they are."""

    parts: list[Part]
    reads: list[Read]
    slices: tuple[Slice, ...]
    tokens: int


class Core:
    """All host state of an engine. Not thread-safe."""

    def __init__(self, pool: PagePool, limits: CoreLimits) -> None:
        self.pool = pool
        self.limits = limits
        self.times = StepTimes()
        self.queue: WaitQueue[Task] = WaitQueue()
        self.running: dict[int, Task] = {}  # admitted, until their pages are returned
        self.not_ready = "it has not passed its canary"  # why, "" when ready
        self.draining = False
        self.steps = 0
        self._stepped = 0.0  # when a step was last collected
        self._events: list[Event] = []
        self._load = Load((), limits.backlog_tokens)
        self._counted: dict[int, Running] = {}  # what of each request is in it
        self._changed: dict[int, Task] = {}  # that run and whose share of it may have changed since
        self._ready: dict[int, Task] = {}  # that may have something to launch; all others have not
        self._waiting_others: set[int] = set()  # of the requests in the queue, those that are no ranks
        self._overdue: Task | None = None  # the last that was admitted though it would not run yet
        self._numbers, self._turns = itertools.count(), itertools.count()
        self._deadlines: list[tuple[float, int, Task]] = []
        self._windows = WindowLimits(
            tokens=limits.backlog_tokens,
            rows=(limits.depth + 1) * limits.step.rows,
            # However many rows decode, what they leave of a step is enough for such a row.
            whole_row_tokens=max(0, min(limits.step.share_tokens, limits.step.tokens - limits.step.rows)),
        )

    @property
    def idle(self) -> bool:
        return not self.running and not len(self.queue)

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def take_events(self) -> list[Event]:
        """What callers are to be told; each is taken once."""
        events, self._events = self._events, []
        return events

    # What callers do.

    def submit(self, request: Request, terms: Terms, now: float, *, probe: bool = False) -> Task:
        """Refuses, admits or queues. `now` is later than `terms.submitted` by how long the request has waited
        to be taken in. A `probe` is let through before the engine is ready."""
        task = new_task(next(self._numbers), request, terms, self.pool)
        if isinstance(request, Score) and not request.prefixes and not self._closed(probe):
            self._end(task, Scored(()))
            return task
        task.work = task.measure()
        code = self._closed(probe) or self._hopeless(task, now)
        taken = code is None and not len(self.queue) and self._attempt(task, now) is Turn.TAKEN
        if not taken:
            code = code or self._queue_full(task.work)
            if code is not None:
                self._refuse(task, code, task.need())
                return task
            self.queue.push(task, terms.caller, task.work.tokens)
            if not isinstance(task, RankTask):
                self._waiting_others.add(task.number)
        self._watch(task)
        return task

    def cancel(self, task: Task) -> None:
        self._end(task, Cancelled())

    def expire(self, task: Task) -> None:
        """The deadline of a request has passed, wherever it stands."""
        if not task.terminal.ended:
            self._refuse(task, RefusalCode.DEADLINE, self._need_now(task))

    def supply(self, task: RankTask, prefixes: tuple[Tokens, ...], now: float) -> None:
        """The prefixes that a `Rank` waits for. Too late for a request that has ended: nothing happens."""
        if task.terminal.ended:
            return
        at_end = task.supply(prefixes)
        self._note(task)
        if at_end:
            self._finish(task, now)

    def end_all(self, outcome: Callable[[Task], Outcome]) -> None:
        """Ends every request that waits or runs."""
        for task in [*self.queue, *self.running.values()]:
            self._end(task, outcome(task))

    def abandon_steps(self) -> None:
        """No step in flight will ever be collected: ended requests return their pages now."""
        for task in list(self.running.values()):
            task.in_flight = 0
            if task.terminal.ended:
                self._return(task)

    def refusal(self, task: Task, code: RefusalCode) -> Refusal:
        """A refusal with the numbers of this moment."""
        return refuse(code, self._need_now(task), self._sizes(), self.not_ready)

    # What the step loop does.

    def begin_step(self, now: float) -> Step | None:
        """Ends what is too late, admits what fits, and launches the next step; None with nothing to run."""
        while self._deadlines and self._deadlines[0][0] <= now:
            self.expire(heapq.heappop(self._deadlines)[2])
        self.queue.admit(lambda task: self._attempt(task, now), now)
        while slices := plan_step(self._lanes(), self.limits.step).slices:
            step = self._launch(slices)
            if step.parts:
                return step
        return None

    def end_step(
        self, step: Step, outputs: Ordered[Output], now: float, seconds: float, *, alone: bool = False
    ) -> None:
        """Takes what a step has computed, in `seconds` of device time (`StepTimes.observe`)."""
        self.times.observe(step.tokens, seconds, alone=alone)
        self._stepped = now
        running, at = self.running, 0
        for part, launched in zip(step.slices, step.parts, strict=True):
            own = outputs[at : at + part.rows] if launched.output else ()
            at += len(own)
            task = running[part.key]
            task.in_flight -= 1
            if task.terminal.outcome is not None:
                part.sequence.collect()
                if not task.in_flight:
                    self._return(task)
                continue
            self._note(task)
            if self._collect(task, part.sequence, own):
                self._finish(task, now)
        for key in {part.key for part in step.slices}:
            if key in running:
                running[key].settle()

    def _collect(self, task: Task, sequence: Sequence | RowBlock, outputs: Ordered[Output]) -> bool:
        """Hands a task what was computed of it. True at its end."""
        if isinstance(sequence, RowBlock):
            return isinstance(task, GroupTask) and task.collect_block(sequence, outputs)
        output = outputs[0] if outputs else None
        ended = task.collect(sequence, output)
        if isinstance(output, tuple) and isinstance(task, RankTask) and task.terms.on_vector:
            self._events.append(partial(task.terms.on_vector, output))
        return ended

    def next_deadline(self) -> float | None:
        """Of the requests that wait or run."""
        while self._deadlines and self._deadlines[0][2].terminal.ended:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def status(self, kernels: str) -> EngineStatus:
        return EngineStatus(
            ready=not self.not_ready and not self.draining,
            draining=self.draining,
            reason=self.not_ready or ("it is draining" if self.draining else ""),
            pages=self.pool.counts(),
            waiting=len(self.queue),
            waiting_tokens=self.queue.tokens,
            running=len(self.running),
            steps=self.steps,
            tokens_per_s=self.times.tokens_per_s,
            kernels=f"{kernels}; core {'compiled' if COMPILED else 'interpreted'}",
        )

    # Admission.

    def _closed(self, probe: bool) -> RefusalCode | None:
        if self.draining:
            return RefusalCode.DRAINING
        return RefusalCode.NOT_READY if self.not_ready and not probe else None

    def _hopeless(self, task: Task, now: float) -> RefusalCode | None:
        """Why a request is not worth waiting for."""
        if task.least_pages > self.pool.total:
            return RefusalCode.REQUEST_TOO_LARGE
        if task.terms.deadline is None:
            return None
        need = task.need() if task.short_of_pages else _NO_NEED
        if self._too_late(task, need, self.queue.tokens, now) is None:  # not even behind all that wait
            return None
        ahead = self.queue.tokens_ahead(task.terms.caller, task.work.tokens)
        return self._too_late(task, need, ahead, now)

    def _too_late(self, task: Task, need: Need, ahead: int, now: float) -> RefusalCode | None:
        if task.terms.deadline is None:
            return None
        left, times = task.terms.deadline - now, self.times
        if self.idle:  # nothing corrects the rate but a request that is tried: the older, the less it counts
            left *= 1.0 + max(0.0, now - self._stepped) / _RATE_AGE_S
            if self.steps < _FEW_STEPS:
                times = StepTimes()
        moment = Moment(need, task.work, ahead, self.load(), self.limits.step.tokens)
        return too_late(moment, times, left)

    def _queue_full(self, work: Work) -> RefusalCode | None:
        full = len(self.queue) >= self.limits.max_queue
        heavy = self.queue.tokens + work.tokens > self.limits.max_queued_tokens
        return RefusalCode.QUEUE_FULL if full or heavy else None

    def _attempt(self, task: Task, now: float) -> Turn:
        """Admits a request if its turn has come and its pages are there.

        Its turn comes when what would run before it, shortest first, does not keep the device fed;
        pages taken earlier would only lie idle. So do those of a rank until its caller has chosen its rows:
        together they hold no more than a part of the pool, or the prefixes that these rows share would go
        for them; unless nothing else is there to run. A stream of shorter ones could keep it out for ever, so
        one that was passed as often as the bypass allows has its turn all the same; one such request
        runs at a time, so that long ones together do not take the pages of short ones.
        """
        load = self.load()
        fed_from, least = load.fed_from, self.queue.least_tokens
        crowded = load.prompt > 0 and load.reserved >= self.pool.total // _MOST_RESERVED
        if len(self.queue) and (fed_from <= least or (crowded and least and not self._waiting_others)):
            return Turn.STOP  # nobody's turn has come
        overdue = task.work.tokens >= fed_from or (crowded and isinstance(task, RankTask))
        if overdue and not (self.queue.is_overdue(task) and self._overdue_has_ended):
            return Turn.LATER
        if self._too_late(task, _NO_NEED, 0, now) is not None:
            self.expire(task)
            return Turn.GONE
        if not task.admit(self._windows):
            return Turn.NO_PAGES
        self._waiting_others.discard(task.number)
        task.admitted = now
        task.last_step = self.steps
        task.turn = next(self._turns)
        self.running[task.number] = task
        self._note(task)
        if overdue:
            self._overdue = task
        return Turn.TAKEN

    @property
    def _overdue_has_ended(self) -> bool:
        return self._overdue is None or self._overdue.terminal.ended

    def load(self) -> Load:
        """Of the requests that run at this moment, ended ones not counted."""
        load, counted = self._load, self._counted
        for number, task in self._changed.items():
            before = counted.pop(number, None)
            if before is not None:
                load.remove(before)
            if task.terminal.outcome is None:
                now = counted[number] = task.running
                load.add(now)
        self._changed.clear()
        return load

    def _note(self, task: Task) -> None:
        """Something of a request that runs has changed: it may have something to launch now."""
        self._changed[task.number] = self._ready[task.number] = task

    def _watch(self, task: Task) -> None:
        if task.terms.deadline is None:
            return
        heapq.heappush(self._deadlines, (task.terms.deadline, task.number, task))
        if len(self._deadlines) > 2 * (len(self.queue) + len(self.running)) + 256:
            self._deadlines = [entry for entry in self._deadlines if not entry[2].terminal.ended]
            heapq.heapify(self._deadlines)

    # Steps.

    def _lanes(self) -> list[Lane]:
        """Of the requests that the next step has room for, those that the plan prefers, and of all that
        decode. Others start no rows yet: their pages would lie idle, and what is resident go for them.
        """
        limits, lanes = self.limits.step, []
        tokens, may_grow = limits.tokens, not self.queue.is_short
        steps, patience = self.steps, limits.patience
        ready = [
            (preference(task.left, steps - task.last_step, patience), task.turn, task)
            for task in self._ready.values()
        ]
        ready.sort()  # no two have the same turn
        for _, _, task in ready:
            if tokens <= 0 and task.prompt_left:
                continue
            # While somebody waits for pages, those that come free are not for those that run without more.
            sequences = task.sequences(tokens if may_grow else 0)
            # Pages may have been taken that no row can start with yet, or more of a prefix found resident.
            self._changed[task.number] = task
            if not sequences:
                if not task.waits_for_pages:
                    del self._ready[task.number]
                continue
            lanes.append(Lane(task.number, sequences, task.left, steps - task.last_step))
            tokens -= min(limits.most_of(task.left), sum([each.pending for each in sequences]))
        return lanes

    def _launch(self, slices: tuple[Slice, ...]) -> Step:
        self.steps += 1
        parts: list[Part] = []
        reads: list[Read] = []
        launched: list[Slice] = []
        for part in slices:
            task, sequence = self.running[part.key], part.sequence
            if isinstance(sequence, RowBlock) or sequence.computed + part.tokens >= sequence.prompt:
                read = self._read(task, sequence)
                if read is None:
                    continue
                reads.append(read)
            parts.append(task.launch(sequence, part.tokens, part.rows))
            launched.append(part)
            task.in_flight += 1
            task.last_step = self.steps
        return Step(parts, reads, tuple(launched), sum(len(part.tokens) for part in parts))

    def _read(self, task: Task, sequence: Sequence | RowBlock) -> Read | None:
        """What an output is read as; None where the request's own constraint fails it, which ends it."""
        try:
            read = task.read(sequence)
            if isinstance(read, ReadToken) and read.allowed is not None:
                check_tokens(read.allowed, self.limits.vocabulary, "a constraint's tokens")
        except Exception as error:  # noqa: BLE001 - a constraint is the caller's code
            self._end(task, Failed("constraint_fault", f"The constraint of the request failed: {error}"))
            return None
        return read

    # Ends.

    def _finish(self, task: Task, now: float) -> None:
        self._end(task, task.answer(task.timing(now)))

    def _refuse(self, task: Task, code: RefusalCode, need: Need) -> None:
        self._end(task, refuse(code, need, self._sizes(), self.not_ready))

    def _end(self, task: Task, outcome: Outcome) -> None:
        """The one place where a request ends. Pages in use by a step in flight return after it."""
        if not task.terminal.claim(outcome):
            return
        self._events.append(partial(task.terms.on_done, outcome))
        self.queue.remove(task)
        self._waiting_others.discard(task.number)
        if task.number in self.running:
            self._changed[task.number] = task
            self._ready.pop(task.number, None)
            if not task.in_flight:
                self._return(task)

    def _return(self, task: Task) -> None:
        task.release()
        del self.running[task.number]

    def _need_now(self, task: Task) -> Need:
        """A request that runs has what it needs: the pages that it holds are free for it."""
        if task.number in self.running:
            held = task.pages_held
            return Need(held, self.pool.available + held, held)
        return task.need()

    def _sizes(self) -> Sizes:
        ahead = self.queue.tokens + self.load().tokens
        return Sizes(
            pages_total=self.pool.total,
            page_tokens=self.pool.page_tokens,
            queue_depth=len(self.queue),
            queued_tokens=self.queue.tokens,
            retry_after_ms=retry_after_ms(ahead, self.limits.step.tokens, self.times),
        )
