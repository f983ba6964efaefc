"""What two kinds of pages answer, compared: rank correlations by brute force, and the figures of a set."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.fp8 import Pair, compare, kendall, spearman, table
from benchmarks.quality_rank import Asked
from mcp_discovery.discovery.catalogue import Tool
from mcp_discovery.evaluate import LabelledSet, Query

columns = st.integers(2, 12).flatmap(
    lambda size: st.tuples(*[st.lists(st.integers(-4, 4), min_size=size, max_size=size)] * 2)
)


def asked(candidates: list[int], logits: list[float], failure: str = "") -> Asked:
    """Answered in the order of log odds, without vectors."""
    by_logit = sorted(range(len(candidates)), key=lambda at: -logits[at])
    return Asked(
        id="q", named=[], lexical=candidates, dense=[], candidates=candidates,
        scored=[candidates[at] for at in by_logit], logits=logits, cosines=[None] * len(candidates),
        failure=failure, ms=1.0,
    )  # fmt: skip


def some_tools(names: str) -> tuple[Tool, ...]:
    return tuple(Tool("s", name, {"name": name, "inputSchema": {"type": "object"}}) for name in names)


@given(columns)
def test_kendall_counts_pairs(drawn: tuple[list[int], list[int]]) -> None:
    a, b = drawn
    agreeing = untied_a = untied_b = 0
    for i, j in combinations(range(len(a)), 2):
        signs = [(side[i] > side[j]) - (side[i] < side[j]) for side in (a, b)]
        agreeing += signs[0] * signs[1]
        untied_a, untied_b = untied_a + abs(signs[0]), untied_b + abs(signs[1])
    got = kendall(np.array(a, dtype=float), np.array(b, dtype=float))
    if untied_a and untied_b:
        assert got == pytest.approx(agreeing / math.sqrt(untied_a * untied_b))
    else:
        assert got is None


@given(st.permutations(range(9)))
def test_spearman_of_untied_ranks_follows_from_squared_distances(order: list[int]) -> None:
    squares = sum((rank - at) ** 2 for at, rank in enumerate(order))
    wanted = 1 - 6 * squares / (9 * (9**2 - 1))
    got = spearman(np.exp(np.arange(9.0)), np.array(order, dtype=float) * 10)
    assert got == pytest.approx(wanted)


def test_tied_values_share_their_mean_rank() -> None:
    assert spearman(np.array([1.0, 2.0, 2.0, 3.0]), np.array([0.0, 5.0, 5.0, 9.0])) == pytest.approx(1.0)
    tied = spearman(np.array([1.0, 2.0, 2.0, 3.0]), np.array([0.0, 4.0, 5.0, 9.0]))
    assert tied == pytest.approx(4.5 / math.sqrt(4.5 * 5.0))
    assert spearman(np.array([1.0, 1.0]), np.array([1.0, 2.0])) is None


def test_only_candidates_of_both_sides_are_correlated() -> None:
    first = asked([0, 1, 2, 3], [4.0, 3.0, 2.0, 1.0])
    second = asked([3, 1, 0, 9], [0.5, 5.0, 4.5, 2.0])
    pair = Pair.of(first, second)
    assert (pair.considered, pair.common, pair.same_first) == (4, 3, False)
    assert pair.kendall == pytest.approx(1 / 3)
    assert pair.log_odds_apart == pytest.approx((0.5 + 2.0 + 0.5) / 3)


def test_a_set_tells_what_the_second_kind_of_pages_loses() -> None:
    tools = some_tools("abcd")
    queries = (Query("1", "x", (("s/a",),)), Query("2", "y", (("s/b",),)))
    labelled = LabelledSet("some", tools, queries, ())
    first = [asked([0, 1, 2], [3.0, 2.0, 1.0]), asked([1, 2], [2.0, 1.0])]
    second = [asked([0, 1, 2], [2.0, 3.0, 1.0]), asked([1, 2], [0.0, 0.0], failure="queue_full")]
    found = compare(labelled, first, second)
    assert (found["queries"], found["unanswered"], found["same_first"]) == (2, 1, 0.0)
    assert found["candidates_in_common"] == 1.0
    assert found["kendall"]["mean"] == pytest.approx(1 / 3, abs=1e-4)
    assert found["ndcg_at_10"] == [1.0, pytest.approx(0.5 / math.log2(3), abs=1e-4)]
    assert found["ndcg_at_10_lost"]["mean"] == pytest.approx(1.0 - 0.5 / math.log2(3), abs=1e-4)
    assert "| some | 2 | 0.5000 | 0.3333 |" in table([found])


def test_the_same_answers_lose_nothing() -> None:
    tools = some_tools("ab")
    labelled = LabelledSet("some", tools, (Query("1", "x", (("s/a",),)),), ())
    same = [asked([0, 1], [3.0, 2.0])]
    found = compare(labelled, same, same)
    assert found["spearman"]["mean"] == found["kendall"]["mean"] == found["same_first"] == 1.0
    assert found["ndcg_at_10_lost"]["mean"] == 0.0
