"""A request in work: its pages, its sequences, what is left of it.

One class a shape of request: `SequenceTask` is one sequence (embed, generate), `GroupTask` is rows
that stream through a window (score), `RankTask` an embedding first and then such a group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

from engine.admission import (
    Need,
    RowSize,
    Running,
    Work,
    computed_tokens,
    pages_for,
    shareable_pages,
    shrunk_window,
    size_row,
    smallest_need,
    widest_window,
)
from engine.errors import EngineFault
from engine.pages import PagePool, Pages, Reservation, Shortfall
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
    Timing,
    Tokens,
    Usage,
)
from engine.runner import Output, Read, ReadPair, ReadToken, ReadVector
from engine.sequence import Sequence, TerminalState

OnDone = Callable[[Outcome], None]
OnVector = Callable[[tuple[float, ...]], None]


@dataclass(frozen=True, slots=True)
class Terms:
    """What a request comes with besides itself. Times are `time.monotonic()` seconds."""

    submitted: float
    deadline: float | None
    caller: str
    on_done: OnDone
    on_vector: OnVector | None = None


@dataclass(frozen=True, slots=True)
class WindowLimits:
    """How many rows of a group are worth having pages at once: as many as fill `tokens` and `rows`,
    which is what the steps in flight and the next one run. A group that does not know its rows yet
    takes no more than `unknown_pages` for them, if one row can do with that."""

    tokens: int
    rows: int
    unknown_pages: int

    def most_rows(self, rows: int, tokens: int, asked: int | None) -> int:
        """Of `rows` rows that compute `tokens` new tokens together."""
        filling = -(-self.tokens * rows // max(tokens, 1))
        return max(1, min(rows, asked or rows, self.rows, filling))


class Task(ABC):
    """One request from its submission to its one outcome. Not thread-safe."""

    def __init__(self, number: int, terms: Terms, pool: PagePool) -> None:
        self.number = number
        self.terms = terms
        self.terminal = TerminalState()
        self.work = Work(0)  # as measured at submission
        self.admitted = 0.0
        self.last_step = 0  # the step before which it was admitted, or its last
        self.in_flight = 0  # rows of steps that were launched and not collected
        self.prompt_left = 0  # prompt tokens still to compute
        self.output_left = 0  # tokens of the output still to come
        self._pool = pool
        self._reservation: Reservation | None = None

    @abstractmethod
    def measure(self) -> tuple[Need, Work]:
        """Pages of its smallest window, and what it would keep the device busy with, at this moment."""

    @abstractmethod
    def admit(self, limits: WindowLimits) -> bool:
        """Reserves its pages, or changes nothing and says no."""

    @property
    def left(self) -> int:
        """New tokens still to compute, those of the output included."""
        return self.prompt_left + self.output_left

    @property
    def running(self) -> Running:
        return Running(self.left, self.pages_held, max(1, self.prompt_left))

    @abstractmethod
    def sequences(self) -> Ordered[Sequence]:
        """The sequences that have pages and are not in flight, in the order they are to run. Starts rows
        where pages are spare."""

    @abstractmethod
    def read(self, sequence: Sequence) -> Read:
        """What the next output of a sequence is read as."""

    @abstractmethod
    def collect(self, sequence: Sequence, output: Output | None) -> bool:
        """A step's share of a sequence is computed, `output` where it had one. True at the task's end."""

    @abstractmethod
    def settle(self) -> None:
        """A step is collected as a whole: returns the pages that nothing needs any more."""

    @abstractmethod
    def answer(self, timing: Timing) -> Answer:
        """The answer of a task that has come to its end."""

    def timing(self, now: float) -> Timing:
        queued = self.admitted - self.terms.submitted
        return Timing(queue_ms=queued * 1000.0, run_ms=(now - self.admitted) * 1000.0)

    @property
    def pages_held(self) -> int:
        """Pages of its own at this moment: what its end returns, at least."""
        return 0 if self._reservation is None else len(self._reservation.owned)

    def release(self) -> None:
        """Returns every page. Only when no step that uses them is in flight."""
        if self.in_flight:
            raise EngineFault(f"pages released with {self.in_flight} rows in flight")
        if self._reservation is not None:
            self._reservation.release()

    @property
    def _pages(self) -> Reservation:
        if self._reservation is None:
            raise EngineFault("a request runs without a reservation")
        return self._reservation

    def _reserve(self, own: int, chains: Ordered[Pages] = ()) -> Reservation | None:
        reservation = self._pool.reserve(own, chains)
        if isinstance(reservation, Shortfall):
            return None
        self._reservation = reservation
        return reservation


def new_task(number: int, request: Request, terms: Terms, pool: PagePool) -> Task:
    """The task of a valid request."""
    if isinstance(request, Score):
        return GroupTask(number, terms, pool, request, request.prefixes)
    if isinstance(request, Rank):
        return RankTask(number, terms, pool, request)
    return SequenceTask(number, terms, pool, request)


class SequenceTask(Task):
    """`Embed` and `Generate`: one sequence, whose pages are all reserved at admission."""

    def __init__(self, number: int, terms: Terms, pool: PagePool, request: Embed | Generate) -> None:
        super().__init__(number, terms, pool)
        self._request = request
        self._most_output = request.max_tokens if isinstance(request, Generate) else 0
        self.prompt_left, self.output_left = len(request.tokens), self._most_output
        self._sequence: Sequence | None = None
        self._cached = 0
        self._output: list[int] = []
        self._vector: tuple[float, ...] = ()

    def _size(self) -> RowSize:
        tokens, pool = self._request.tokens, self._pool
        chain = pool.match(tokens, shareable_pages(len(tokens), len(tokens), pool.page_tokens))
        return size_row(pool, chain, len(tokens), self._most_output)

    def measure(self) -> tuple[Need, Work]:
        size, request = self._size(), self._request
        ends_early = isinstance(request, Generate) and bool(request.stop or request.constraint)
        output = 1 if ends_early else max(self._most_output, 1)
        cached = len(size.chain) * self._pool.page_tokens
        work = Work(computed_tokens(len(request.tokens), output) - cached, output)
        return smallest_need([size], self._pool.available), work

    def admit(self, limits: WindowLimits) -> bool:
        size = self._size()
        reservation = self._reserve(size.own, (size.chain,))
        if reservation is None:
            return False
        tokens = self._request.tokens
        self._cached = len(size.chain) * self._pool.page_tokens
        self._sequence = Sequence(
            tokens=array("i", tokens[self._cached :]),
            prompt=len(tokens),
            limit=computed_tokens(len(tokens), self._most_output),
            pages=(*size.chain, *reservation.take(size.own)),
            computed=self._cached,
            cached=self._cached,
        )
        self.prompt_left -= self._cached
        return True

    def sequences(self) -> Ordered[Sequence]:
        return () if self._sequence is None or self._sequence.launched else (self._sequence,)

    def read(self, sequence: Sequence) -> Read:
        request = self._request
        if isinstance(request, Embed):
            return ReadVector()
        allowed = None if request.constraint is None else request.constraint.allowed(tuple(self._output))
        return ReadToken(
            temperature=request.temperature,
            seed=request.seed,
            index=len(self._output),
            allowed=None if allowed is None else tuple(allowed),
        )

    def collect(self, sequence: Sequence, output: Output | None) -> bool:
        sequence.collect()
        self.prompt_left = max(0, sequence.prompt - sequence.computed)
        if output is None:
            return False
        if isinstance(output, tuple):
            self._vector = output
        elif isinstance(self._request, Generate) and self._continues(int(output), self._request):
            sequence.append(int(output))
            return False
        kept = self._request.tokens[: self._request.keep]
        self._pages.publish(kept, sequence.pages[: len(kept) // self._pool.page_tokens])
        return True

    def settle(self) -> None:
        """It needs its pages to the end."""

    def _continues(self, token: int, request: Generate) -> bool:
        """Takes the next token into the output. False where it is the last, or a stop."""
        if token in request.stop:
            return False
        self._output.append(token)
        self.output_left -= 1
        return len(self._output) < request.max_tokens

    def answer(self, timing: Timing) -> Answer:
        usage = Usage(len(self._request.tokens), self._cached, len(self._output), self._pages.peak)
        if isinstance(self._request, Embed):
            return Embedded(self._vector, usage, timing)
        return Generated(tuple(self._output), usage, timing)


@dataclass(slots=True)
class _Row:
    """A row that waits for its turn or runs: it needs `own` pages behind `chain`, which is pinned."""

    index: int
    prefix: Tokens
    own: int
    chain: Pages


class GroupTask(Task):
    """`Score`: rows stream through the pages of the window that was granted.

    A row whose prefix is not resident computes it in its own pages. At the row's end its whole
    pages are published and others take their place. That cannot fail: each page that leaves the
    reservation becomes evictable (published) or free (published by another row meanwhile) in the
    same instant, under the same lock, so as many as left are to be had, whatever others pin.
    """

    def __init__(
        self,
        number: int,
        terms: Terms,
        pool: PagePool,
        request: Score | Rank,
        prefixes: Ordered[Tokens],
    ) -> None:
        super().__init__(number, terms, pool)
        self.suffix = request.suffix
        self._suffix = array("i", request.suffix)
        self._asked_window = request.window
        self._read = ReadPair(request.positive, request.negative)
        self._prefixes = prefixes
        self._matched: list[Pages] = []
        self._matched_at = -1  # the pool's version then
        self._probabilities = [0.0] * len(prefixes)
        self._waiting: deque[_Row] = deque()
        self._waiting_own = 0  # pages that the waiting rows need if all of them ran at once
        self._running: dict[Sequence, _Row] = {}
        self._window = 1
        self.prompt_left = self._prompt_tokens = self._all_tokens()
        self._cached = 0

    def _sizes(self) -> list[RowSize]:
        suffix, pool = len(self.suffix), self._pool
        return [
            size_row(pool, chain, len(prefix) + suffix, 0)
            for prefix, chain in zip(self._prefixes, self._match(), strict=True)
        ]

    def _match(self) -> list[Pages]:
        """The resident chain of each prefix; looked up anew only where the pool's pages have changed."""
        if self._matched_at != self._pool.version:
            self._matched = [self._pool.match(prefix, self._shareable(prefix)) for prefix in self._prefixes]
            self._matched_at = self._pool.version
        return self._matched

    def _shareable(self, prefix: Tokens) -> int:
        return shareable_pages(len(prefix), len(prefix) + len(self.suffix), self._pool.page_tokens)

    def _new_tokens(self, chains: Iterable[Pages]) -> int:
        """Tokens that all rows compute together when they reuse `chains`."""
        return self._all_tokens() - sum(map(len, chains)) * self._pool.page_tokens

    def _all_tokens(self) -> int:
        return sum(map(len, self._prefixes)) + len(self._prefixes) * len(self.suffix)

    def measure(self) -> tuple[Need, Work]:
        rows = self._sizes()
        work = Work(self._new_tokens(row.chain for row in rows))
        return smallest_need(rows, self._pool.available), work

    def admit(self, limits: WindowLimits) -> bool:
        rows = self._sizes()
        new = self._new_tokens(row.chain for row in rows)
        most = limits.most_rows(len(rows), new, self._asked_window)
        window = widest_window(rows, self._pool, most)
        if window is None:
            return False
        if self._reserve(window.own, window.chains) is None:
            return False
        self._open(rows, window.chains, most)
        return True

    def _open(self, rows: Ordered[RowSize], chains: Ordered[Pages], window: int) -> None:
        """Queues the rows, whose `chains` are pinned."""
        self._window = window
        self.prompt_left = self._new_tokens(chains)
        for index, (prefix, row, chain) in enumerate(zip(self._prefixes, rows, chains, strict=True)):
            self._waiting.append(_Row(index, prefix, row.pages - len(chain), chain))
        self._waiting_own = sum([row.own for row in self._waiting])

    def sequences(self) -> Ordered[Sequence]:
        waiting, spare = self._waiting, self._pages.spare
        while waiting and len(self._running) < self._window and waiting[0].own <= len(spare):
            self._start(waiting.popleft())
        return [sequence for sequence in self._running if not sequence.launched]

    def _start(self, row: _Row) -> None:
        self._waiting_own -= row.own
        self._share_more(row)
        prefix = row.prefix
        cached, prompt = len(row.chain) * self._pool.page_tokens, len(prefix) + len(self.suffix)
        self._cached += cached
        tokens = self._suffix  # one array for all rows that have nothing else to compute
        if cached < len(prefix):
            tokens = array("i", prefix[cached:]) + tokens
        pages = (*row.chain, *self._pages.take(row.own))
        self._running[Sequence(tokens, prompt, prompt, pages, computed=cached, cached=cached)] = row

    def _share_more(self, row: _Row) -> None:
        """Pins what has become resident since the admission."""
        shareable = self._shareable(row.prefix)
        if len(row.chain) >= shareable:
            return
        chain = self._pool.match(row.prefix, shareable)
        if len(chain) > len(row.chain):
            self.prompt_left -= (len(chain) - len(row.chain)) * self._pool.page_tokens
            self._pages.pin((chain,))
            self._pages.unpin(row.chain)
            row.own -= len(chain) - len(row.chain)
            row.chain = chain

    def read(self, sequence: Sequence) -> Read:
        return self._read

    def collect(self, sequence: Sequence, output: Output | None) -> bool:
        self.prompt_left -= sequence.launched
        sequence.collect()
        if output is None:
            return False
        if not isinstance(output, float):
            raise EngineFault("the runner did not read a probability")
        row = self._running.pop(sequence)
        self._probabilities[row.index] = output
        self._end_row(row, sequence)
        return not self._waiting and not self._running

    def _end_row(self, row: _Row, sequence: Sequence) -> None:
        pages, published = self._pages, 0
        whole = len(row.prefix) // self._pool.page_tokens
        if whole > len(row.chain):
            published = pages.publish(row.prefix, sequence.pages[:whole])
        pages.give(sequence.pages[whole:])
        pages.unpin(row.chain)
        if published:
            pages.refill(min(published, max(0, self._waiting_own - len(pages.spare))))

    def settle(self) -> None:
        self._pages.shrink(self._waiting_own)

    def answer(self, timing: Timing) -> Answer:
        usage = Usage(self._prompt_tokens, self._cached, 0, self._pages.peak)
        return Scored(tuple(self._probabilities), usage, timing)


class RankTask(GroupTask):
    """`Rank`: the query's embedding, then, when the caller has chosen prefixes, a group.

    The reservation is made before the prefixes are known, for rows of the largest size allowed. It
    is fitted to the rows once they are, and never grows: the pages of one such row are enough for
    any of them, so the group always comes to its end.
    """

    def __init__(self, number: int, terms: Terms, pool: PagePool, request: Rank) -> None:
        super().__init__(number, terms, pool, request, ())
        self._rank = request
        self.prompt_left = len(request.query) + request.rows * len(request.suffix)
        self._query: Sequence | None = None
        self._limits: WindowLimits | None = None
        self._supplied = False
        self.vector: tuple[float, ...] | None = None

    @property
    def _row_pages(self) -> int:
        return pages_for(self._rank.prefix_tokens + len(self.suffix), self._pool.page_tokens)

    @property
    def _query_pages(self) -> int:
        return pages_for(len(self._rank.query), self._pool.page_tokens)

    def measure(self) -> tuple[Need, Work]:
        rank = self._rank
        pages = max(self._row_pages, self._query_pages)
        work = Work(len(rank.query) + rank.rows * len(rank.suffix), 2)
        return Need(pages, self._pool.available, pages), work

    def admit(self, limits: WindowLimits) -> bool:
        rank, each = self._rank, self._row_pages
        most = limits.most_rows(rank.rows, rank.rows * len(rank.suffix), rank.window)
        rows = min(most, min(self._pool.available, limits.unknown_pages) // each)
        reservation = self._reserve(max(each, self._query_pages, rows * each))
        if reservation is None:
            return False
        self._limits = limits
        query = rank.query
        pages = tuple(reservation.take(self._query_pages))
        self._query = Sequence(array("i", query), len(query), len(query), pages)
        return True

    def sequences(self) -> Ordered[Sequence]:
        if self._supplied:
            return super().sequences()
        query = self._query
        return () if query is None or query.launched or self.vector is not None else (query,)

    @property
    def running(self) -> Running:
        if self.vector is None or self._supplied:
            return super().running
        return Running(self.left, self.pages_held, 0)  # its caller chooses: it gives the device nothing to do

    def settle(self) -> None:
        if self._supplied:  # until then its spare pages are for rows that it does not know yet
            super().settle()

    def read(self, sequence: Sequence) -> Read:
        return ReadVector() if sequence is self._query else super().read(sequence)

    def collect(self, sequence: Sequence, output: Output | None) -> bool:
        if sequence is not self._query:
            return super().collect(sequence, output)
        self.prompt_left -= sequence.launched
        sequence.collect()
        if isinstance(output, tuple):
            self.vector = output
            self._pages.give(sequence.pages)
        return False

    def supply(self, prefixes: tuple[Tokens, ...]) -> bool:
        """Takes the chosen prefixes in. True where there are none, so that the task is at its end.

        Raises ValueError where they are more or longer than what was asked for, or come twice or
        before the vector.
        """
        rank = self._rank
        if self._supplied or self.vector is None or self._limits is None:
            raise ValueError("prefixes are supplied once, after the query's vector has come")
        if len(prefixes) > rank.rows:
            raise ValueError(f"{len(prefixes)} prefixes were supplied, the request was for {rank.rows}")
        longest = max(map(len, prefixes), default=0)
        if longest > rank.prefix_tokens:
            raise ValueError(f"a prefix has {longest} tokens, the request was for {rank.prefix_tokens}")
        self._supplied = True
        self._prefixes = prefixes
        self._matched_at = -1
        self._probabilities = [0.0] * len(prefixes)
        rows = self._sizes()
        self._prompt_tokens = len(rank.query) + self._all_tokens()
        if not rows:
            self.prompt_left = 0
            return True
        chains = [row.chain for row in rows]
        window = self._limits.most_rows(len(rows), self._new_tokens(chains), rank.window)
        self._pages.pin(chains)
        self._pages.shrink(shrunk_window([row.own for row in rows], len(self._pages.owned), window))
        self._open(rows, chains, window)
        return False
