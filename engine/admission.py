"""What a request needs and whether it can have it: numbers in, a window or a refusal out.

Own pages of a row that shares `cached` tokens with resident prefixes:

    ceil((prompt + max(max_output, 1) - 1) / page_tokens) - floor(cached / page_tokens)

since the last token generated is never fed back. At most `prompt - 1` tokens come from the cache:
the last one must be computed to have an output. Pages free for a request are the free and the
cached ones, less the cached ones that it would itself reuse.

The rows of a group are independent, so it can run with the pages of a single row. Of that smallest
window the row that is shortest of pages counts: row r alone can run exactly where

    pages(r) - resident(r) <= available - cached part of resident(r)

which is pages(r) - pinned(r) <= available, pinned(r) being the resident pages that others pin anyway.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.errors import EngineFault, Refusal, RefusalCode
from engine.pages import PagePool
from engine.prefix_tree import Pages
from engine.rate import StepTimes


def pages_for(tokens: int, page_tokens: int) -> int:
    """ceil(tokens / page_tokens)."""
    return -(-tokens // page_tokens)


def computed_tokens(prompt: int, max_output: int) -> int:
    """Tokens whose keys and values a sequence ever holds: prompt + max(max_output, 1) - 1."""
    return prompt + max(max_output, 1) - 1


class RowSize(NamedTuple):
    """A row against the pool of this moment: `pages` in all, of which `chain` is resident."""

    pages: int
    chain: Pages
    pinned: int  # leading pages of `chain` that somebody pins already

    @property
    def own(self) -> int:
        return self.pages - len(self.chain)

    @property
    def unpinned(self) -> int:
        """Pages of the pool that the row would take from others: its own and the cached ones it reuses."""
        return self.pages - self.pinned


def shareable_pages(prefix: int, prompt: int, page_tokens: int) -> int:
    """Pages of a row of `prompt` tokens that may be shared, the first `prefix` of which others have too."""
    return min(prefix, prompt - 1) // page_tokens


def size_row(pool: PagePool, chain: Pages, prompt: int, max_output: int) -> RowSize:
    """A row of `prompt` tokens whose matched `chain` is resident."""
    pages = pages_for(computed_tokens(prompt, max_output), pool.page_tokens)
    return RowSize(pages, chain, pool.held_part(chain))


class Need(NamedTuple):
    """Of the smallest window: `pages` of its own, `free` for it, `empty` what it takes of an empty pool."""

    pages: int
    free: int
    empty: int

    @property
    def deficit(self) -> int:
        return max(0, self.pages - self.free)


def smallest_need(rows: Sequence[RowSize], available: int) -> Need:
    """The need of the row that is shortest of pages; nothing where there are no rows."""
    if not rows:
        return Need(0, available, 0)
    worst = max(rows, key=lambda row: row.unpinned)
    cached = len(worst.chain) - worst.pinned
    return Need(worst.own, available - cached, max(row.pages for row in rows))


@dataclass(frozen=True, slots=True)
class Window:
    """What a group is granted: `own` pages, and of each row the resident pages it pins meanwhile."""

    own: int
    chains: tuple[Pages, ...]


def widest_window(rows: Sequence[RowSize], pool: PagePool, most_rows: int) -> Window | None:
    """Own pages of as many rows at once as fit, the largest first; None where not even one row fits.

    Preferably every resident page of every row stays pinned for the group's life, so that nothing
    that it will use is evicted under it. Where no row fits beside these, one row at a time may: it
    pins only what others pin anyway, and computes the rest.
    """
    chains = tuple(row.chain for row in rows)
    beside = pool.available_beside(chains)
    own = _largest_that_fit([row.own for row in rows], beside, most_rows)
    if own is not None:
        return Window(own, chains)
    own = max(row.unpinned for row in rows)
    if own <= pool.available:
        return Window(own, tuple(row.chain[: row.pinned] for row in rows))
    return None


def _largest_that_fit(needs: Sequence[int], free: int, most: int) -> int | None:
    """The sum of the largest `needs`, as many as fit into `free` and at most `most`; None for none."""
    if needs and len(needs) <= most and sum(needs) <= free:
        return sum(needs)
    total = None
    for need in sorted(needs, reverse=True)[:most]:
        if (total or 0) + need > free:
            break
        total = (total or 0) + need
    return total


def shrunk_window(needs: Sequence[int], owned: int, most_rows: int) -> int:
    """How many of `owned` pages a group keeps whose rows turn out to need `needs`."""
    kept = _largest_that_fit(needs, owned, most_rows)
    return owned if kept is None else kept


class Work(NamedTuple):
    """What a request keeps the device busy with: new tokens, and steps that cannot be one."""

    tokens: int
    steps: int = 1


class Running(NamedTuple):
    """An admitted request: tokens it has left, pages it returns at its end, what it takes of the next steps
    (its prompt tokens left, one while it decodes, none while it waits for its caller), and pages that it
    holds for rows that are not known yet."""

    tokens: int
    pages: int
    prompt: int = 1
    reserved: int = 0


class Load:
    """What runs at a moment, least left first: the order in which the scheduler prefers it.

    `fed_from` is the size from which a request would not run yet, since those preferred to it keep
    the device fed with `feeding` prompt tokens. `prompt` is what all take of the next steps, `reserved` the
    pages held for rows that are not known yet.
    """

    def __init__(self, running: Iterable[Running] = (), feeding: int = 0) -> None:
        self._running = sorted(running)
        self._left = [each.tokens for each in self._running]
        self._feeding = feeding
        self.prompt = sum(each.prompt for each in self._running)
        self.reserved = sum(each.reserved for each in self._running)
        self._fed_from: float | None = None  # until something changes

    def add(self, running: Running) -> None:
        at = bisect_right(self._running, running)
        self._running.insert(at, running)
        self._left.insert(at, running.tokens)
        self._count(running, 1)

    def remove(self, running: Running) -> None:
        """One that was added like this, and has not changed since."""
        at = bisect_right(self._running, running) - 1
        if at < 0 or self._running[at] != running:
            raise EngineFault(f"{running} does not run")
        del self._running[at], self._left[at]
        self._count(running, -1)

    def _count(self, running: Running, sign: int) -> None:
        self.prompt += sign * running.prompt
        self.reserved += sign * running.reserved
        self._fed_from = None

    @property
    def fed_from(self) -> float:
        if self._fed_from is None:
            self._fed_from = self._find_fed_from()
        return self._fed_from

    def _find_fed_from(self) -> float:
        fed = 0
        for each in self._running:  # mostly the first few are enough
            fed += each.prompt
            if fed >= self._feeding:
                return each.tokens
        return math.inf

    @property
    def tokens(self) -> int:
        return sum(self._left)

    def tokens_before(self, tokens: int) -> int:
        """Tokens of those that go before a request of `tokens`: of all that have no more left."""
        return sum(self._left[: bisect_right(self._left, tokens)])

    def tokens_until(self, pages: int) -> int:
        """Tokens computed until those that end first have returned `pages`."""
        tokens = returned = 0
        for each in self._running:
            if returned >= pages:
                break
            tokens += each.tokens
            returned += each.pages
        return tokens


class Moment(NamedTuple):
    """What an admission decision looks at. Tokens are new tokens, cached ones do not count."""

    need: Need
    work: Work
    tokens_ahead: int  # of requests whose turn is earlier
    load: Load
    step_tokens: int


def too_late(moment: Moment, times: StepTimes, seconds_left: float) -> RefusalCode | None:
    """Why work cannot end in `seconds_left` by the measured rate; None where it can, or none is known.

    Running requests with less left than this one go first, as the scheduler has it; short of pages,
    it also waits for the first of them to end that return enough.
    """
    if seconds_left <= 0.0:
        return RefusalCode.DEADLINE
    if not times.known:
        return None

    need, work, ahead, load, step_tokens = moment
    pages_at = 0.0
    if need.deficit:
        before = ahead + load.tokens_until(need.deficit)
        pages_at = times.seconds(before, before / step_tokens)
        if pages_at > seconds_left:
            return RefusalCode.PAGES_SHORT
    before = ahead + load.tokens_before(work.tokens)
    starts = max(pages_at, times.seconds(before, before / step_tokens))
    rest = times.seconds(work.tokens, max(work.steps, work.tokens / step_tokens))
    return RefusalCode.DEADLINE if starts + rest > seconds_left else None


@dataclass(frozen=True, slots=True)
class Sizes:
    """The numbers that every refusal carries besides its request's own."""

    pages_total: int
    page_tokens: int
    queue_depth: int
    queued_tokens: int
    retry_after_ms: int | None


def refuse(code: RefusalCode, need: Need, sizes: Sizes, reason: str = "") -> Refusal:
    """The refusal in one sentence with its numbers. `reason` completes `not_ready`."""
    never = code is RefusalCode.REQUEST_TOO_LARGE
    pages = need.empty if never else need.pages
    short = max(0, pages - (sizes.pages_total if never else need.free))
    against = f"needs {pages:,} pages, {need.free:,} free of {sizes.pages_total:,}"
    messages = {
        RefusalCode.REQUEST_TOO_LARGE: (
            f"The request needs {pages:,} pages and the engine has {sizes.pages_total:,}: {short:,} short; "
            "it can never run here, make it smaller."
        ),
        RefusalCode.PAGES_SHORT: f"The request {against}: {short:,} short, and they do not come in time.",
        RefusalCode.QUEUE_FULL: (
            f"The queue is full with {sizes.queue_depth:,} requests of {sizes.queued_tokens:,} tokens; "
            f"the request {against}."
            if sizes.queue_depth
            else f"The request would have to wait and the queue has no room for it; it {against}."
        ),
        RefusalCode.DEADLINE: (
            f"The request does not end before its deadline, with {sizes.queue_depth:,} requests waiting; "
            f"it {against}."
        ),
        RefusalCode.NOT_READY: f"The engine is not ready: {reason or 'it has not passed its canary'}.",
        RefusalCode.DRAINING: "The engine is draining and takes no more requests.",
    }
    retry = None if never or code in (RefusalCode.NOT_READY, RefusalCode.DRAINING) else sizes.retry_after_ms
    return Refusal(
        code=code,
        message=messages[code],
        pages_needed=pages,
        pages_free=need.free,
        pages_total=sizes.pages_total,
        page_tokens=sizes.page_tokens,
        queue_depth=sizes.queue_depth,
        retry_after_ms=retry,
    )


def retry_after_ms(tokens: int, step_tokens: int, times: StepTimes) -> int | None:
    """Until the `tokens` ahead are computed, by the measured rate; None before a step was seen, and where
    nothing is ahead: then waiting changes nothing."""
    if not times.known or not tokens:
        return None
    return max(1, math.ceil(times.seconds(tokens, tokens / step_tokens) * 1000.0))
