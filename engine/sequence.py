"""A sequence's state as integers, and the terminal state of a request, claimed once."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from engine.batch import StepRow
from engine.errors import EngineFault
from engine.request import Outcome


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
