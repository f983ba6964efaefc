"""Groups as padded token blocks of a fixed layout, so that every step has the same shapes.

A step's T tokens are rows in blocks of one length each. Rows are of three kinds: a tool and a request
(prefix + suffix: scored, and the tool's vector falls out of it), a tool alone, a request alone. Padding
stands after a row's own tokens, where causal attention cannot see it from them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from mcp_discovery.discovery.prompts import MAX_QUERY_TOKENS, Prompts
from mcp_discovery.training.corpus import Corpus
from mcp_discovery.training.groups import Group, GroupSampler

LENGTH_STEP = 16
Tokens = tuple[int, ...]


class Block(NamedTuple):
    """`rows` rows of `length` tokens each, one after the other from token `start` on."""

    start: int
    rows: int
    length: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Blocks in order of length, T tokens in all."""

    blocks: tuple[Block, ...]

    @property
    def tokens(self) -> int:
        last = self.blocks[-1]
        return last.start + last.rows * last.length

    def positions(self) -> Tensor:
        """int64 [T]: each token's place in its row."""
        return torch.cat([torch.arange(length).repeat(rows) for _, rows, length in self.blocks])

    @classmethod
    def of(cls, counts: Sequence[tuple[int, int]]) -> Layout:
        """From (rows, length) of each block, shortest first; empty ones are left out."""
        blocks: list[Block] = []
        start = 0
        for rows, length in counts:
            if rows:
                blocks.append(Block(start, rows, length))
                start += rows * length
        return cls(tuple(blocks))

    @classmethod
    def fit(
        cls, steps: Sequence[Sequence[int]], longest: int, blocks: int = 8, share: float = 0.55
    ) -> Layout:
        """A layout that holds all rows of about `share` of the steps with little padding.

        steps: the row lengths of some steps; longest: the longest row there can be. A row that
        finds the block of its length full goes to a longer one.
        """
        units = [-(-np.asarray(lengths) // LENGTH_STEP) for lengths in steps]
        histogram = np.bincount(np.concatenate(units), minlength=-(-longest // LENGTH_STEP) + 1)
        chosen = _cheapest_lengths(histogram, blocks)
        needed = [
            int(np.ceil(np.quantile([int((rows > below).sum()) for rows in units], share)))
            for below in (0, *chosen[:-1])
        ]
        needed = [max(count, 1) for count in needed] + [0]
        return cls.of([(needed[i] - needed[i + 1], chosen[i] * LENGTH_STEP) for i in range(len(chosen))])


def _cheapest_lengths(histogram: NDArray[np.intp], most: int) -> list[int]:
    """At most `most` lengths, the last the longest, with the fewest tokens when rows are padded up to them.

    histogram[n] rows have n units. Dynamic programming over the longest length chosen so far.
    """
    top = len(histogram) - 1
    rows_up_to = np.cumsum(histogram)
    best: dict[int, tuple[int, list[int]]] = {0: (0, [])}
    for _ in range(most):
        extended = dict(best)
        for last, (cost, chosen) in best.items():
            for length in range(last + 1, top + 1):
                total = cost + length * int(rows_up_to[length] - rows_up_to[last])
                if length not in extended or total < extended[length][0]:
                    extended[length] = (total, [*chosen, length])
        best = extended
    return best[top][1]


class Batch(NamedTuple):
    """One step. G groups of C tools, P pairs of two, N = G C + 2 P tools, Q = G + P requests."""

    tokens: Tensor  # int64 [T]
    answers: Tensor  # int64 [G, C]: the token whose state tells yes from no
    tools: Tensor  # int64 [N]: the last token of each tool's prefix
    requests: Tensor  # int64 [Q]: the last token of each request alone
    score_right: Tensor  # bool [G, C]
    score_wrong: Tensor  # bool [G, C]
    score_sure: Tensor  # bool [G, C]: the wrong ones that certainly do not serve
    match_right: Tensor  # bool [Q, N]
    match_wrong: Tensor  # bool [Q, N]
    filled: Tensor  # int64 []: tokens that are not padding


@dataclass(frozen=True, slots=True)
class BatchSize:
    """What a step holds: scored groups of `candidates` tools, and pairs for the vectors alone."""

    groups: int = 28
    candidates: int = 8
    pairs: int = 40


@dataclass(frozen=True, slots=True)
class _Rows:
    """A group in tokens."""

    group: Group
    request: Tokens
    prefixes: tuple[Tokens, ...]
    suffix: Tokens  # empty for a pair

    @property
    def lengths(self) -> list[int]:
        return [len(self.request), *(len(prefix) + len(self.suffix) for prefix in self.prefixes)]


class StepBatches(Dataset[Batch]):
    """Item s is the batch of step s: a function of the seed, s and the mined answers of the corpus."""

    def __init__(
        self,
        corpus: Corpus,
        sampler: GroupSampler,
        prompts: Prompts,
        size: BatchSize,
        seed: int,
        layout: Layout | None = None,
    ) -> None:
        self._corpus, self._sampler, self._prompts, self._size, self._seed = (
            corpus,
            sampler,
            prompts,
            size,
            seed,
        )
        self.layout = layout or self._fit()

    def __getitem__(self, step: int) -> Batch:
        rng = random.Random(f"{self._seed}/{step}")
        packer = _Packer(self.layout)
        groups = self._packed(packer, rng, self._size.groups, self._size.candidates, scored=True)
        pairs = self._packed(packer, rng, self._size.pairs, 2, scored=False)
        return _batch(self._size, packer, groups, pairs)

    def _packed(
        self, packer: _Packer, rng: random.Random, count: int, size: int, *, scored: bool
    ) -> list[tuple[_Rows, list[int]]]:
        """Up to `count` groups with the places of their rows; a group that does not fit is drawn anew."""
        placed: list[tuple[_Rows, list[int]]] = []
        for _ in range(count + 8):
            if len(placed) == count:
                break
            rows = self._rows(rng, size, scored=scored)
            places = packer.place(rows.lengths)
            if places is not None:
                packer.write(rows, places)
                placed.append((rows, places))
        return placed

    def _rows(self, rng: random.Random, size: int, *, scored: bool) -> _Rows:
        group = self._sampler.draw(rng, size, answered=not scored)
        query = self._prompts.cut(group.text)
        prefixes = tuple(self._prompts.prefix(tool) for tool in group.tools)
        return _Rows(
            group, self._prompts.query(query), prefixes, self._prompts.suffix(query) if scored else ()
        )

    def _fit(self, steps: int = 24) -> Layout:
        rng = random.Random(f"{self._seed}/layout")
        sizes = [(self._size.candidates, True)] * self._size.groups + [(2, False)] * self._size.pairs
        lengths = [
            [n for size, scored in sizes for n in self._rows(rng, size, scored=scored).lengths]
            for _ in range(steps)
        ]
        frame = len(self._prompts.suffix(self._prompts.cut("")))
        longest = self._prompts.max_prefix_tokens + frame + MAX_QUERY_TOKENS
        return Layout.fit(lengths, longest)


class _Packer:
    """Fills the blocks of a layout, row by row."""

    def __init__(self, layout: Layout) -> None:
        self._blocks = layout.blocks
        self._used = [0] * len(layout.blocks)
        self.tokens = np.zeros(layout.tokens, dtype=np.int64)
        self.filled = 0

    def place(self, lengths: Sequence[int]) -> list[int] | None:
        """A first token for each row, or None, with nothing taken, where they do not all fit."""
        used = list(self._used)
        places = []
        for length in lengths:
            for at, block in enumerate(self._blocks):
                if block.length >= length and used[at] < block.rows:
                    places.append(block.start + used[at] * block.length)
                    used[at] += 1
                    break
            else:
                return None
        self._used = used
        return places

    def write(self, rows: _Rows, places: Sequence[int]) -> None:
        whole = (rows.request, *(prefix + rows.suffix for prefix in rows.prefixes))
        for tokens, place in zip(whole, places, strict=True):
            self.tokens[place : place + len(tokens)] = tokens
            self.filled += len(tokens)


def _batch(
    size: BatchSize,
    packer: _Packer,
    groups: Sequence[tuple[_Rows, list[int]]],
    pairs: Sequence[tuple[_Rows, list[int]]],
) -> Batch:
    scored = size.groups * size.candidates
    tool_count, request_count = scored + 2 * size.pairs, size.groups + size.pairs
    answers = np.zeros((size.groups, size.candidates), dtype=np.int64)
    tools = np.zeros(tool_count, dtype=np.int64)
    requests = np.zeros(request_count, dtype=np.int64)
    pool = np.full(tool_count, -1, dtype=np.int64)
    right = np.zeros((request_count, tool_count), dtype=bool)
    slots = [(rows, places, g, g * size.candidates) for g, (rows, places) in enumerate(groups)]
    slots += [(rows, places, size.groups + p, scored + 2 * p) for p, (rows, places) in enumerate(pairs)]
    for rows, places, request, first in slots:
        last = first + len(rows.prefixes)
        requests[request] = places[0] + len(rows.request) - 1
        tools[first:last] = [at + len(p) - 1 for at, p in zip(places[1:], rows.prefixes, strict=True)]
        pool[first:last] = rows.group.indices
        right[request, first : first + rows.group.positives] = True
        if request < size.groups:
            answers[request] = tools[first:last] + len(rows.suffix)
    wrong = np.zeros_like(right)
    sure = np.zeros((size.groups, size.candidates), dtype=bool)
    for rows, _, request, _ in slots:
        if request < size.groups:
            sure[request] = rows.group.sure
        wrong[request] = (pool >= 0) & ~np.isin(pool, list(rows.group.excluded))
    own = np.arange(size.groups)[:, None], np.arange(scored).reshape(size.groups, size.candidates)
    return Batch(
        tokens=torch.from_numpy(packer.tokens),
        answers=torch.from_numpy(answers),
        tools=torch.from_numpy(tools),
        requests=torch.from_numpy(requests),
        score_right=torch.from_numpy(right[own]),
        score_wrong=torch.from_numpy(wrong[own]),
        score_sure=torch.from_numpy(wrong[own] & sure),
        match_right=torch.from_numpy(right),
        match_wrong=torch.from_numpy(wrong),
        filled=torch.tensor(packer.filled),
    )
