"""The pages of the KV cache: who holds which, what is cached, what can be had.

A page is in one of three states, and `free + held + cached = total` at every moment:

    free     nobody's
    held     owned by one reservation, which may write it, or published and pinned by some
    cached   published, pinned by nobody: it keeps its contents and is evictable

Published pages are prefixes of token sequences in whole pages. They form a tree: an entry is found
under its parent by the page's very token ids, so two texts never meet in one page by a collision.
Published pages are never written again.

A prefix whose last page is part full shares its whole pages alone: a row computes the tail of the
prefix into a page of its own. That costs less than a page of tokens a row, and neither a copy nor a
second page. Callers that can should end their prefixes on a page boundary; then nothing is computed
twice.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from engine.client import PageCounts
from engine.errors import EngineFault
from engine.request import Tokens

Pages = tuple[int, ...]
_OBJECT_TOKENS = 1 << 20  # of texts that are found by their identity


@dataclass(frozen=True, slots=True)
class Shortfall:
    """A reservation that was not made: `needed` own pages, `free` for whoever asked."""

    needed: int
    free: int


class _Entry:
    """A published page: `key` is its tokens, `parent` the entry of the page before it, `chain` the pages up
    to it, empty once it is evicted.

    `holds` counts the pins on the page and its children that are held: a page is held as long as a
    page behind it is. `text` is set where `_whole` knows the page by all tokens up to its end.
    """

    __slots__ = ("chain", "children", "holds", "key", "page", "parent", "text")

    def __init__(self, page: int, key: Tokens, parent: _Entry | None) -> None:
        self.page = page
        self.key = key
        self.parent = parent
        self.chain: Pages = (page,) if parent is None else (*parent.chain, page)
        self.children: dict[Tokens, _Entry] = {}
        self.holds = 0
        self.text: Tokens | None = None


class _Objects:
    """The last page of texts whose whole pages are all published, by the identity of the text: prefixes of
    a catalogue come again in every request, and to hash one costs more than all else of finding it."""

    __slots__ = ("_kept", "_tokens", "entries")

    def __init__(self) -> None:
        self.entries: dict[int, _Entry] = {}
        self._kept: dict[int, Tokens] = {}  # a text that is kept keeps its id to itself
        self._tokens = 0

    def add(self, text: Tokens, entry: _Entry) -> None:
        key = id(text)
        if key not in self._kept:
            if self._tokens + len(text) > _OBJECT_TOKENS:
                self.entries.clear()
                self._kept.clear()
                self._tokens = 0
            self._kept[key] = text
            self._tokens += len(text)
        self.entries[key] = entry

    def check(self, page_tokens: int, published: Mapping[int, _Entry]) -> None:
        """Raises EngineFault where a text is found on pages that do not hold it."""
        for key, entry in self.entries.items():
            text = self._kept[key]
            if entry.chain and published.get(entry.page) is not entry:
                raise EngineFault("a text is found on pages that are not published any more")
            below: _Entry | None = entry
            held: Tokens = ()
            while below is not None:
                held, below = below.key + held, below.parent
            if id(text) != key or held != text[: len(text) // page_tokens * page_tokens]:
                raise EngineFault("a text is found on pages that do not hold it")


class PagePool:
    """Page ids 0 to `total - 1`. Not thread-safe: the engine calls it under its lock.

    `on_free` is told of pages whose contents are given up, before they are handed out again.
    """

    def __init__(
        self, total: int, page_tokens: int, on_free: Callable[[Sequence[int]], None] | None = None
    ) -> None:
        self.total = total
        self.page_tokens = page_tokens
        self.version = 0  # changes whenever a match may come out differently
        self._on_free = on_free
        self._free = list(range(total - 1, -1, -1))
        self._root: dict[Tokens, _Entry] = {}
        self._published: dict[int, _Entry] = {}
        # The same tree by whole texts, as far as they were asked for: one look-up instead of one a page.
        self._whole: dict[Tokens, _Entry] = {}
        self._objects = _Objects()
        # Least recently used first; a page comes before the pages that its tokens follow, so that
        # the first one never has children.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._reservations: set[Reservation] = set()

    @property
    def available(self) -> int:
        """Pages that a reservation without a prefix could have: free and cached."""
        return len(self._free) + len(self._cached)

    def available_beside(self, chains: Iterable[Pages]) -> int:
        """Pages left for a reservation that pins `chains`: of these the cached ones are not to be had."""
        cached = {page for chain in chains for page in chain[self.held_part(chain) :]}
        return self.available - len(cached)

    def counts(self) -> PageCounts:
        free, cached = len(self._free), len(self._cached)
        return PageCounts(free, self.total - free - cached, cached, self.total)

    def match(self, tokens: Tokens, most: int) -> Pages:
        """The longest chain of published pages, at most `most`, that `tokens` begins with."""
        size = self.page_tokens
        if tokens[:size] not in self._root:  # mostly so where nothing is resident, and cheaper to see
            return ()
        text = tokens[: min(most, len(tokens) // size) * size]
        entry = self._whole.get(text) or self._walk(text)
        return () if entry is None else entry.chain

    def match_all(self, texts: Sequence[Tokens], most: list[int]) -> list[Pages]:
        """`match` of each of `texts`, which are likely to come again as the same objects."""
        entries = list(map(self._objects.entries.get, map(id, texts)))
        chains = [() if entry is None else entry.chain for entry in entries]
        if list(map(len, chains)) != most:
            for index, (text, limit) in enumerate(zip(texts, most, strict=True)):
                if not 0 < len(chains[index]) <= limit:
                    chains[index] = self._match_object(text, limit)
        return chains

    def _match_object(self, text: Tokens, most: int) -> Pages:
        chain = self.match(text, most)
        if chain and len(chain) == len(text) // self.page_tokens:
            self._objects.add(text, self._published[chain[-1]])
        return chain

    def _walk(self, text: Tokens) -> _Entry | None:
        """The last page of the longest chain that `text`, of whole pages, begins with."""
        size = self.page_tokens
        children, entry = self._root, None
        for start in range(0, len(text), size):
            following = children.get(text[start : start + size])
            if following is None:
                return entry
            entry, children = following, following.children
        if entry is not None and entry.text is None:
            entry.text = text
            self._whole[text] = entry
        return entry

    def held_part(self, chain: Pages) -> int:
        """How many leading pages of a matched chain somebody pins; the rest of it is cached."""
        length = len(chain)
        while length and not self._published[chain[length - 1]].holds:
            length -= 1
        return length

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
            self._give_back([self._evict() for _ in range(count - len(free))])
        taken = free[len(free) - count :]
        del free[len(free) - count :]
        taken.reverse()
        return taken

    def _evict(self) -> int:
        self.version += 1
        page, _ = self._cached.popitem(last=False)
        entry = self._published.pop(page)
        siblings = self._root if entry.parent is None else entry.parent.children
        del siblings[entry.key]
        if entry.text is not None:
            del self._whole[entry.text]
        entry.chain = ()
        return page

    def _give_back(self, pages: Sequence[int]) -> None:
        if pages and self._on_free is not None:
            self._on_free(pages)
        self._free.extend(reversed(pages))

    def _pin(self, chains: Iterable[Pages]) -> None:
        """Holds the last page of each chain, and with it those before it."""
        published, cached = self._published, self._cached
        for chain in chains:
            entry: _Entry | None = published[chain[-1]] if chain else None
            while entry is not None:
                entry.holds += 1
                if entry.holds > 1:  # held already, and what is before it
                    break
                del cached[entry.page]
                entry = entry.parent

    def _unpin(self, chains: Iterable[Pages]) -> None:
        """Takes one hold from the last page of each chain. Pages that nobody holds become cached, the last
        one first."""
        published, cached = self._published, self._cached
        for chain in chains:
            entry: _Entry | None = published[chain[-1]] if chain else None
            while entry is not None:
                entry.holds -= 1
                if entry.holds:
                    break
                cached[entry.page] = None
                entry = entry.parent

    def _publish(self, tokens: Tokens, pages: Sequence[int], owned: set[int]) -> None:
        """Puts `pages` into the tree; those of them in `owned` leave it, as cached pages or, where
        the same tokens are published already, as free ones."""
        duplicates: list[int] = []
        parent, children, size = None, self._root, self.page_tokens
        for index, page in enumerate(pages):
            key = tokens[index * size : (index + 1) * size]
            entry = children.get(key)
            if entry is None:
                self.version += 1
                owned.remove(page)
                entry = children[key] = self._published[page] = _Entry(page, key, parent)
            elif entry.page != page:
                owned.remove(page)
                duplicates.append(page)
            parent, children = entry, entry.children
        while parent is not None and not parent.holds:
            self._cached[parent.page] = None
            self._cached.move_to_end(parent.page)
            parent = parent.parent
        self._give_back(duplicates)

    def check(self) -> None:
        """Rebuilds every count from the reservations and the tree. Raises EngineFault where they differ."""
        owners = [0] * self.total
        pins = [0] * self.total
        for reservation in self._reservations:
            for page in reservation.owned:
                owners[page] += 1
            for chain in filter(None, reservation.chains):
                pins[chain[-1]] += 1
                if chain[-1] not in self._published or self._published[chain[-1]].chain != chain:
                    raise EngineFault(f"the pages {chain} are pinned and not published so")
            if not set(reservation.spare) <= reservation.owned:
                raise EngineFault("a reservation has spare pages that it does not own")
        free = set(self._free)
        if len(free) != len(self._free):
            raise EngineFault("a page is free twice")
        for page in range(self.total):
            published = page in self._published
            states = (page in free) + owners[page] + published
            if states != 1:
                raise EngineFault(
                    f"page {page}: free {page in free}, owners {owners[page]}, published {published}"
                )
        self._check_tree(pins)

    def _check_tree(self, pins: Sequence[int]) -> None:
        reached: dict[int, _Entry] = {}
        texts: dict[Tokens, Pages] = {}
        rank = {page: index for index, page in enumerate(self._cached)}
        below: list[tuple[_Entry, Tokens, Pages]] = [(entry, (), ()) for entry in self._root.values()]
        while below:
            entry, text, chain = below.pop()
            text, chain = text + entry.key, (*chain, entry.page)
            reached[entry.page] = entry
            if entry.chain != chain:
                raise EngineFault(f"page {entry.page} does not know the pages before it")
            if entry.text is not None:
                texts[text] = chain
            holds = pins[entry.page] + sum(bool(child.holds) for child in entry.children.values())
            if entry.holds != holds:
                raise EngineFault(f"page {entry.page} counts {entry.holds} holds and has {holds}")
            if (entry.page in self._cached) != (not holds):
                raise EngineFault(f"page {entry.page} is evictable against its holds")
            for child in entry.children.values():
                if child.parent is not entry:
                    raise EngineFault(f"page {child.page} does not know the page before it")
                if not holds and rank[child.page] > rank[entry.page]:
                    raise EngineFault(f"page {entry.page} would be evicted before page {child.page}")
                below.append((child, text, chain))
        if reached != self._published:
            raise EngineFault("published pages are not those of the prefix tree")
        if not self._cached.keys() <= reached.keys():
            raise EngineFault("a page is evictable that is not published")
        found = {text: entry.chain for text, entry in self._whole.items()}
        if texts != found:
            raise EngineFault("a text is found on pages that do not hold it")
        self._objects.check(self.page_tokens, self._published)


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
        self._pool._pin(self.chains)
        self._note_peak()

    def pin_longer(self, place: int, chain: Pages) -> None:
        """Shares a chain that goes on where the one of this place ends."""
        self._pool._pin((chain,))
        self._pool._unpin((self.chains[place],))
        self.chains[place] = chain
        self._note_peak()

    def unpin(self, first: int, count: int) -> None:
        """The chains of so many places, from `first` on."""
        places = slice(first, first + count)
        self._pool._unpin(self.chains[places])
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
        before = len(self.owned)
        self._pool._publish(tokens, pages, self.owned)
        return before - len(self.owned)

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
        self._pool._unpin(reversed(self.chains))
        self._pool._give_back(list(self.owned))
        self.chains.clear()
        self.owned.clear()
        self.spare.clear()
