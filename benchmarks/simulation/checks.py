"""What must be true after every event, computed from raw state and never from the figures under test."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from engine.batch import single_rows
from engine.core import Core, Step
from engine.errors import EngineFault, Refusal, RefusalCode
from engine.pages import PagePool
from engine.queue import Bypass, Turn
from engine.request import Embed, Generate, Rank, Request, Score, Tokens
from engine.task import GroupTask, RankTask, SequenceTask, Task

MOST_OUTPUT = 12  # tokens that a request of the traffic generates


class Violation(AssertionError):
    """Something that must always hold does not."""


def require(holds: bool, sentence: str) -> None:
    if not holds:
        raise Violation(sentence)


# Pages.


def check_counts(core: Core) -> None:
    """Every page is free, owned by one running request or published, by the sizes of these sets alone."""
    pool = core.pool
    owned = sum([len(each.owned) for each in pool._reservations])
    published = len(pool.tree.node_of)
    require(
        len(pool._free) + owned + published == pool.total,
        f"{len(pool._free)} pages free, {owned} owned and {published} published are not {pool.total}",
    )
    require(
        len(pool._reservations) == len(core.running),
        f"{len(pool._reservations)} reservations for {len(core.running)} running requests",
    )
    counts = pool.counts()
    require(
        counts.free + counts.held + counts.cached == counts.total == pool.total
        and counts.held >= owned
        and counts.cached <= published,
        f"the counts {counts} contradict {owned} owned and {published} published pages",
    )


def check_rebuilt(core: Core) -> None:
    """Rebuilds every count of the pool."""
    try:
        core.pool.check()
    except EngineFault as fault:
        raise Violation(str(fault)) from fault
    pinned = pinned_pages(core.pool)
    held = sum(len(each.owned) for each in core.pool._reservations) + len(pinned)
    require(core.pool.counts().held == held, f"{core.pool.counts().held} pages count as held, {held} are")


def check_pins(core: Core) -> None:
    """A group pins the resident pages of the rows that it has still to end, and nothing else."""
    for number, task in core.running.items():
        if isinstance(task, GroupTask) and not task.terminal.ended:
            started = [block.first + at for block in task._blocks for at in range(len(block))]
            rows = (*range(task._next, task._rows), *task._running.values(), *started)
            pinned = {row for row, chain in enumerate(task._pages.chains) if chain}
            require(pinned <= set(rows), f"request {number} pins pages that none of its rows uses")
            for block in task._blocks:
                kept = task._pages.chains[block.first : block.first + len(block)]
                require(block.chains == kept, f"request {number} runs rows on pages that it does not pin")


def pinned_pages(pool: PagePool) -> set[int]:
    return {page for each in pool._reservations for chain in each.chains for page in chain}


def check_step(core: Core, step: Step) -> None:
    """A step stays within its limits, and no row writes where another reads or writes."""
    limits, size = core.limits.step, core.pool.page_tokens
    rows = single_rows(step.parts)
    require(len(rows) <= limits.rows, f"a step has {len(rows)} rows, {limits.rows} are allowed")
    tokens = sum(len(row.tokens) for row in rows)
    require(
        tokens == step.tokens <= limits.tokens, f"a step has {tokens} tokens, {limits.tokens} are allowed"
    )
    users = Counter(page for row in rows for page in row.pages)
    for part, launched in zip(step.slices, step.parts, strict=True):
        owned = core.running[part.key]._pages.owned
        for row in single_rows([launched]):
            end = row.start + len(row.tokens)
            require(len(row.pages) * size >= end, f"{len(row.pages)} pages do not cover {end} tokens")
            for page in row.pages[row.start // size : -(-end // size)]:
                require(page in owned, f"page {page} is written by a request that does not own it")
                require(users[page] == 1, f"page {page} is written by one row and used by another")
            require(
                all(page in owned or page in core.pool.tree.node_of for page in row.pages),
                "a row reads a page that is neither its request's nor published",
            )


class Service:
    """Who is served in the steps, by an account of its own.

    A prompt that was not served for `patience` steps goes before all that have waited for less: so the one
    that has waited longest is in each step that decoding rows leave room in. Before a request go at most
    those that ran when it was served last, once each, and the tokens that these decode: nobody that could run
    is left out for longer than that.
    """

    def __init__(self) -> None:
        # Of each request: the step that served it last, or the one before it came, and how many ran then.
        self._served: dict[int, tuple[int, int]] = {}

    def launched(self, core: Core, step: Step, *, is_checked: bool) -> None:
        """To be told of every step; one in some is checked."""
        running, served = core.running, self._served
        for number in running.keys() - served.keys():
            served[number] = core.steps - 1, len(running)
        if is_checked:
            self._check(core, step)
        for part in step.slices:
            served[part.key] = core.steps, len(running)
        if len(served) > 2 * len(running) + 256:
            self._served = {number: told for number, told in served.items() if number in running}

    def _check(self, core: Core, step: Step) -> None:
        limits, served = core.limits.step, {part.key for part in step.slices}
        longest = 0  # that a prompt has waited
        for number, task in core.running.items():
            if number in served or task.in_flight or task.terminal.ended or awaits_choice(task):
                continue
            since, ran = self._served[number]
            most = limits.patience + ran * (1 + MOST_OUTPUT)
            waited = core.steps - since
            require(waited <= most, f"request {number} runs and was not served for {waited} steps")
            if waited > limits.patience and task.prompt_left:
                longest = max(longest, waited)
        prompts = [part.key for part in step.slices if not part.sequence.decoding]
        is_full = step.tokens == limits.tokens or sum(part.rows for part in step.slices) == limits.rows
        of_none = longest if is_full else 0
        before = max((core.steps - self._served[key][0] for key in prompts), default=of_none)
        require(before >= longest, f"a prompt that has waited for {longest} steps is passed by later ones")


# What the core keeps up to date instead of looking at all that run.


def check_load(core: Core) -> None:
    """What runs is counted as it would be counted anew."""
    live = [task for task in core.running.values() if not task.terminal.ended]
    require(core.load()._running == sorted(task.running for task in live), "what runs is counted wrongly")


def check_ready(core: Core) -> None:
    """No request that has something to launch is left out, and none that has ended is looked at."""
    for number, task in core.running.items():
        if number in core._ready:
            require(core._ready[number] is task and not task.terminal.ended, f"request {number} cannot run")
        elif not task.terminal.ended:
            require(not _can_run(core, task), f"request {number} could run and is not looked at")
    require(core._ready.keys() <= core.running.keys(), "requests that do not run are looked at")


def _can_run(core: Core, task: Task) -> bool:
    """Whether a step could have something of it, found without starting it."""
    if isinstance(task, SequenceTask):
        return task._sequence is not None and not task._sequence.launched
    if not isinstance(task, GroupTask):
        raise TypeError(f"{type(task).__name__} is no kind of request")
    if isinstance(task, RankTask) and not task._supplied:
        return task.vector is None and task._query is not None and not task._query.launched
    if not all(block.launched for block in task._blocks) or not all(row.launched for row in task._running):
        return True
    if task._next == task._rows or task._active == task._window:
        return False
    spare = len(task._pages.spare)
    if isinstance(task, RankTask) and not core.queue.is_short:
        spare += core.pool.available
    return task._own[task._next] <= spare


def awaits_choice(task: Task) -> bool:
    return isinstance(task, RankTask) and task.vector is not None and not task._supplied


# Refusals.


@dataclass(frozen=True, slots=True)
class Figures:
    """What a refusal at this moment must say: `pages` are the (needed, free) of the rows that are
    shortest of pages, equally short; `tokens` are what the request would compute."""

    pages: frozenset[tuple[int, int]]
    empty: int
    tokens: int
    total: int
    depth: int
    waiting_tokens: int
    retry_after_ms: int | None


def figures(core: Core, request: Request, running: Task | None = None) -> Figures:
    """Of a request that is being submitted, waits, or is `running`."""
    pool = core.pool
    owned = sum(len(each.owned) for each in pool._reservations)
    available = pool.total - owned - len(pinned_pages(pool))
    if running is not None:
        own = len(running._pages.owned)
        pages, empty, tokens = frozenset({(own, available + own)}), own, 0
    else:
        pages, empty, tokens = _needs(pool, request, available)
    waiting = list(core.queue)
    waiting_tokens = sum(task.work.tokens for task in waiting)
    left = sum(
        task.prompt_left + task.output_left for task in core.running.values() if not task.terminal.ended
    )
    retry = _retry(core, waiting_tokens + left)
    return Figures(pages, empty, tokens, pool.total, len(waiting), waiting_tokens, retry)


def _needs(pool: PagePool, request: Request, available: int) -> tuple[frozenset[tuple[int, int]], int, int]:
    """(needed, free) of the rows that are shortest of pages, pages of an empty pool, new tokens."""
    size = pool.page_tokens
    if isinstance(request, Rank):
        row = math.ceil((request.prefix_tokens + len(request.suffix)) / size)
        pages = max(row, math.ceil(len(request.query) / size))
        return frozenset({(pages, available)}), pages, len(request.query) + request.rows * len(request.suffix)
    pinned = pinned_pages(pool)
    found, empty, tokens = [], 0, 0
    for shared, prompt, most in _rows(request):
        pages = math.ceil((prompt + max(most, 1) - 1) / size)
        chain = list(_resident(pool, shared, min(len(shared), prompt - 1) // size))
        cached = sum(page not in pinned for page in chain)
        found.append((pages - len(chain), available - cached))
        empty = max(empty, pages)
        ends_early = isinstance(request, Generate) and bool(request.stop or request.constraint)
        tokens += prompt + (0 if ends_early else max(most, 1) - 1) - len(chain) * size
    if not found:
        return frozenset({(0, available)}), 0, 0
    worst = max(needed - free for needed, free in found)
    return frozenset(each for each in found if each[0] - each[1] == worst), empty, tokens


def _rows(request: Request) -> Iterator[tuple[Tokens, int, int]]:
    """(tokens that others may share, tokens of the prompt, most output) of each row."""
    if isinstance(request, Score):
        for prefix in request.prefixes:
            yield prefix, len(prefix) + len(request.suffix), 0
    elif isinstance(request, Embed | Generate):
        most = request.max_tokens if isinstance(request, Generate) else 0
        yield request.tokens, len(request.tokens), most


def _resident(pool: PagePool, tokens: Tokens, most: int) -> Iterator[int]:
    """Published pages that `tokens` begins with, found page by page."""
    size = pool.page_tokens
    children = pool.tree._root
    index = 0
    while index < most:
        node = children.get(tokens[index * size : (index + 1) * size])
        if node is None:
            return
        for at, page in enumerate(node.pages):
            held = node.text[at * size : (at + 1) * size]
            if index == most or held != tokens[index * size : (index + 1) * size]:
                return
            yield page
            index += 1
        children = node.children


def _retry(core: Core, tokens: int) -> int | None:
    if not core.times.known or not tokens:
        return None
    seconds = core.times.seconds(tokens, tokens / core.limits.step.tokens)
    return max(1, math.ceil(seconds * 1000.0))


def check_refusal(core: Core, refusal: Refusal, wanted: Figures) -> None:
    """Every number of a refusal, and that its reason is one."""
    code = refusal.code
    if code is RefusalCode.REQUEST_TOO_LARGE:
        require(refusal.pages_needed == wanted.empty > wanted.total, f"{refusal} for {wanted}")
        require(refusal.page_deficit == wanted.empty - wanted.total, f"{refusal} for {wanted}")
        require(refusal.pages_free in {free for _, free in wanted.pages}, f"{refusal} for {wanted}")
    else:
        pages = (refusal.pages_needed, refusal.pages_free)
        require(pages in wanted.pages, f"{refusal} for {wanted}")
        require(refusal.page_deficit == max(0, pages[0] - pages[1]), f"{refusal} for {wanted}")
    require(refusal.pages_total == wanted.total, f"{refusal} for {wanted}")
    require(refusal.queue_depth == wanted.depth, f"{refusal} for {wanted}")
    timed = code in (RefusalCode.PAGES_SHORT, RefusalCode.QUEUE_FULL, RefusalCode.DEADLINE)
    require(refusal.retry_after_ms == (wanted.retry_after_ms if timed else None), f"{refusal} for {wanted}")
    if code is RefusalCode.PAGES_SHORT:
        require(refusal.page_deficit > 0, f"no page is short: {refusal}")
    if code is RefusalCode.QUEUE_FULL:
        full = wanted.depth >= core.limits.max_queue
        heavy = wanted.waiting_tokens + wanted.tokens > core.limits.max_queued_tokens
        require(full or heavy, f"the queue has room: {refusal} for {wanted}")


# Turns.


class Rounds:
    """Watches the queue of a core: what came of every turn of the last round, the request, its turn, and
    whether a request whose turn was forced (`Core._attempt`) ran at that moment."""

    def __init__(self, overdue_runs: Callable[[], bool]) -> None:
        self.round: list[tuple[Task, Turn, bool]] = []
        self._overdue_runs = overdue_runs

    def __call__(self, task: Task) -> Callable[[Turn], None]:
        overdue_runs = self._overdue_runs()
        return lambda turn: self.round.append((task, turn, overdue_runs))


@dataclass(slots=True, eq=False)
class Waiting:
    """Who waits, by the account of the checks."""

    task: Task
    ahead: set[str] = field(default_factory=set)  # callers whose next request has an earlier turn
    is_first: bool = False  # of its caller
    passed: int = 0  # admissions with a later turn since it was the first
    short_since: float | None = None  # its pages were found not to be free
    is_short: bool = False  # so it was when its turn came last


class Turns:
    """The promise of the queue, by an account of its own.

    Callers take turns: each that waits goes before a request at most once. Of later turns at most
    `Bypass.admissions` go before a request that is the first of its caller, and those of the round in
    which that number is reached. Further ones only while it would not run yet and another request that
    was passed so often runs. Once its pages were short for `Bypass.seconds` or it was passed so often, nobody
    behind it is admitted as long as they are short. Nor does one that runs take further pages while anybody's
    were short when its turn came last.
    """

    def __init__(self, bypass: Bypass) -> None:
        self.most_passed = 0
        self._bypass = bypass
        self._waiting: dict[str, dict[int, Waiting]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def is_short(self) -> bool:
        return any(each.is_short for own in self._waiting.values() for each in own.values())

    def add(self, task: Task) -> None:
        self._waiting.setdefault(task.terms.caller, {})[task.number] = Waiting(task)
        self._count += 1

    def remove(self, task: Task) -> None:
        caller = task.terms.caller
        own = self._waiting.get(caller)
        if own is None or own.pop(task.number, None) is None:
            return
        self._count -= 1
        if not own:
            del self._waiting[caller]
            for others in self._waiting.values():  # when it comes back, it is the last
                next(iter(others.values())).ahead.discard(caller)

    def settle(self) -> None:
        """Who has become the first of its caller: all others may go before it once."""
        for caller, own in self._waiting.items():
            first = next(iter(own.values()))
            if not first.is_first:
                first.is_first = True
                first.ahead = set(self._waiting) - {caller}

    def check_round(self, round_: Sequence[tuple[Task, Turn, bool]], now: float) -> None:
        """The turns of one round, in order. Who is taken waits no more."""
        self.settle()
        asked = {task for task, _, _ in round_}
        firsts = [next(iter(own.values())) for own in self._waiting.values()]
        firsts = [each for each in firsts if each.task in asked or not each.task.terminal.ended]
        over = {each.task.number for each in firsts if each.passed >= self._bypass.admissions}
        excused: set[int] = set()
        blocked: Task | None = None
        for task, turn, overdue_runs in round_:
            waiting = self._waiting.get(task.terms.caller, {}).get(task.number)
            require(waiting is not None, f"request {task.number} was offered a turn and does not wait")
            if waiting is None:
                return
            if turn is not Turn.STOP:
                waiting.is_short = turn is Turn.NO_PAGES
            if turn is Turn.LATER and overdue_runs:
                excused.add(task.number)
            elif turn is Turn.NO_PAGES:
                waiting.short_since = now if waiting.short_since is None else waiting.short_since
                long = now - waiting.short_since >= self._bypass.seconds
                blocked = task if long or task.number in over else blocked
            elif turn is Turn.TAKEN:
                require(blocked is None, f"pages kept for {blocked and blocked.number} went to {task.number}")
                self._pass(firsts, task, over - excused)
            if turn in (Turn.TAKEN, Turn.GONE):
                waiting.passed = -1  # it is passed no more
                self.remove(task)

    def _pass(self, firsts: Iterable[Waiting], taken: Task, over: set[int]) -> None:
        """`taken` goes before all that wait."""
        caller = taken.terms.caller
        for first in firsts:
            if first.task is taken or first.passed < 0:
                continue
            if caller in first.ahead:
                first.ahead.discard(caller)
            else:
                require(
                    first.task.number not in over,
                    f"request {first.task.number} was passed {first.passed} times and once more",
                )
                first.passed += 1
                self.most_passed = max(self.most_passed, first.passed)
                if first.task.terms.caller == caller:  # it has had its caller's turn
                    first.ahead = set(self._waiting) - {caller}
