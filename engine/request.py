"""What can be asked of the engine, and what comes back.

Requests are frozen values over token ids: the engine knows nothing of text. Every request ends in
exactly one `Outcome`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.errors import Refusal

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Embed:
    """The final-norm hidden state at the last of `tokens`, scaled to unit length.

    `keep` leading tokens' whole pages stay cached afterwards (0: none), so that later requests
    that begin with the same tokens reuse them.
    """

    tokens: Tokens
    keep: int = 0


@dataclass(frozen=True, slots=True)
class Score:
    """One probability a row, of `positive` against `negative` after `prefix + suffix`.

    p = 1 / (1 + exp(logit[negative] - logit[positive])) at the last position. Rows are independent
    of each other; the group is admitted as a whole and streams through a window of rows. Whole
    pages of the prefixes stay cached. `window` bounds the rows at once (None: as many as fit).
    """

    prefixes: tuple[Tokens, ...]
    suffix: Tokens
    positive: int
    negative: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Rank:
    """Embed `query`, let the caller choose prefixes by the vector, score them: one admission.

    Before the choice the engine knows only the bounds, so it reserves for one prefix of `prefix_tokens`,
    which is enough for any of them in its turn; once they are supplied (`RequestHandle.supply`) the
    reservation shrinks to what they need, or grows to what is worth having and free then. The answer is
    a `Scored`.
    """

    query: Tokens
    rows: int
    prefix_tokens: int
    suffix: Tokens
    positive: int
    negative: int
    window: int | None = None


class Constraint(Protocol):
    """Restricts the next token. Stateless: it is given all the output so far."""

    def allowed(self, output: Sequence[int]) -> Sequence[int] | None:
        """Token ids that may follow, None where any may. Never empty."""
        ...


@dataclass(frozen=True, slots=True)
class Generate:
    """Up to `max_tokens` tokens after `tokens`; ends early at one of `stop` (not returned).

    Greedy at `temperature` 0; else sampled from softmax(logits / temperature) with a generator
    seeded by `seed`, so that the output depends neither on batch nor on arrival.
    """

    tokens: Tokens
    max_tokens: int
    stop: frozenset[int] = frozenset()
    temperature: float = 0.0
    seed: int = 0
    constraint: Constraint | None = None
    keep: int = 0


Request = Embed | Score | Rank | Generate


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost. `pages` is the most it held at once, shared pages included."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    pages: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds from its arrival to its admission and, after it, running."""

    queue_ms: float = 0.0
    run_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Embedded:
    vector: tuple[float, ...]
    usage: Usage = field(default_factory=Usage)
    timing: Timing = field(default_factory=Timing)


@dataclass(frozen=True, slots=True)
class Scored:
    """`probabilities[i]` belongs to `prefixes[i]`."""

    probabilities: tuple[float, ...]
    usage: Usage = field(default_factory=Usage)
    timing: Timing = field(default_factory=Timing)


@dataclass(frozen=True, slots=True)
class Generated:
    tokens: Tokens
    usage: Usage = field(default_factory=Usage)
    timing: Timing = field(default_factory=Timing)


@dataclass(frozen=True, slots=True)
class Failed:
    """A fault of ours. `code` is stable, `message` one sentence."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The caller took the request back before it ended."""


Answer = Embedded | Scored | Generated
Outcome = Answer | Refusal | Failed | Cancelled
