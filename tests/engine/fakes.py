"""A model that is a hash: what it answers depends on every token in a row's pages and on nothing else.

So a page that is shared wrongly, freed too early or written twice changes an answer, and every
answer can be checked against the hash of its own tokens.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.simulation.checks import check_load, check_ready
from engine.batch import Part, StepRow, single_rows
from engine.core import Core, CoreLimits, Step
from engine.pages import PagePool
from engine.request import (
    Answer,
    Embed,
    Embedded,
    Generate,
    Generated,
    Outcome,
    Rank,
    Request,
    Score,
    Scored,
    Tokens,
)
from engine.runner import InFlight, Output, Read, ReadPair, ReadToken, ReadVector, single_reads
from engine.schedule import StepLimits
from engine.task import GroupTask, RankTask, SequenceTask, Task, Terms

VOCABULARY = 97
POISON = -1


def digest(tokens: Iterable[int]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(tuple(tokens)).encode(), digest_size=6).digest())


def read(tokens: Sequence[int], wanted: Read) -> Output:
    """What the hash model says after `tokens`."""
    value = digest(tokens)
    if isinstance(wanted, ReadVector):
        return (value / 2**48, 1.0)
    if isinstance(wanted, ReadPair):
        return digest((value, wanted.positive, wanted.negative)) / 2**48
    if wanted.allowed is not None:
        return sorted(wanted.allowed)[value % len(wanted.allowed)]
    return value % VOCABULARY


def expected(request: Request, prefixes: Sequence[Tokens] = ()) -> Embedded | Scored | Generated:
    """The answer to a request computed from its own tokens alone; `prefixes` of a `Rank`."""
    if isinstance(request, Embed):
        vector = read(request.tokens, ReadVector())
        assert isinstance(vector, tuple)
        return Embedded(vector)
    if isinstance(request, Generate):
        output: list[int] = []
        while len(output) < request.max_tokens:
            allowed = None if request.constraint is None else request.constraint.allowed(output)
            wanted = ReadToken(allowed=None if allowed is None else tuple(allowed))
            token = read([*request.tokens, *output], wanted)
            assert isinstance(token, int)
            if token in request.stop:
                break
            output.append(token)
        return Generated(tuple(output))
    pair = ReadPair(request.positive, request.negative)
    rows = request.prefixes if isinstance(request, Score) else prefixes
    values = [read((*prefix, *request.suffix), pair) for prefix in rows]
    return Scored(tuple(value for value in values if isinstance(value, float)))


def same(answer: Outcome, wanted: Answer) -> bool:
    """Equal in what was asked for, whatever it cost."""
    if isinstance(answer, Embedded) and isinstance(wanted, Embedded):
        return answer.vector == wanted.vector
    if isinstance(answer, Scored) and isinstance(wanted, Scored):
        return answer.probabilities == wanted.probabilities
    return isinstance(answer, Generated) and isinstance(wanted, Generated) and answer.tokens == wanted.tokens


@dataclass
class FakeStep:
    runner: HashRunner
    rows: list[StepRow]
    reads: list[Read]

    def wait(self) -> None:
        """It is executed when it is collected."""

    def collect(self) -> list[Output]:
        return self.runner.execute(self)


@dataclass
class HashRunner:
    """Executes a step only when it is collected, as a device that lags behind the host.

    `fail_at` names the launch (`"launch", 3`) or collection (`"collect", 3`) that raises.
    """

    pages: int
    page_tokens: int
    depth: int = 1
    fail_at: tuple[str, int] | None = None
    kernels: str = "hash"
    cells: list[list[int]] = field(init=False)
    in_flight: deque[FakeStep] = field(default_factory=deque)
    launches: int = 0
    collections: int = 0
    is_published: Callable[[int], bool] = lambda page: False

    def __post_init__(self) -> None:
        self.cells = [[POISON] * self.page_tokens for _ in range(self.pages)]

    def poison(self, pages: Sequence[int]) -> None:
        """A freed page holds nothing that anybody may read."""
        for page in pages:
            self.cells[page] = [POISON] * self.page_tokens

    def launch(self, parts: list[Part], reads: list[Read]) -> InFlight:
        rows, reads = single_rows(parts), single_reads(parts, reads)
        self.launches += 1
        if self.fail_at == ("launch", self.launches):
            raise RuntimeError("the device is gone")
        assert rows
        assert len(reads) == sum(row.output for row in rows)
        assert len(self.in_flight) < self.depth
        step = FakeStep(self, rows, reads)
        self._check_writers([row for each in (*self.in_flight, step) for row in each.rows])
        self.in_flight.append(step)
        return step

    def _written(self, row: StepRow) -> set[int]:
        end = row.start + len(row.tokens)
        return {row.pages[at // self.page_tokens] for at in range(row.start, end)}

    def _check_writers(self, rows: Sequence[StepRow]) -> None:
        """A page that one row writes is in no other row, and is not published."""
        users: dict[int, int] = {}
        for row in rows:
            for page in set(row.pages):
                users[page] = users.get(page, 0) + 1
        for row in rows:
            for page in self._written(row):
                assert users[page] == 1, f"page {page} is written by a row and used by another"
                assert not self.is_published(page), f"published page {page} is written"

    def execute(self, step: FakeStep) -> list[Output]:
        assert self.in_flight.popleft() is step, "steps are collected in the order of their launches"
        self.collections += 1
        if self.fail_at == ("collect", self.collections):
            raise RuntimeError("the device is gone")
        size = self.page_tokens
        outputs: list[Output] = []
        wanted = iter(step.reads)
        for row in step.rows:
            for at, token in enumerate(row.tokens, row.start):
                self.cells[row.pages[at // size]][at % size] = token
            if row.output:
                end = row.start + len(row.tokens)
                seen = [self.cells[row.pages[at // size]][at % size] for at in range(end)]
                outputs.append(read(seen, next(wanted)))
        return outputs


def make_core(
    pages: int,
    page_tokens: int = 4,
    *,
    step_tokens: int = 16,
    step_rows: int = 8,
    depth: int = 1,
    max_queue: int = 1000,
    max_queued_tokens: int = 1_000_000,
    context: int = 4096,
) -> tuple[Core, HashRunner]:
    """A ready core over the hash model, whose freed pages are poisoned."""
    runner = HashRunner(pages, page_tokens, depth)
    pool = PagePool(pages, page_tokens, on_free=runner.poison)
    runner.is_published = lambda page: page in pool.tree.node_of
    limits = CoreLimits(
        step=StepLimits(tokens=step_tokens, rows=step_rows),
        depth=depth,
        max_queue=max_queue,
        max_queued_tokens=max_queued_tokens,
        vocabulary=VOCABULARY,
        context=context,
    )
    core = Core(pool, limits)
    core.not_ready = ""
    return core, runner


def prompt_tokens_left(task: Task) -> int:
    """Counted anew from the sequences and rows of an admitted task."""
    if isinstance(task, SequenceTask):
        assert task._sequence is not None
        return max(0, task._sequence.prompt - task._sequence.computed)
    assert isinstance(task, GroupTask)
    sequences, size = list(task._running), task._pool.page_tokens
    if isinstance(task, RankTask) and not task._supplied:
        assert task._query is not None
        return task._query.prompt - task._query.computed + task._rank.rows * len(task.suffix)
    assert all(len(each.pages) == -(-each.limit // size) for each in sequences), "a row has spare pages"
    rows = [*range(task._next, task._rows)]
    rows += [block.first + at for block in task._blocks for at in range(len(block))]
    assert task._active == len(sequences) + sum(map(len, task._blocks))
    whole = [
        len(task._prefixes[row]) + len(task.suffix) - len(task._pages.chains[row]) * size for row in rows
    ]
    return sum(whole) + sum(each.prompt - each.computed for each in sequences)


@dataclass(eq=False)
class Asked:
    """A request in a `World`, and all that its caller was told."""

    request: Request
    outcomes: list[Outcome] = field(default_factory=list)
    vectors: list[tuple[float, ...]] = field(default_factory=list)
    supplied: tuple[Tokens, ...] | None = None
    task: Task | None = None

    @property
    def outcome(self) -> Outcome:
        assert len(self.outcomes) == 1, self.outcomes
        return self.outcomes[0]


class World:
    """Drives a core with a virtual clock, one change at a time, and checks every answer as it comes."""

    def __init__(self, core: Core, runner: HashRunner, step_s: float = 0.01) -> None:
        self.core = core
        self.runner = runner
        self.now = 0.0
        self.step_s = step_s
        self.asked: list[Asked] = []
        self.flights: deque[tuple[Step, InFlight]] = deque()

    def submit(self, request: Request, *, deadline: float | None = None, caller: str = "") -> Asked:
        asked = Asked(request)
        self.asked.append(asked)
        terms = Terms(self.now, deadline, caller, asked.outcomes.append, asked.vectors.append)
        asked.task = self.core.submit(request, terms, self.now)
        self.tell()
        return asked

    def tell(self) -> None:
        for event in self.core.take_events():
            event()
        for asked in self.asked:
            assert len(asked.outcomes) <= 1, "a request ended twice"
            for outcome in asked.outcomes:
                if isinstance(outcome, Embedded | Scored | Generated):
                    wanted = expected(asked.request, asked.supplied or ())
                    assert same(outcome, wanted), (outcome, wanted)

    def cancel(self, asked: Asked) -> None:
        assert asked.task is not None
        self.core.cancel(asked.task)
        self.tell()

    def supply(self, asked: Asked, prefixes: tuple[Tokens, ...]) -> None:
        assert isinstance(asked.task, RankTask)
        if not asked.outcomes:
            asked.supplied = prefixes
        self.core.supply(asked.task, prefixes, self.now)
        self.tell()

    @property
    def due(self) -> list[Asked]:
        """Ranks whose prefixes are awaited."""
        return [
            each
            for each in self.asked
            if isinstance(each.request, Rank) and each.vectors and each.supplied is None and not each.outcomes
        ]

    def launch(self) -> bool:
        """Launches a step if there is something to run and room in flight."""
        if len(self.flights) >= self.runner.depth:
            return False
        step = self.core.begin_step(self.now)
        self.tell()
        if step is None:
            return False
        assert sum(len(part.tokens) for part in step.parts) <= self.core.limits.step.tokens
        assert len(single_rows(step.parts)) <= self.core.limits.step.rows
        self.flights.append((step, self.runner.launch(step.parts, step.reads)))
        return True

    def collect(self) -> bool:
        if not self.flights:
            return False
        step, flight = self.flights.popleft()
        self.now += self.step_s
        self.core.end_step(step, flight.collect(), self.now, self.step_s)
        self.tell()
        return True

    def step(self) -> bool:
        """As the engine's loop does it. False where nothing moved."""
        launched = self.launch()
        if self.flights and (not launched or len(self.flights) >= self.runner.depth):
            return self.collect()
        return launched

    def run(self, most: int = 10_000) -> None:
        """Until nothing moves any more."""
        for _ in range(most):
            if not self.step():
                return
        raise AssertionError("the engine does not come to rest")

    def check(self) -> None:
        self.core.pool.check()
        counts = self.core.pool.counts()
        assert counts.free + counts.held + counts.cached == counts.total
        for task in self.core.running.values():
            assert task.in_flight or not task.terminal.ended, "pages of an ended request were not returned"
            if not task.terminal.ended:
                assert task.prompt_left == prompt_tokens_left(task), "tokens left are miscounted"
        check_ready(self.core)
        check_load(self.core)
