"""A request in work: its pages, its sequences, what is left of it.

One class a shape of request: `SequenceTask` is one sequence (embed, generate), `GroupTask` is rows
that stream through a window (score), `RankTask` an embedding first and then such a group.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import cast

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
from engine.batch import Part
from engine.errors import EngineFault
from engine.pages import PagePool, Reservation, Shortfall
from engine.prefix_tree import Pages
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
from engine.sequence import RowBlock, Sequence, TerminalState
from engine.validate import check_fit

TOO_SOON = "prefixes are supplied once, after the query's vector has come"

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
    which is what the steps in flight and the next one run. Rows of at most `whole_row_tokens` new tokens
    run whole, which any step has room for."""

    tokens: int
    rows: int
    whole_row_tokens: int = 0

    def most_rows(self, rows: int, tokens: int, asked: int | None) -> int:
        """Of `rows` rows that compute `tokens` new tokens together."""
        filling = -(-self.tokens * rows // max(tokens, 1))
        return max(1, min(rows, asked or rows, self.rows, filling))


class Task:
    """One request from its submission to its one outcome. Not thread-safe."""

    def __init__(self, number: int, terms: Terms, pool: PagePool) -> None:
        self.number = number
        self.terms = terms
        self.terminal = TerminalState()
        self.work = Work(0)  # as measured at submission
        self.admitted = 0.0
        self.turn = 0  # how many were admitted before it
        self.last_step = 0  # the step before which it was admitted, or its last
        self.in_flight = 0  # rows of steps that were launched and not collected
        self.prompt_left = 0  # prompt tokens still to compute
        self.output_left = 0  # tokens of the output still to come
        self._pool = pool
        self._reservation: Reservation | None = None

    def need(self) -> Need:
        """Pages of its smallest window at this moment."""
        raise NotImplementedError

    def measure(self) -> Work:
        """What it would keep the device busy with, as things are at this moment."""
        raise NotImplementedError

    @property
    def least_pages(self) -> int:
        """Pages that its smallest window takes of an empty pool."""
        raise NotImplementedError

    @property
    def short_of_pages(self) -> bool:
        """Whether its smallest window does not fit at this moment."""
        return self.need().deficit > 0

    def admit(self, limits: WindowLimits) -> bool:
        """Reserves its pages, or changes nothing and says no."""
        raise NotImplementedError

    @property
    def left(self) -> int:
        """New tokens still to compute, those of the output included."""
        return self.prompt_left + self.output_left

    @property
    def running(self) -> Running:
        return Running(self.left, self.pages_held, max(1, self.prompt_left))

    def sequences(self, more: int = 0) -> Ordered[Sequence | RowBlock]:
        """What has pages and is not in flight, in the order it is to run. Starts rows where pages are spare,
        or where the pool has some for the next `more` tokens."""
        raise NotImplementedError

    @property
    def waits_for_pages(self) -> bool:
        """Whether it may have something to run as soon as the pool has pages, whatever it was told."""
        return False

    def launch(self, sequence: Sequence | RowBlock, tokens: int, rows: int) -> Part:
        """The next `tokens` of a sequence, or the first `rows` of a block: in flight from now on."""
        raise NotImplementedError

    def read(self, sequence: Sequence | RowBlock) -> Read:
        """What the next output of a sequence is read as, or each one of a block."""
        raise NotImplementedError

    def collect(self, sequence: Sequence, output: Output | None) -> bool:
        """A step's share of a sequence is computed, `output` where it had one. True at the task's end."""
        raise NotImplementedError

    def settle(self) -> None:
        """A step is collected as a whole: returns the pages that nothing needs any more."""
        raise NotImplementedError

    def answer(self, timing: Timing) -> Answer:
        """The answer of a task that has come to its end."""
        raise NotImplementedError

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

    def need(self) -> Need:
        return smallest_need([self._size()], self._pool.available)

    def measure(self) -> Work:
        request = self._request
        ends_early = isinstance(request, Generate) and bool(request.stop or request.constraint)
        output = 1 if ends_early else max(self._most_output, 1)
        cached = len(self._size().chain) * self._pool.page_tokens
        return Work(computed_tokens(len(request.tokens), output) - cached, output)

    @property
    def least_pages(self) -> int:
        tokens = computed_tokens(len(self._request.tokens), self._most_output)
        return pages_for(tokens, self._pool.page_tokens)

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

    def sequences(self, more: int = 0) -> Ordered[Sequence]:
        return () if self._sequence is None or self._sequence.launched else (self._sequence,)

    def launch(self, sequence: Sequence | RowBlock, tokens: int, rows: int) -> Part:
        return sequence_of(sequence).launch(tokens)

    def read(self, sequence: Sequence | RowBlock) -> Read:
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


def sequence_of(running: Sequence | RowBlock) -> Sequence:
    """Raises EngineFault for a block."""
    if isinstance(running, RowBlock):
        raise EngineFault("a block of rows where a sequence was due")
    return running


class GroupTask(Task):
    """`Score`: rows stream through the pages of the window that was granted.

    Rows that are short of what they compute start together and run whole (`RowBlock`); a long one is
    a `Sequence`, which may be computed over several steps.

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
        self._matched: list[Pages] = []
        self._matched_at = -1  # the pool's version then
        self._new: list[int] = []  # tokens that each row computes
        self._own: list[int] = []  # pages of each row behind its chain
        self._rows = 0  # that were admitted
        self._next = 0  # the first row that waits
        self._waiting_own = 0  # pages that the waiting rows need if all of them ran at once
        self._running: dict[Sequence, int] = {}  # and which row it is
        self._blocks: dict[RowBlock, None] = {}
        self._active = 0  # rows that have their pages
        self._window = 1
        self._whole_row_tokens = 0
        self._cached = 0
        self._set_rows(prefixes)
        self.prompt_left = self._prompt_tokens = self._all_tokens

    def _set_rows(self, prefixes: Ordered[Tokens]) -> None:
        """Sizes of the rows: nothing of it depends on the pool."""
        suffix, page_tokens = len(self.suffix), self._pool.page_tokens
        self._prefixes = prefixes
        self._matched_at = -1
        self._probabilities = [0.0] * len(prefixes)
        self._lengths = lengths = list(map(len, prefixes))
        self._all_tokens = sum(lengths) + len(lengths) * suffix
        self._whole = [length // page_tokens for length in lengths]  # pages that its end publishes
        self._shareable = self._whole  # pages that it may share: its last token is always computed
        if not suffix:
            self._shareable = [shareable_pages(length, length, page_tokens) for length in lengths]

    def _sizes(self) -> list[RowSize]:
        held, page_tokens, suffix = self._pool.held_part, self._pool.page_tokens, len(self.suffix)
        return [
            RowSize(pages_for(length + suffix, page_tokens), chain, held(chain))
            for length, chain in zip(self._lengths, self._match(), strict=True)
        ]

    def _match(self) -> list[Pages]:
        """The resident chain of each prefix; looked up anew only where the pool's pages have changed."""
        if self._matched_at != self._pool.version:
            self._matched = self._pool.match_all(self._prefixes, self._shareable)
            self._matched_at = self._pool.version
        return self._matched

    def _new_tokens(self, chains: Iterable[Pages]) -> int:
        """Tokens that all rows compute together when they reuse `chains`."""
        return self._all_tokens - sum(map(len, chains)) * self._pool.page_tokens

    def need(self) -> Need:
        return smallest_need(self._sizes(), self._pool.available)

    def measure(self) -> Work:
        return Work(self._new_tokens(self._match()))

    @property
    def least_pages(self) -> int:
        if not self._lengths:
            return 0
        return pages_for(max(self._lengths) + len(self.suffix), self._pool.page_tokens)

    @property
    def short_of_pages(self) -> bool:
        longest = max(map(len, self._match()), default=0)
        if self.least_pages + longest <= self._pool.available:  # whatever of the chains others pin
            return False
        return super().short_of_pages

    def admit(self, limits: WindowLimits) -> bool:
        chains: Ordered[Pages] = self._match()
        most = limits.most_rows(len(chains), self._new_tokens(chains), self._asked_window)
        self._plan_rows(chains)
        own, resident = sum(self._own), sum(map(len, chains))
        if most < len(chains) or own + resident > self._pool.available:  # else all of it fits, surely
            window = widest_window(self._sizes(), self._pool, most)
            if window is None:
                return False
            own, chains = window.own, window.chains
            self._plan_rows(chains)
        if self._reserve(own, chains) is None:
            return False
        self._open(most, limits)
        return True

    def _plan_rows(self, chains: Ordered[Pages]) -> None:
        """What each row computes and takes in pages when it reuses its one of `chains`."""
        page_tokens, added = self._pool.page_tokens, len(self.suffix)
        self._new = new = [
            length + added - len(chain) * page_tokens
            for length, chain in zip(self._lengths, chains, strict=True)
        ]
        self._own = [-(-tokens // page_tokens) for tokens in new]

    def _open(self, window: int, limits: WindowLimits) -> None:
        """Lets the rows wait, as they were planned."""
        self._window = window
        self._whole_row_tokens = limits.whole_row_tokens
        self._rows = len(self._new)
        self.prompt_left = sum(self._new)
        self._waiting_own = sum(self._own)

    def sequences(self, more: int = 0) -> Ordered[Sequence | RowBlock]:
        if self._next < self._rows:
            self._start_rows()
        running: list[Sequence | RowBlock] = [block for block in self._blocks if not block.launched]
        running += [sequence for sequence in self._running if not sequence.launched]
        return running

    def _start_rows(self) -> None:
        """As many as the window and the spare pages allow, in order."""
        first = self._next
        last = self._fitting(first, min(self._rows, first + self._window - self._active))
        if last == first:
            return
        self._next = last
        self._active += last - first
        new, whole_row = self._new[first:last], self._whole_row_tokens
        self._cached += sum(self._lengths[first:last]) + len(new) * len(self.suffix) - sum(new)
        pages = self._pages.take(sum(self._own[first:last]))
        if max(new) <= whole_row:
            self._start_together(first, last, pages)
            return
        for short, some in groupby(range(first, last), lambda row: new[row - first] <= whole_row):
            rows = list(some)
            own = sum(self._own[rows[0] : rows[-1] + 1])
            if short:
                self._start_together(rows[0], rows[-1] + 1, pages[:own])
            else:
                self._start_alone(rows, pages[:own])
            del pages[:own]

    def _fitting(self, first: int, last: int) -> int:
        """Up to which row before `last` there are pages. What has become resident since the admission is
        shared, so that it is not computed again."""
        own, chains, shareable = self._own, self._pages.chains, self._shareable
        needed, left = sum(own[first:last]), len(self._pages.spare)
        if needed <= left and list(map(len, chains[first:last])) == shareable[first:last]:
            self._waiting_own -= needed
            return last
        for row in range(first, last):
            if own[row] > left:
                return row
            self._waiting_own -= own[row]
            if len(chains[row]) < shareable[row]:
                self._share_more(row)
            left -= own[row]
        return last

    def _start_together(self, first: int, last: int, pages: list[int]) -> None:
        """Rows from `first` to before `last`, which run whole; `pages` are their own."""
        block = RowBlock(
            first,
            self._prefixes[first:last],
            self._pages.chains[first:last],
            self._own[first:last],
            pages,
            self._suffix,
            list(accumulate(self._new[first:last])),
        )
        self._blocks[block] = None

    def _start_alone(self, rows: Iterable[int], pages: list[int]) -> None:
        """Rows that are computed over several steps, maybe."""
        at = 0
        for row in rows:
            prefix, chain, own = self._prefixes[row], self._pages.chains[row], self._own[row]
            prompt, cached = len(prefix) + len(self.suffix), len(chain) * self._pool.page_tokens
            tokens = self._suffix  # one array for all rows that have nothing else to compute
            if cached < len(prefix):
                tokens = array("i", prefix[cached:]) + tokens
            held = (*chain, *pages[at : at + own])
            self._running[Sequence(tokens, prompt, prompt, held, computed=cached, cached=cached)] = row
            at += own

    def launch(self, sequence: Sequence | RowBlock, tokens: int, rows: int) -> Part:
        if isinstance(sequence, Sequence):
            return sequence.launch(tokens)
        rest = sequence.cut(rows)
        if rest is not None:
            self._blocks[rest] = None
        return sequence.launch(self._pool.page_tokens)

    def _share_more(self, row: int) -> None:
        """Pins what has become resident since the admission."""
        chain = self._pool.match(self._prefixes[row], self._shareable[row])
        more = len(chain) - len(self._pages.chains[row])
        if more > 0:
            self.prompt_left -= more * self._pool.page_tokens
            self._pages.pin_longer(row, chain)
            self._new[row] -= more * self._pool.page_tokens
            self._own[row] -= more

    def read(self, sequence: Sequence | RowBlock) -> Read:
        return self._read

    def collect(self, sequence: Sequence, output: Output | None) -> bool:
        self.prompt_left -= sequence.launched
        sequence.collect()
        if output is None:
            return False
        row = self._running.pop(sequence)
        self._note(row, (output,))
        chain = self._pages.chains[row]
        self._end_rows(row, 1, self._publish_row(row, chain, sequence.pages[len(chain) :]))
        return self._at_end

    def collect_block(self, block: RowBlock, outputs: Ordered[Output]) -> bool:
        """All rows of a block are computed. True at the task's end."""
        self.prompt_left -= block.launched
        block.collect()
        del self._blocks[block]
        self._note(block.first, outputs)
        if list(map(len, block.chains)) == self._whole[block.first : block.first + len(block)]:
            self._pages.give(block.pages)
            self._pages.unpin(block.first, len(block))
            return self._at_end
        at = published = 0
        for row, (chain, own) in enumerate(zip(block.chains, block.own, strict=True), block.first):
            published += self._publish_row(row, chain, block.pages[at : at + own])
            at += own
        self._end_rows(block.first, len(block), published)
        return self._at_end

    @property
    def _at_end(self) -> bool:
        return not self._active and self._next == self._rows

    def _note(self, first: int, outputs: Ordered[Output]) -> None:
        """The probabilities of the rows from `first` on, which are done."""
        if set(map(type, outputs)) != {float}:
            raise EngineFault("the runner did not read a probability")
        self._probabilities[first : first + len(outputs)] = cast(Ordered[float], outputs)
        self._active -= len(outputs)

    def _publish_row(self, row: int, chain: Pages, own: Ordered[int]) -> int:
        """Publishes the whole pages of a row that is done, and frees the others for the next one. Returns how
        many left the reservation."""
        published, to_publish = 0, self._whole[row] - len(chain)
        if to_publish > 0:
            published = self._pages.publish(self._prefixes[row], (*chain, *own[:to_publish]))
            own = own[to_publish:]
        self._pages.give(own)
        return published

    def _end_rows(self, first: int, count: int, published: int) -> None:
        """Of rows that are done, of whose pages so many were published: the next ones have others instead."""
        pages = self._pages
        pages.unpin(first, count)
        if published and self._waiting_own > len(pages.spare):
            pages.refill(min(published, self._waiting_own - len(pages.spare)))

    def settle(self) -> None:
        self._pages.shrink(self._waiting_own)

    def answer(self, timing: Timing) -> Answer:
        usage = Usage(self._prompt_tokens, self._cached, 0, self._pages.peak)
        return Scored(tuple(self._probabilities), usage, timing)


class RankTask(GroupTask):
    """`Rank`: the query's embedding, then, when the caller has chosen prefixes, a group.

    The reservation is made before the prefixes are known, for one row of the largest size allowed, which
    is enough for any of them: so the group always comes to its end. Once the rows are known, and mostly
    resident, it takes pages for as many as a step has room for when that step is planned, where they are to
    be had. Taken any earlier they would be taken from the prefixes that others are about to use.
    """

    def __init__(self, number: int, terms: Terms, pool: PagePool, request: Rank) -> None:
        super().__init__(number, terms, pool, request, ())
        self._rank = request
        self._query_pages = pages_for(len(request.query), pool.page_tokens)
        self._least = max(
            pages_for(request.prefix_tokens + len(request.suffix), pool.page_tokens), self._query_pages
        )
        self.prompt_left = len(request.query) + request.rows * len(request.suffix)
        self._query: Sequence | None = None
        self._limits: WindowLimits | None = None
        self._supplied = False
        self.vector: tuple[float, ...] | None = None

    def need(self) -> Need:
        return Need(self.least_pages, self._pool.available, self.least_pages)

    def measure(self) -> Work:
        rank = self._rank
        return Work(len(rank.query) + rank.rows * len(rank.suffix), 2)

    @property
    def least_pages(self) -> int:
        return self._least

    @property
    def short_of_pages(self) -> bool:
        return self.least_pages > self._pool.available

    def admit(self, limits: WindowLimits) -> bool:
        reservation = self._reserve(self.least_pages)
        if reservation is None:
            return False
        self._limits = limits
        query = self._rank.query
        pages = tuple(reservation.take(self._query_pages))
        self._query = Sequence(array("i", query), len(query), len(query), pages)
        return True

    def sequences(self, more: int = 0) -> Ordered[Sequence | RowBlock]:
        if self._supplied:
            if more and self._next < self._rows:
                self._grow(more)
            return super().sequences()
        query = self._query
        return () if query is None or query.launched or self.vector is not None else (query,)

    @property
    def waits_for_pages(self) -> bool:
        return self._supplied and self._next < self._rows

    @property
    def running(self) -> Running:
        if self._supplied:
            return super().running
        held = self.pages_held
        # While its caller chooses it gives the device nothing to do.
        return Running(self.left, held, 0 if self.vector is not None else max(1, self.prompt_left), held)

    def settle(self) -> None:
        if self._supplied:  # until then its spare pages are for rows that it does not know yet
            super().settle()

    def read(self, sequence: Sequence | RowBlock) -> Read:
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

    def _grow(self, tokens: int) -> None:
        """Takes pages for the rows that compute the next `tokens`, as far as there are any: they run in the
        step that is being planned, and return what it took."""
        last = min(self._rows, self._next + self._window - self._active)
        count = bisect_right(list(accumulate(self._new[self._next : last])), tokens)
        missing = sum(self._own[self._next : self._next + count]) - len(self._pages.spare)
        if missing > 0:
            self._pages.grow(min(missing, self._pool.available))

    def supply(self, prefixes: tuple[Tokens, ...]) -> bool:
        """Takes the chosen prefixes in. True where there are none, so that the task is at its end.

        Raises ValueError where they are more or longer than what was asked for, or come twice or
        before the vector.
        """
        rank = self._rank
        if self._supplied or self.vector is None or self._limits is None:
            raise ValueError(TOO_SOON)
        check_fit(rank, prefixes)
        self._supplied = True
        self._set_rows(prefixes)
        self._prompt_tokens = len(rank.query) + self._all_tokens
        if not prefixes:
            self.prompt_left = 0
            return True
        chains = self._match()
        window = self._limits.most_rows(len(chains), self._new_tokens(chains), rank.window)
        self._plan_rows(chains)
        self._pages.pin(chains)
        self._pages.shrink(shrunk_window(self._own, len(self._pages.owned), window))
        self._open(window, self._limits)
        return False
