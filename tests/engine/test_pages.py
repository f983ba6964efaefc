"""The page pool against a model that remembers everything, and by hand."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from engine.errors import EngineFault
from engine.pages import PagePool, Reservation, Shortfall
from engine.prefix_tree import Node
from engine.request import Tokens

SIZE = 4

# Few texts with long common beginnings, some ending inside a page, so that chains branch and meet.
texts = st.lists(st.integers(0, 1), max_size=5).flatmap(
    lambda pages: st.integers(0, SIZE - 1).map(
        lambda rest: tuple(token for page in pages for token in [page] * SIZE) + (7,) * rest
    )
)


class Held:
    """A reservation as a request uses it: a text, the chain it shares, and pages for the rest."""

    def __init__(
        self, reservation: Reservation, text: Tokens, chain: tuple[int, ...], own: list[int]
    ) -> None:
        self.reservation = reservation
        self.text = text
        self.chain = chain
        self.own = own


class PoolMachine(RuleBasedStateMachine):
    """The reference knows what text each page holds and when each cached page was last used."""

    held = Bundle("held")

    @initialize(total=st.integers(1, 12))
    def start(self, total: int) -> None:
        self.freed: list[int] = []
        self.pool = PagePool(total, SIZE, self.on_free)
        self.contents: dict[int, Tokens] = {}  # published page -> the text up to its end
        self.used: dict[int, int] = {}  # published page -> when it was last used
        self.live: list[Held] = []
        self.objects: dict[Tokens, Tokens] = {}  # texts that come again as the same objects
        self.clock = 0

    def on_free(self, pages: Sequence[int]) -> None:
        for page in pages:
            assert page not in {p for each in self.live for p in each.own}, "a page in use was freed"
            self.contents.pop(page, None)
        self.freed.extend(pages)

    def pinned(self) -> set[int]:
        return {page for each in self.live for page in each.chain}

    def expected_match(self, text: Tokens) -> list[int]:
        by_text = {content: page for page, content in self.contents.items()}
        chain = []
        for end in range(SIZE, len(text) + 1, SIZE):
            if text[:end] not in by_text:
                break
            chain.append(by_text[text[:end]])
        return chain

    def touch(self, pages: Sequence[int]) -> None:
        for page in reversed(pages):
            self.clock += 1
            self.used[page] = self.clock

    @rule(asked=st.lists(st.tuples(texts, st.booleans(), st.integers(0, 5)), max_size=4))
    def match_all(self, asked: list[tuple[Tokens, bool, int]]) -> None:
        """Whether a text comes again as the same object makes no difference."""
        found = self.pool.match_all(
            [self.objects.setdefault(text, text) if again else (*text,) for text, again, _ in asked],
            [most for *_, most in asked],
        )
        assert [list(chain) for chain in found] == [
            self.expected_match(text)[:most] for text, _, most in asked
        ]

    @rule(target=held, text=texts, share=st.booleans(), more=st.integers(0, 3))
    def reserve(self, text: Tokens, share: bool, more: int) -> object:
        text = self.objects.setdefault(text, text)
        chain = self.pool.match_all([text], [len(text) // SIZE])[0] if share else ()
        assert not share or list(chain) == self.expected_match(text)
        whole = -(-len(text) // SIZE)
        own = whole - len(chain) + more
        cached = set(self.contents) - self.pinned()
        free = self.pool.total - len(self.pinned()) - len(cached) - sum(len(e.own) for e in self.live)
        available = free + len(cached - set(chain))
        evicted = max(0, own - free)
        oldest = sorted(cached - set(chain), key=self.used.__getitem__)[:evicted]
        before = (self.pool.counts(), dict(self.contents))
        self.freed = []
        reservation = self.pool.reserve(own, [chain])
        if own > available:
            assert reservation == Shortfall(own, available)
            assert (self.pool.counts(), self.contents) == before
            return multiple()
        assert isinstance(reservation, Reservation)
        assert self.freed == oldest
        taken = reservation.take(own)
        assert len(set(taken)) == own
        item = Held(reservation, text, chain, taken)
        self.live.append(item)
        return item

    @rule(item=consumes(held), whole=st.integers(0, 5), refill=st.booleans())
    def publish_and_release(self, item: Held, whole: int, refill: bool) -> None:
        pages = [*item.chain, *item.own][: min(whole, len(item.text) // SIZE)]
        self.live.remove(item)
        known = self.expected_match(item.text)
        chain, duplicates = [], []
        for index, page in enumerate(pages):
            if index < len(known):
                chain.append(known[index])
                if known[index] != page:
                    duplicates.append(page)
            else:
                chain.append(page)
                self.contents[page] = item.text[: (index + 1) * SIZE]
        self.freed = []
        published = item.reservation.publish(item.text, pages)
        assert published == len(set(pages) - set(item.chain))
        assert self.freed == duplicates
        self.touch([page for page in chain if page not in self.pinned() | set(item.chain)])
        if refill:
            assert self.pool.available >= published
            item.reservation.refill(published)
        item.reservation.release()
        self.touch([page for page in item.chain if page not in self.pinned()])
        item.reservation.release()

    @rule(item=held)
    def unpin(self, item: Held) -> None:
        """As a row that ends before its request."""
        if item in self.live:
            chain, item.chain = item.chain, ()
            item.reservation.unpin(0, 1)
            self.touch([page for page in chain if page not in self.pinned()])

    @rule(item=held)
    def pin_longer(self, item: Held) -> None:
        """As a row that finds more of its prefix resident when it starts."""
        chain = self.pool.match(item.text, len(item.text))
        if item in self.live and item.chain and len(chain) > len(item.chain):
            item.reservation.pin_longer(0, chain)
            item.chain = chain

    @rule(item=consumes(held), keep=st.integers(0, 3))
    def shrink_and_release(self, item: Held, keep: int) -> None:
        self.live.remove(item)
        item.reservation.give(item.own)
        item.reservation.shrink(keep)
        assert len(item.reservation.owned) == min(keep, len(item.own))
        item.reservation.release()
        self.touch([page for page in item.chain if page not in self.pinned()])

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        counts = self.pool.counts()
        own = [page for each in self.live for page in each.own]
        assert len(own) == len(set(own)), "a page has two owners"
        assert not set(own) & set(self.contents), "a page that is written is published"
        assert counts.held == len(own) + len(self.pinned())
        assert counts.cached == len(set(self.contents) - self.pinned())
        assert counts.free + counts.held + counts.cached == counts.total == self.pool.total

    def teardown(self) -> None:
        for each in getattr(self, "live", []).copy():
            self.live.remove(each)
            each.reservation.release()
        if hasattr(self, "pool"):
            self.pool.check()
            assert self.pool.counts().held == 0


PoolMachine.TestCase.settings = settings(
    max_examples=80,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestPool = PoolMachine.TestCase


def chain_of(pool: PagePool, text: Tokens) -> tuple[int, ...]:
    """Publishes the whole pages of a text."""
    reservation = pool.reserve(len(text) // SIZE)
    assert isinstance(reservation, Reservation)
    pages = tuple(reservation.take(len(text) // SIZE))
    reservation.publish(text, pages)
    reservation.release()
    return pages


def test_a_match_compares_the_tokens_themselves() -> None:
    pool = PagePool(8, SIZE)
    pages = chain_of(pool, (1,) * 8)
    assert pool.match((1,) * 11, 10) == pages
    assert pool.match((1,) * 11, 1) == pages[:1]
    assert pool.match((1,) * 7, 10) == pages[:1]
    assert pool.match((2, *(1,) * 7), 10) == ()
    assert pool.match((1, 1, 1, 1, 2, 1, 1, 1), 10) == pages[:1]


def test_a_page_is_found_under_the_page_before_it_only() -> None:
    pool = PagePool(8, SIZE)
    chain_of(pool, (1,) * 4 + (2,) * 4)
    assert pool.match((3,) * 4 + (2,) * 4, 10) == ()
    assert pool.match((2,) * 4, 10) == ()


def test_a_text_is_not_found_any_more_once_a_page_of_it_is_evicted() -> None:
    pool, text = PagePool(6, SIZE), (1,) * 12
    pages = chain_of(pool, text)
    assert pool.match_all([text, text], [3, 2]) == [pages, pages[:2]]
    others = pool.reserve(4)
    assert isinstance(others, Reservation)
    others.release()
    assert pool.match_all([text, text], [3, 2]) == [pages[:2], pages[:2]]
    again = chain_of(pool, text)
    assert again[:2] != pages[:2]
    assert pool.match_all([text, text], [3, 2]) == [pages[:2] + again[2:], pages[:2]]
    assert isinstance(pool.reserve(6), Reservation)
    assert pool.match_all([text, text], [3, 2]) == [(), ()]


def test_a_run_that_many_hold_is_split_where_another_pin_ends() -> None:
    pool = PagePool(5, SIZE)
    chain = chain_of(pool, (1,) * 12)
    held = [pool.reserve(0, [each]) for each in (chain, chain, chain[:1], chain[:2])]
    pool.check()
    for reservation in held:
        assert isinstance(reservation, Reservation)
        reservation.release()
        pool.check()
    assert pool.counts().cached == 3
    gone: list[int] = []
    pool._on_free = gone.extend
    assert isinstance(pool.reserve(4), Reservation)
    assert gone == [chain[2], chain[1]]


def test_least_recently_used_pages_go_first_and_leaves_before_what_they_follow() -> None:
    pool = PagePool(6, SIZE)
    first = chain_of(pool, (1,) * 12)
    second = chain_of(pool, (2,) * 12)
    pool.reserve(0, [first]).release()  # type: ignore[union-attr]
    gone: list[int] = []
    pool._on_free = gone.extend
    assert isinstance(pool.reserve(4), Reservation)
    assert gone == [second[2], second[1], second[0], first[2]]


def test_a_pinned_prefix_is_not_evicted_and_a_shortfall_says_by_how_much() -> None:
    pool = PagePool(4, SIZE)
    chain = chain_of(pool, (1,) * 12)
    held = pool.reserve(1, [chain])
    assert isinstance(held, Reservation)
    assert pool.reserve(1) == Shortfall(1, 0)
    held.release()
    assert pool.reserve(2, [chain]) == Shortfall(2, 1)
    assert pool.reserve(5) == Shortfall(5, 4)


def test_thousands_of_random_operations_add_up() -> None:
    """A larger pool than the state machine's, for long: every step checked."""
    rng = random.Random(7)
    pool = PagePool(64, SIZE)
    live: list[tuple[Reservation, Tokens, list[int]]] = []
    for _ in range(4_000):
        if live and rng.random() < 0.5:
            reservation, text, pages = live.pop(rng.randrange(len(live)))
            if rng.random() < 0.7:
                reservation.publish(text, pages[: len(text) // SIZE])
            reservation.release()
        else:
            text = tuple(rng.choice((1, 2, 3)) for _ in range(rng.randrange(1, 4)) for _ in range(SIZE))
            chain = pool.match(text, rng.randrange(4))
            own = len(text) // SIZE - len(chain)
            reserved = pool.reserve(own, [chain])
            if isinstance(reserved, Reservation):
                live.append((reserved, text, [*chain, *reserved.take(own)]))
            else:
                assert reserved.free == pool.available_beside([chain]) < own
        pool.check()


def test_a_row_cannot_take_more_than_is_spare() -> None:
    pool = PagePool(4, SIZE)
    held = pool.reserve(2)
    assert isinstance(held, Reservation)
    with pytest.raises(EngineFault, match="needs 3 pages"):
        held.take(3)


def own_twice(pool: PagePool, own: int, chain: tuple[int, ...]) -> None:
    other = pool.reserve(0)
    assert isinstance(other, Reservation)
    other.owned.add(own)


def swap_ages(pool: PagePool, own: int, chain: tuple[int, ...]) -> None:
    next(iter(pool._reservations)).release()
    pool.tree._unheld.move_to_end(node(pool, chain[1]))


def node(pool: PagePool, page: int) -> Node:
    return pool.tree.node_of[page]


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool, own, chain: pool._free.append(own),
        lambda pool, own, chain: pool._free.append(pool._free[0]),
        lambda pool, own, chain: pool._free.pop(),
        lambda pool, own, chain: setattr(node(pool, chain[0]), "holds", 2),
        lambda pool, own, chain: setattr(node(pool, chain[1]), "holds", 0),
        lambda pool, own, chain: setattr(node(pool, chain[1]), "chain", chain[1:]),
        lambda pool, own, chain: setattr(node(pool, chain[1]), "text", (2,) * SIZE),
        lambda pool, own, chain: setattr(node(pool, chain[1]), "text", (1,)),
        lambda pool, own, chain: setattr(node(pool, chain[1]), "pages", ()),
        lambda pool, own, chain: setattr(node(pool, chain[1]), "parent", None),
        lambda pool, own, chain: next(iter(pool._reservations)).chains.clear(),
        lambda pool, own, chain: next(iter(pool._reservations)).chains.append(chain),
        lambda pool, own, chain: next(iter(pool._reservations)).chains.append((own,)),
        lambda pool, own, chain: pool.tree._objects.add((2,) * 8, node(pool, chain[1])),
        lambda pool, own, chain: pool.tree._objects.add((1,) * 4, node(pool, chain[1])),
        lambda pool, own, chain: pool.tree._unheld.__setitem__(node(pool, chain[0]), None),
        lambda pool, own, chain: pool.tree._unheld.__setitem__(Node(None, (own,), (1,) * SIZE, ()), None),
        lambda pool, own, chain: pool.tree._root.clear(),
        lambda pool, own, chain: pool.tree.node_of.__setitem__(own, node(pool, chain[0])),
        lambda pool, own, chain: setattr(pool.tree, "evictable", 1),
        own_twice,
        swap_ages,
    ],
)
def test_check_finds_damage(damage: Callable[[PagePool, int, tuple[int, ...]], None]) -> None:
    pool = PagePool(8, SIZE)
    chain_of(pool, (1,) * 4)
    chain_of(pool, (1,) * 8)
    chain = pool.match((1,) * 8, 2)
    held = pool.reserve(2, [chain])
    assert isinstance(held, Reservation)
    pool.check()
    damage(pool, min(held.owned), chain)
    with pytest.raises(EngineFault):
        pool.check()


def test_of_a_chain_that_ends_inside_what_is_held_no_more_is_held_than_it_has() -> None:
    pool, text = PagePool(8, SIZE), (1,) * 12
    pages = chain_of(pool, text)
    holder = pool.reserve(0, (pages,))
    assert isinstance(holder, Reservation)
    assert [pool.held_part(pages[:count]) for count in range(4)] == [0, 1, 2, 3]
    pool.check()
    holder.release()
    assert pool.held_part(pages[:2]) == 0


def test_a_text_that_ends_inside_another_is_found_as_far_as_it_goes_however_often_it_is_asked_for() -> None:
    pool, text, shorter = PagePool(8, SIZE), (1,) * 12, (1,) * 8
    pages = chain_of(pool, text)
    for _ in range(3):
        assert pool.match_all([shorter, text], [2, 3]) == [pages[:2], pages]
        pool.check()
