"""What runs in a step. Pure: the same lanes and limits give the same plan.

All decoding rows come first, one token each. What is left of the step's tokens goes to prompts,
the request with least left first. On a card none gets more than its share while others wait, and what
nobody else wants is given out once more in the same order. A request that was not served for `patience` steps
goes before all that were, so a stream of short ones cannot hold a long one for ever, and a long
one never fills a step that short ones wait for.

Where a full step takes as long as a short request (`StepLimits.for_slow_steps`), who comes while one runs
waits for all of it. There a request that is short takes what it needs, and longer ones, beyond their
share, bring a step to no more than a part of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import NamedTuple

from engine.sequence import RowBlock, Sequence


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Most new tokens and most rows of a step; the 1 / `share` of the tokens that one request may
    take while others wait; steps without service after which a request comes first.

    A request with no more than `short` tokens left is not held to its share. Others, beyond their share, are
    given more only as long as the step has fewer than `fill` tokens; None: all of it.
    """

    tokens: int
    rows: int
    share: int = 4
    patience: int = 4
    short: int = 0
    fill: int | None = None

    @classmethod
    def for_slow_steps(cls, tokens: int, rows: int) -> StepLimits:
        """Where a full step takes about as long as a short request, as on a CPU."""
        return cls(tokens, rows, share=8, short=tokens, fill=max(1, tokens * 3 // 8))

    @property
    def share_tokens(self) -> int:
        """What a request that is not short may take of a step while others wait."""
        return max(1, self.tokens // self.share)

    def most_of(self, left: int) -> int:
        """What a request with `left` tokens left may take of a step while others wait."""
        return self.tokens if left <= self.short else self.share_tokens


class Lane(NamedTuple):
    """One request: its sequences in the order they are to run, and what ranks it.

    `key` is unique. Sequences in flight have nothing pending and may be left out.
    """

    key: int
    sequences: Ordered[Sequence | RowBlock]
    left: int  # tokens of the whole request still to compute
    unserved: int  # steps since it last ran


@dataclass(slots=True)
class Slice:
    """The next `tokens`, in so many rows, of a sequence or block of the request `key`. Grows while its
    step is planned."""

    key: int
    sequence: Sequence | RowBlock
    tokens: int
    rows: int = 1


@dataclass(frozen=True, slots=True)
class StepPlan:
    slices: tuple[Slice, ...]

    @property
    def tokens(self) -> int:
        return sum(each.tokens for each in self.slices)


def plan_step(lanes: Ordered[Lane], limits: StepLimits) -> StepPlan:
    """The slices of the next step; none where nothing is pending.

    `lanes` are in the order of their admission, which decides between equal ones: by arrival, a caller whose
    many requests have waited for long would go before those that were admitted in their turn.
    """
    step = _Step(limits)
    decoding, prompts = [], []
    for lane in lanes:
        kinds = {each.decoding for each in lane.sequences if each.pending}
        if True in kinds:
            decoding.append(lane)
        if False in kinds:
            prompts.append(lane)
    for lane in sorted(decoding, key=lambda lane: -lane.unserved):
        for sequence in lane.sequences:
            if sequence.decoding and sequence.pending:
                step.add(lane.key, sequence, 1)
    prompts.sort(key=lambda lane: preference(lane.left, lane.unserved, limits.patience))
    for lane in prompts:
        step.add_prompts(lane, limits.most_of(lane.left))
    for lane in prompts:
        step.add_prompts(lane, limits.tokens if lane.left <= limits.short else step.left_of(limits.fill))
    return step.plan()


def preference(left: int, unserved: int, patience: int) -> tuple[int, int]:
    """Sorts requests with prompts to compute: the least comes first."""
    return (0, -unserved) if unserved >= patience else (1, left)


class _Step:
    """A step as it fills up."""

    def __init__(self, limits: StepLimits) -> None:
        self._most = self._tokens = limits.tokens
        self._rows = limits.rows
        self._given: dict[Sequence | RowBlock, Slice] = {}

    def left_of(self, fill: int | None) -> int:
        """Tokens until the step has `fill` of them, or is full where it is None."""
        return self._tokens if fill is None else fill - (self._most - self._tokens)

    def add(self, key: int, sequence: Sequence | RowBlock, most: int) -> int:
        """Up to `most` more tokens of a sequence or block; how many there was room for."""
        part = self._given.get(sequence)
        had, had_rows = (part.tokens, part.rows) if part else (0, 0)
        tokens, rows = sequence.fit(had + min(most, self._tokens), had_rows + self._rows)
        if tokens <= had:
            return 0
        if part is None:
            self._given[sequence] = Slice(key, sequence, tokens, rows)
        else:
            part.tokens, part.rows = tokens, rows
        self._rows -= rows - had_rows
        self._tokens -= tokens - had
        return tokens - had

    def add_prompts(self, lane: Lane, most: int) -> None:
        for sequence in lane.sequences:
            if most <= 0 or self._tokens <= 0:
                return
            if not sequence.decoding:
                most -= self.add(lane.key, sequence, most)

    def plan(self) -> StepPlan:
        return StepPlan(tuple(self._given.values()))
