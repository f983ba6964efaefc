"""Groups, layouts and batches: what a step holds is what was drawn, and each mask says the truth."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.tokenizer import Tokenizer
from mcp_discovery.discovery.prompts import Prompts
from mcp_discovery.training.batches import (
    Batch,
    BatchSize,
    Layout,
    StepBatches,
    _batch,
    _cheapest_lengths,
    _Packer,
)
from mcp_discovery.training.corpus import Corpus
from mcp_discovery.training.data import load_set
from mcp_discovery.training.groups import GroupSampler, Mixture

SIZE = BatchSize(groups=4, candidates=5, pairs=3)


@pytest.fixture(scope="module")
def corpus(tool_set: Path) -> Corpus:
    return Corpus([load_set(tool_set)], {})


@pytest.fixture(scope="module")
def batches(corpus: Corpus, tiny_base: Path) -> StepBatches:
    prompts = Prompts(Tokenizer.from_folder(tiny_base))
    return StepBatches(corpus, GroupSampler(corpus, Mixture()), prompts, SIZE, seed=3)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(1, 3))
def test_the_lengths_chosen_waste_least(lengths: list[int], most: int) -> None:
    top = max(lengths)
    histogram = np.bincount(lengths, minlength=top + 1)

    def cost(chosen: tuple[int, ...]) -> int:
        return sum(min(c for c in chosen if c >= length) for length in lengths)

    choices = [(*inner, top) for size in range(most) for inner in itertools.combinations(range(1, top), size)]
    found = tuple(_cheapest_lengths(histogram, most))
    assert found in choices
    assert cost(found) == min(map(cost, choices))


@given(st.lists(st.lists(st.integers(1, 80), min_size=1, max_size=12), max_size=12))
def test_rows_never_overlap_and_a_refused_group_takes_nothing(groups: list[list[int]]) -> None:
    layout = Layout.of([(4, 16), (3, 48), (2, 80)])
    packer = _Packer(layout)
    starts = {b.start + row * b.length: b.length for b in layout.blocks for row in range(b.rows)}
    taken: dict[int, int] = {}
    for lengths in groups:
        before = list(packer._used)
        places = packer.place(lengths)
        if places is None:
            assert packer._used == before
            continue
        for place, length in zip(places, lengths, strict=True):
            assert place not in taken
            assert length <= starts[place]
            taken[place] = length


@given(st.integers(0, 10**9), st.integers(2, 9), st.booleans())
def test_a_group_holds_right_tools_first_and_no_acceptable_one_as_wrong(
    corpus: Corpus, seed: int, size: int, answered: bool
) -> None:
    sampler = GroupSampler(corpus, Mixture())
    group = sampler.draw(random.Random(seed), size, answered=answered)
    assert len(set(group.indices)) == len(group.indices) == len(group.tools) == size
    assert set(group.indices[: group.positives]) <= group.excluded
    assert group.excluded.isdisjoint(group.indices[group.positives :])
    assert group.positives >= (1 if answered else 0)
    assert group.text.strip()
    again = sampler.draw(random.Random(seed), size, answered=answered)
    assert (again.text, again.indices, again.positives) == (group.text, group.indices, group.positives)
    assert [tool.definition for tool in again.tools] == [tool.definition for tool in group.tools]


def rows_of(batches: StepBatches, batch: Batch) -> list[list[int]]:
    return [
        batch.tokens[b.start + row * b.length : b.start + (row + 1) * b.length].tolist()
        for b in batches.layout.blocks
        for row in range(b.rows)
    ]


def test_a_batch_says_where_its_rows_end(batches: StepBatches) -> None:
    prompts = batches._prompts
    tail = list(prompts.query(prompts.cut("")))[-5:]
    for step in range(6):
        batch = batches[step]
        tokens, positions = batch.tokens.tolist(), batches.layout.positions().tolist()
        shown = (batch.score_right | batch.score_wrong).flatten().tolist()
        for answer, tool, there in zip(
            batch.answers.flatten().tolist(), batch.tools.tolist(), shown, strict=False
        ):
            if there:
                assert tokens[answer - 4 : answer + 1] == tail
                assert (positions[tool] + 1) % 16 == 0  # a prefix is whole pages
                assert positions[answer] > positions[tool]
                assert answer - tool == positions[answer] - positions[tool]
        asked = batch.match_right.any(1).nonzero().flatten().tolist()
        assert len(asked) >= SIZE.pairs
        assert all(tokens[batch.requests[q] - 4 : batch.requests[q] + 1] == tail for q in asked)
        assert not (batch.match_right & batch.match_wrong).any()
        assert not (batch.score_sure & ~batch.score_wrong).any()
        assert int(batch.filled) == sum(1 for row in rows_of(batches, batch) for _ in _written(row))


def _written(row: list[int]) -> list[int]:
    """A row without the padding behind it; token 0 is never written."""
    while row and row[-1] == 0:
        row = row[:-1]
    return row


def test_a_step_is_a_function_of_its_number(batches: StepBatches) -> None:
    first, again, other = batches[5], batches[5], batches[6]
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert not (first.tokens == other.tokens).all()


def test_only_what_is_certainly_wrong_counts_as_such(batches: StepBatches) -> None:
    unsure = 0
    for seed in range(8):
        packer = _Packer(batches.layout)
        rng = random.Random(seed)
        placed = batches._packed(packer, rng, SIZE.groups, SIZE.candidates, scored=True)
        placed = [
            (
                replace(
                    rows, group=replace(rows.group, sure=tuple(rng.random() < 0.5 for _ in rows.group.sure))
                ),
                at,
            )
            for rows, at in placed
        ]
        batch = _batch(SIZE, packer, placed, [])
        for line, (rows, _) in enumerate(placed):
            expected = np.array(rows.group.sure) & batch.score_wrong[line].numpy()
            assert batch.score_sure[line].tolist() == expected.tolist()
            unsure += int((batch.score_wrong[line] & ~batch.score_sure[line]).sum())
    assert unsure > 0
