"""The choice of the next token."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.decode import choose, greedy, uniform
from engine.errors import EngineFault

rows = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=50)


@given(logits=rows)
def test_greedy_takes_a_largest_logit(logits: list[float]) -> None:
    row = torch.tensor(logits)
    assert row[choose(row)] == max(logits)
    assert greedy(torch.stack((row, row))).tolist() == [choose(row)] * 2


@given(logits=rows, data=st.data(), temperature=st.sampled_from([0.0, 0.3, 1.0, 5.0]), seed=st.integers())
def test_a_constraint_holds_and_equals_masking_the_rest(
    logits: list[float], data: st.DataObject, temperature: float, seed: int
) -> None:
    row = torch.tensor(logits)
    allowed = data.draw(st.sets(st.integers(0, len(logits) - 1), min_size=1))
    masked = torch.full_like(row, -math.inf)
    masked[sorted(allowed)] = row[sorted(allowed)]
    chosen = choose(row, temperature=temperature, seed=seed, index=3, allowed=list(allowed))
    assert chosen in allowed
    if temperature == 0.0:
        assert row[chosen] == masked.max()
    else:
        assert chosen == choose(masked, temperature=temperature, seed=seed, index=3)


def test_samples_follow_the_distribution() -> None:
    row = torch.tensor([0.0, 1.0, -1.0, 2.0, -math.inf])
    draws = 20_000
    counts = torch.zeros(5)
    for index in range(draws):
        counts[choose(row, temperature=0.8, seed=11, index=index)] += 1
    expected = torch.softmax(row / 0.8, dim=0)
    # Five standard deviations of a binomial.
    bound = 5 * (expected * (1 - expected) * draws).sqrt() + 1e-9
    assert ((counts - expected * draws).abs() <= bound).all()


def test_a_draw_depends_on_seed_and_index_alone() -> None:
    row = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(1)
    first = [choose(row, temperature=1.0, seed=5, index=index) for index in range(40)]
    torch.manual_seed(2)
    assert first == [choose(row, temperature=1.0, seed=5, index=index) for index in range(40)]
    assert first != [choose(row, temperature=1.0, seed=6, index=index) for index in range(40)]
    assert len(set(first)) > 20


@given(seed=st.integers(), index=st.integers(0, 1 << 20))
def test_uniform_numbers_are_in_range(seed: int, index: int) -> None:
    assert 0.0 <= uniform(seed, index) < 1.0


@pytest.mark.parametrize("allowed", [[], [-1], [4]])
def test_an_impossible_constraint_is_an_error(allowed: list[int]) -> None:
    with pytest.raises(ValueError, match="constraint allows"):
        choose(torch.zeros(4), allowed=allowed)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_numbers_are_a_fault(temperature: float, bad: float) -> None:
    row = torch.tensor([0.0, bad, 1.0])
    with pytest.raises(EngineFault, match="not finite"):
        choose(row, temperature=temperature)
    assert choose(row, temperature=temperature, allowed=[2]) == 2
