"""A sequence's state as integers, and the terminal state of a request, claimed once."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from operator import sub

from engine.batch import StepBlock, StepRow
from engine.errors import EngineFault
from engine.pages import Pages
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


@dataclass(slots=True)
class Row:
    """A row of a group: it needs `own` pages behind `chain`, which is pinned."""

    index: int  # in its group
    prefix: Tokens
    own: int
    chain: Pages
    pages: list[int] = field(default_factory=list)  # its own, once it has started


class RowBlock:
    """Rows of a group that have their pages and run whole, each in one step.

    `suffix` (int32) comes after each row's prefix; what of the prefix is in `chain` is computed.
    """

    __slots__ = ("ends", "launched", "rows", "suffix")

    decoding = False

    def __init__(self, rows: list[Row], suffix: array[int], page_tokens: int) -> None:
        self.rows = rows
        self.suffix = suffix
        self.launched = 0
        added = len(suffix)
        new = [len(row.prefix) - len(row.chain) * page_tokens + added for row in rows]
        self.ends = list(accumulate(new))  # tokens that the rows up to this one compute

    @property
    def pending(self) -> int:
        """Tokens that the next step may compute; none while a step is in flight."""
        return 0 if self.launched else self.ends[-1]

    def fit(self, tokens: int, rows: int) -> tuple[int, int]:
        """(tokens, rows) that it takes of a step with room for so many: whole rows alone."""
        count = min(bisect_right(self.ends, tokens), rows)
        return (self.ends[count - 1], count) if count else (0, 0)

    def cut(self, rows: int, page_tokens: int) -> RowBlock | None:
        """Keeps the first `rows`; the others, None where there are none."""
        rest = self.rows[rows:]
        if not rest:
            return None
        del self.rows[rows:], self.ends[rows:]
        return RowBlock(rest, self.suffix, page_tokens)

    def launch(self, page_tokens: int) -> StepBlock:
        """Marks all of it as in flight."""
        if self.launched:
            raise EngineFault("rows launched that are in flight")
        self.launched = self.ends[-1]
        tokens, pages = array("i"), array("i")
        starts, page_counts = array("i"), array("i")
        for row in self.rows:
            start = len(row.chain) * page_tokens
            if start < len(row.prefix):
                tokens.extend(row.prefix[start:])
            tokens += self.suffix
            starts.append(start)
            pages.extend(row.chain)
            pages.extend(row.pages)
            page_counts.append(len(row.chain) + len(row.pages))
        ends = self.ends
        counts = array("i", map(sub, ends, [0, *ends[:-1]]))
        return StepBlock(tokens, counts, starts, pages, page_counts)

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
