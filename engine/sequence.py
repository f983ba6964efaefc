"""A sequence's state as integers, and the terminal state of a request, claimed once."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from operator import add, sub

from engine.batch import StepBlock, StepRow
from engine.errors import EngineFault
from engine.prefix_tree import Pages
from engine.request import Outcome, Tokens


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens whose keys and values fill `pages` one after the other.

    0 <= cached <= computed <= known <= limit: `cached` tokens were resident when it began, `computed`
    are in pages, `known` are tokens that exist (the prompt and what was generated), `limit` is what
    the pages were reserved for. The last token generated is never computed, so it is not counted in
    `limit`.
    """

    tokens: array[int]  # int32, those after the cached ones
    prompt: int
    limit: int
    pages: tuple[int, ...]
    computed: int = 0
    launched: int = 0  # tokens of the step in flight; nothing else runs meanwhile
    cached: int = 0
    known: int = field(init=False)

    def __post_init__(self) -> None:
        self.known = min(self.cached + len(self.tokens), self.limit)

    @property
    def pending(self) -> int:
        """Tokens that the next step may compute; none while a step is in flight."""
        if self.launched:
            return 0
        return self.known - self.computed

    @property
    def decoding(self) -> bool:
        return self.computed >= self.prompt

    def fit(self, tokens: int, rows: int) -> tuple[int, int]:
        """(tokens, rows) that it takes of a step with room for so many."""
        return (min(tokens, self.pending), 1) if rows else (0, 0)

    def launch(self, count: int) -> StepRow:
        """Marks the next `count` tokens as in flight."""
        if not 0 < count <= self.pending:
            raise EngineFault(f"{count} tokens launched of a sequence with {self.pending} pending")
        self.launched = count
        start, tokens = self.computed, self.tokens
        if count < len(tokens):
            tokens = tokens[start - self.cached : start - self.cached + count]
        return StepRow(tokens, start, self.pages, start + count >= self.prompt)

    def append(self, token: int) -> None:
        """A generated token; one beyond `limit` is the last and is never computed."""
        self.tokens.append(token)
        self.known = min(self.cached + len(self.tokens), self.limit)

    def collect(self) -> None:
        self.computed += self.launched
        self.launched = 0


class RowBlock:
    """Consecutive rows of a group that have their pages and run whole, each in one step.

    Row i of them is row `first + i` of the group: its prefix, of which what is in its chain is computed
    already, then the suffix. Its own pages are the next `own[i]` of `pages`. What rows have stands in lists
    side by side, so that the host's work on a block is a few operations on whole lists.
    """

    __slots__ = ("chains", "ends", "first", "launched", "own", "pages", "prefixes", "suffix")

    decoding = False

    def __init__(
        self,
        first: int,
        prefixes: Ordered[Tokens],
        chains: list[Pages],
        own: list[int],
        pages: list[int],
        suffix: array[int],
        ends: list[int],
    ) -> None:
        """`ends[i]` is how many tokens the rows up to row i compute together."""
        self.first = first
        self.prefixes = prefixes
        self.chains = chains
        self.own = own
        self.pages = pages
        self.suffix = suffix
        self.ends = ends
        self.launched = 0

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def pending(self) -> int:
        """Tokens that the next step may compute; none while a step is in flight."""
        return 0 if self.launched else self.ends[-1]

    def fit(self, tokens: int, rows: int) -> tuple[int, int]:
        """(tokens, rows) that it takes of a step with room for so many: whole rows alone."""
        count = min(bisect_right(self.ends, tokens), rows)
        return (self.ends[count - 1], count) if count else (0, 0)

    def cut(self, rows: int) -> RowBlock | None:
        """Keeps the first `rows`; the others, None where there are none."""
        if rows >= len(self):
            return None
        computed, taken = self.ends[rows - 1], sum(self.own[:rows])
        rest = RowBlock(
            self.first + rows,
            self.prefixes[rows:],
            self.chains[rows:],
            self.own[rows:],
            self.pages[taken:],
            self.suffix,
            [end - computed for end in self.ends[rows:]],
        )
        self.prefixes, self.chains = self.prefixes[:rows], self.chains[:rows]
        del self.own[rows:], self.pages[taken:], self.ends[rows:]
        return rest

    def launch(self, page_tokens: int) -> StepBlock:
        """Marks all of it as in flight."""
        if self.launched:
            raise EngineFault("rows launched that are in flight")
        self.launched = self.ends[-1]
        resident = list(map(len, self.chains))
        starts = array("i", [pages * page_tokens for pages in resident])
        counts = array("i", map(sub, self.ends, [0, *self.ends]))
        return StepBlock(
            self._tokens(starts), counts, starts, self._pages(), array("i", map(add, resident, self.own))
        )

    def _tokens(self, starts: array[int]) -> array[int]:
        """[tokens] that the rows compute."""
        if self.ends[-1] == len(self) * len(self.suffix):
            return self.suffix * len(self)
        tokens: list[int] = []  # an array takes in a list several times faster than tuples
        suffix = self.suffix.tolist()
        for prefix, start in zip(self.prefixes, starts, strict=True):
            tokens += prefix[start:] if start else prefix
            tokens += suffix
        return array("i", tokens)

    def _pages(self) -> array[int]:
        """The pages of each row, those of its chain first."""
        pages: list[int] = []
        at = 0
        for chain, own in zip(self.chains, self.own, strict=True):
            pages += chain
            pages += self.pages[at : at + own]
            at += own
        return array("i", pages)

    def collect(self) -> None:
        self.launched = 0


@dataclass(slots=True)
class TerminalState:
    """The one outcome of a request: an answer, a cancel and a deadline may all come; the first counts."""

    outcome: Outcome | None = field(default=None)

    @property
    def ended(self) -> bool:
        return self.outcome is not None

    def claim(self, outcome: Outcome) -> bool:
        """Whether `outcome` is the outcome. False where the request had ended already."""
        if self.outcome is not None:
            return False
        self.outcome = outcome
        return True
