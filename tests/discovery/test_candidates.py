"""Fusion and filling of candidates."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mcp_discovery.discovery.candidates import RANK_CONSTANT, choose, fuse

ORDERS = st.lists(st.lists(st.integers(0, 15), unique=True, max_size=12), min_size=1, max_size=3)


def test_fusion_adds_reciprocal_ranks_and_keeps_catalogue_order_for_equals() -> None:
    assert fuse([[4, 1, 2], [1, 3]]) == [1, 4, 3, 2]
    assert fuse([[5], [3]]) == [3, 5]
    assert fuse([[1, 2], [2, 1]], [1.0, 0.1]) == [1, 2]
    assert fuse([[], []]) == []


@given(
    ORDERS,
    st.lists(st.sampled_from([0.0, 0.5, 1.0, 12.0]), min_size=3, max_size=3),
    st.sampled_from([1.0, RANK_CONSTANT]),
)
def test_fusion_is_its_definition(orders: list[list[int]], weights: list[float], k: float) -> None:
    votes: dict[int, float] = {}
    for order, weight in zip(orders, weights, strict=False):
        for rank, position in enumerate(order, start=1):
            votes[position] = votes.get(position, 0.0) + weight / (k + rank)
    expected = sorted(votes, key=lambda position: (-votes[position], position))
    assert fuse(orders, weights[: len(orders)], k) == expected


@given(ORDERS, st.integers(1, 20), st.lists(st.booleans(), min_size=16, max_size=16))
def test_candidates_are_distinct_visible_and_as_many_as_there_are(
    orders: list[list[int]], wanted: int, shown: list[bool]
) -> None:
    mask = np.array(shown)
    orders = [[position for position in order if mask[position]] for order in orders]
    chosen = choose(orders, mask, wanted)
    assert len(chosen) == len(set(chosen)) == min(wanted, sum(shown))
    assert all(mask[position] for position in chosen)
    ranked = fuse(orders)[:wanted]
    assert chosen[: len(ranked)] == ranked
    filled = chosen[len(ranked) :]
    assert filled == sorted(filled)
