"""The radix tree of prefixes against a table of them, one entry a page, and one order of those not held."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.prefix_tree import Pages, PrefixTree
from engine.request import Tokens

SIZE, TOTAL = 2, 24
# Few first pages and few tokens, so that texts branch inside and between runs, and end inside them.
texts = st.lists(st.sampled_from((1, 2)), max_size=6 * SIZE + 1).map(tuple)
ends = st.integers(0, 7)


class Table:
    """Each prefix of whole pages: its page, and how many pinned chains go through it."""

    def __init__(self) -> None:
        self.page_of: dict[Tokens, int] = {}
        self.pins: dict[Tokens, int] = {}
        self.unheld: list[Tokens] = []  # least recently used first

    def match(self, tokens: Tokens, most: int) -> list[Tokens]:
        found: list[Tokens] = []
        while len(found) < most and len(found) < len(tokens) // SIZE:
            prefix = tokens[: (len(found) + 1) * SIZE]
            if prefix not in self.page_of:
                break
            found.append(prefix)
        return found

    def use(self, prefixes: list[Tokens]) -> None:
        """Their last comes before those it follows."""
        for prefix in reversed(prefixes):
            if not self.pins[prefix]:
                self.unheld.remove(prefix)
                self.unheld.append(prefix)

    def pin(self, prefixes: list[Tokens]) -> None:
        for prefix in prefixes:
            if not self.pins[prefix]:
                self.unheld.remove(prefix)
            self.pins[prefix] += 1

    def unpin(self, prefixes: list[Tokens]) -> None:
        for prefix in reversed(prefixes):
            self.pins[prefix] -= 1
            if not self.pins[prefix]:
                self.unheld.append(prefix)

    def publish(self, tokens: Tokens, pages: list[int]) -> tuple[list[int], list[int]]:
        prefixes = [tokens[: (at + 1) * SIZE] for at in range(len(pages))]
        new, duplicates = [], []
        for prefix, page in zip(prefixes, pages, strict=True):
            if prefix not in self.page_of:
                self.page_of[prefix], self.pins[prefix] = page, 0
                self.unheld.append(prefix)
                new.append(page)
            elif self.page_of[prefix] != page:
                duplicates.append(page)
        self.use(prefixes)
        return new, duplicates

    def evict(self, count: int) -> list[int]:
        gone, self.unheld = self.unheld[:count], self.unheld[count:]
        for prefix in gone:
            del self.pins[prefix]
        return [self.page_of.pop(prefix) for prefix in gone]


class TreeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tree, self.table = PrefixTree(SIZE), Table()
        self.free = list(range(TOTAL))
        self.pinned: list[tuple[Pages, list[Tokens]]] = []
        self.known: list[Tokens] = []  # the same objects come again

    def chain(self, prefixes: list[Tokens]) -> Pages:
        return tuple(self.table.page_of[prefix] for prefix in prefixes)

    @rule(text=texts, resident=ends, end=ends)
    def publish(self, text: Tokens, resident: int, end: int) -> None:
        """Pages of its own behind some of those that are there: others may have come meanwhile."""
        before = self.chain(self.table.match(text, resident))
        whole = max(len(before), min(end, len(text) // SIZE))
        own = whole - len(before)
        if own > len(self.free):
            return
        pages = [*before, *[self.free.pop() for _ in range(own)]]
        wanted = self.table.publish(text, pages)
        version = self.tree.version
        new, duplicates = self.tree.publish(text, pages)
        assert (list(new), duplicates) == wanted
        assert not new or self.tree.version != version
        self.free += duplicates
        self.known.append(text)

    @rule(text=texts, most=ends)
    def match(self, text: Tokens, most: int) -> None:
        prefixes = self.table.match(text, most)
        assert self.tree.match(text, most) == self.chain(prefixes)
        held = [prefix for prefix in prefixes if self.table.pins[prefix]]
        assert self.tree.held_part(self.chain(prefixes)) == len(held)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def match_all(self, data: st.DataObject) -> None:
        some = data.draw(st.lists(st.sampled_from(self.known), max_size=5))
        most = [data.draw(st.integers(0, len(text) // SIZE)) for text in some]
        wanted = [self.chain(self.table.match(*each)) for each in zip(some, most, strict=True)]
        assert self.tree.match_all(some, most) == wanted

    @rule(text=texts, most=ends)
    def pin(self, text: Tokens, most: int) -> None:
        prefixes = self.table.match(text, most)
        chain = self.tree.match(text, most)
        self.tree.pin([chain])
        self.table.pin(prefixes)
        self.pinned.append((chain, prefixes))

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        chain, prefixes = self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))
        self.tree.unpin([chain])
        self.table.unpin(prefixes)

    @rule(count=ends)
    def evict(self, count: int) -> None:
        count = min(count, self.tree.evictable)
        version = self.tree.version
        gone = self.tree.evict(count)
        assert gone == self.table.evict(count)
        assert not gone or self.tree.version != version
        self.free += gone

    @invariant()
    def is_consistent(self) -> None:
        ends_at = [0] * TOTAL
        for chain, _ in self.pinned:
            if chain:
                ends_at[chain[-1]] += 1
        self.tree.check(ends_at)
        assert self.tree.evictable == len(self.table.unheld)
        assert set(self.tree.node_of) == set(self.table.page_of.values())


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
