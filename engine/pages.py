"""The pages of the KV cache: who holds which, what is cached, what can be had.

A page is in one of three states, and `free + held + cached = total` at every moment:

    free     nobody's
    held     owned by one reservation, which may write it, or published and pinned by some
    cached   published, pinned by nobody: it keeps its contents and is evictable

Published pages are prefixes of token sequences in whole pages (`PrefixTree`), and never written again.

A prefix whose last page is part full shares its whole pages alone: a row computes the tail of the
prefix into a page of its own. That costs less than a page of tokens a row, and neither a copy nor a
second page. Callers that can should end their prefixes on a page boundary; then nothing is computed
twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engine.client import PageCounts
from engine.errors import EngineFault
from engine.prefix_tree import Pages, PrefixTree
from engine.request import Tokens


@dataclass(frozen=True, slots=True)
class Shortfall:
    """A reservation that was not made: `needed` own pages, `free` for whoever asked."""

    needed: int
    free: int


class PagePool:
    """Page ids 0 to `total - 1`. Not thread-safe: the engine calls it under its lock.

    `on_free` is told of pages whose contents are given up, before they are handed out again.
    """

    def __init__(
        self, total: int, page_tokens: int, on_free: Callable[[Sequence[int]], None] | None = None
    ) -> None:
        self.total = total
        self.page_tokens = page_tokens
        self.tree = PrefixTree(page_tokens)
        self._on_free = on_free
        self._free = list(range(total - 1, -1, -1))
        self._reservations: set[Reservation] = set()

    @property
    def version(self) -> int:
        """Changes whenever a match may come out differently."""
        return self.tree.version

    @property
    def available(self) -> int:
        """Pages that a reservation without a prefix could have: free and cached."""
        return len(self._free) + self.tree.evictable

    def available_beside(self, chains: Iterable[Pages]) -> int:
        """Pages left for a reservation that pins `chains`: of these the cached ones are not to be had."""
        cached = {page for chain in chains for page in chain[self.held_part(chain) :]}
        return self.available - len(cached)

    def counts(self) -> PageCounts:
        free, cached = len(self._free), self.tree.evictable
        return PageCounts(free, self.total - free - cached, cached, self.total)

    def match(self, tokens: Tokens, most: int) -> Pages:
        """The longest chain of published pages, at most `most`, that `tokens` begins with."""
        return self.tree.match(tokens, most)

    def match_all(self, texts: Sequence[Tokens], most: list[int]) -> list[Pages]:
        """`match` of each of `texts`, which are likely to come again as the same objects."""
        return self.tree.match_all(texts, most)

    def held_part(self, chain: Pages) -> int:
        """How many leading pages of a matched chain somebody pins; the rest of it is cached."""
        return self.tree.held_part(chain)

    def reserve(self, own: int, chains: Sequence[Pages] = ()) -> Reservation | Shortfall:
        """`own` pages to write and pins on matched `chains`, or neither."""
        if own + sum(map(len, chains)) > self.available:  # else it fits whatever of them is cached
            free = self.available_beside(chains)
            if own > free:
                return Shortfall(own, free)
        reservation = Reservation(self)
        self._reservations.add(reservation)
        if chains:
            reservation.pin(chains)  # first, so that none of them is evicted for the own pages
        reservation.refill(own)
        reservation.peak += own
        return reservation

    def _take(self, count: int) -> list[int]:
        free = self._free
        if count > len(free):
            self._give_back(self.tree.evict(count - len(free)))
        taken = free[len(free) - count :]
        del free[len(free) - count :]
        taken.reverse()
        return taken

    def _give_back(self, pages: Sequence[int]) -> None:
        if pages and self._on_free is not None:
            self._on_free(pages)
        self._free.extend(reversed(pages))

    def check(self) -> None:
        """Rebuilds every count from the reservations and the tree. Raises EngineFault where they differ."""
        owners = [0] * self.total
        pins = [0] * self.total
        for reservation in self._reservations:
            for page in reservation.owned:
                owners[page] += 1
            for chain in filter(None, reservation.chains):
                pins[chain[-1]] += 1
                node = self.tree.node_of.get(chain[-1])
                if node is None or node.chain != chain:
                    raise EngineFault(f"the pages {chain} are pinned and not published so")
            if not set(reservation.spare) <= reservation.owned:
                raise EngineFault("a reservation has spare pages that it does not own")
        free = set(self._free)
        if len(free) != len(self._free):
            raise EngineFault("a page is free twice")
        for page in range(self.total):
            published = page in self.tree.node_of
            states = (page in free) + owners[page] + published
            if states != 1:
                raise EngineFault(
                    f"page {page}: free {page in free}, owners {owners[page]}, published {published}"
                )
        self.tree.check(pins)


class Reservation:
    """The pages of one request, until `release`.

    `owned` pages are written by this request alone; `spare` are those of them that no row uses.
    `chains` are the published pages that it pins, read only: a place for each row, () where it pins
    nothing. `peak` is the most pages held at once.
    """

    __slots__ = ("_pool", "_shared", "chains", "owned", "peak", "spare")

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._shared: int | None = 0  # pages of `chains`, each counted once; None: to be counted
        self.owned: set[int] = set()
        self.spare: list[int] = []
        self.chains: list[Pages] = []
        self.peak = 0

    def pin(self, chains: Iterable[Pages]) -> None:
        """Shares chains as they were matched a moment ago; before that it has none."""
        self.chains = list(chains)
        self._pool.tree.pin(self.chains)
        self._note_peak()

    def pin_longer(self, place: int, chain: Pages) -> None:
        """Shares a chain that goes on where the one of this place ends."""
        self._pool.tree.pin((chain,))
        self._pool.tree.unpin((self.chains[place],))
        self.chains[place] = chain
        self._note_peak()

    def unpin(self, first: int, count: int) -> None:
        """The chains of so many places, from `first` on."""
        places = slice(first, first + count)
        self._pool.tree.unpin(self.chains[places])
        self.chains[places] = [()] * count
        self._shared = None

    def _note_peak(self) -> None:
        """Only here more is held than before: a refill makes up for what was published, no more."""
        self._shared = len(set().union(*self.chains))
        self.peak = max(self.peak, len(self.owned) + self._shared)

    def take(self, count: int) -> list[int]:
        """`count` spare pages for a row. The caller knows that there are so many."""
        if count > len(self.spare):
            raise EngineFault(f"a row needs {count} pages, its reservation has {len(self.spare)} left")
        taken = self.spare[len(self.spare) - count :]
        del self.spare[len(self.spare) - count :]
        return taken[::-1]

    def give(self, pages: Sequence[int]) -> None:
        """Pages of a row that ended, to be used by the next."""
        self.spare.extend(reversed(pages))

    def publish(self, tokens: Tokens, pages: Sequence[int]) -> int:
        """Publishes `pages`, which hold whole pages of `tokens` from its start; those owned leave the
        reservation. Returns how many these were: so many more pages are available at this moment."""
        new, duplicates = self._pool.tree.publish(tokens, pages)
        leaving = len(new) + len(duplicates)
        before = len(self.owned)
        self.owned.difference_update(new, duplicates)
        if before - len(self.owned) != leaving:
            raise EngineFault("pages were published that their reservation does not own")
        self._pool._give_back(duplicates)
        return leaving

    def refill(self, count: int) -> None:
        """Takes the place of published pages: `count` at most what `publish` has just returned."""
        pages = self._pool._take(count)
        self.owned.update(pages)
        self.spare.extend(reversed(pages))

    def grow(self, count: int) -> None:
        """`count` more spare pages, which the caller knows to be available."""
        self.refill(count)
        if self._shared is None:
            self._shared = len(set().union(*self.chains))
        self.peak = max(self.peak, len(self.owned) + self._shared)

    def shrink(self, keep: int) -> None:
        """Returns spare pages beyond `keep`."""
        if len(self.spare) <= keep:
            return
        surplus = self.spare[keep:]
        del self.spare[keep:]
        self.owned.difference_update(surplus)
        self._pool._give_back(surplus)

    def release(self) -> None:
        """Returns everything. A second call does nothing."""
        self._pool._reservations.discard(self)
        self._pool.tree.unpin(reversed(self.chains))
        self._pool._give_back(list(self.owned))
        self.chains.clear()
        self.owned.clear()
        self.spare.clear()
