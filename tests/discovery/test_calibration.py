"""One order and one probability from two readings."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_discovery.discovery.calibration import BY_WORDS, COSINE_WEIGHT, Calibration, evidence, logit


def test_evidence_adds_log_odds_and_weighted_cosine() -> None:
    assert evidence({3: 2.0, 5: -1.0}, {3: 0.5, 5: 0.25}) == {
        3: 2.0 + COSINE_WEIGHT * 0.5,
        5: -1.0 + COSINE_WEIGHT * 0.25,
    }


def test_a_tool_without_a_vector_counts_with_the_mean_cosine_of_the_others() -> None:
    assert evidence({1: 0.0, 2: 0.0, 3: 0.0}, {1: 0.2, 2: 0.6})[3] == pytest.approx(COSINE_WEIGHT * 0.4)
    assert evidence({1: 1.5}, {}) == {1: 1.5}


@given(st.floats(-60, 60), st.floats(-60, 60), st.floats(0.1, 3), st.floats(-20, 20))
def test_scores_are_probabilities_that_keep_the_order(
    first: float, second: float, slope: float, offset: float
) -> None:
    calibration = Calibration(slope, offset)
    low, high = sorted((first, second))
    assert 0 <= calibration.probability(low) <= calibration.probability(high) <= 1


def test_the_bound_of_doubt_grows_with_each_doubling() -> None:
    calibration = Calibration(doubt_below=3.0, doubt_growth=0.5)
    assert [calibration.bound(tools) for tools in (25, 100, 800)] == [2.0, 3.0, 4.5]
    assert Calibration(doubt_below=3.0).bound(10**6) == 3.0
    assert math.isfinite(calibration.bound(0))


def test_what_words_find_too_is_doubted_less() -> None:
    calibration = Calibration(doubt_weight=10.0, doubt_below=5.0, doubt_words=1.0, doubt_floor=-2.0)
    assert calibration.assurance(-7.0, 0.5, by_words=False) == 3.0
    assert calibration.assurance(1.0, 0.5, by_words=True) == 7.0
    logits, cosines = {3: -0.5, 4: -9.0}, {3: 0.5, 4: 0.1}
    assert calibration.doubts(logits, cosines, [], 100)  # 4.5
    assert not calibration.doubts(logits, cosines, [9, 3], 100)  # 5.5
    assert calibration.doubts(logits, cosines, [*range(10, 10 + BY_WORDS), 3], 100)
    assert not calibration.doubts({**logits, 5: -9.0}, cosines, [], 100)  # has no vector yet


@pytest.mark.parametrize("p", [0.0, 1.0, 1e-300])
def test_the_log_odds_of_certainty_are_numbers(p: float) -> None:
    assert math.isfinite(logit(p))
    assert logit(0.5) == 0.0


@given(st.lists(st.floats(0, 1), max_size=5), st.floats(0.1, 3), st.floats(-20, 20))
def test_many_at_once_are_each_by_itself(ps: list[float], slope: float, offset: float) -> None:
    calibration = Calibration(slope, offset)
    expected = [min(max(p, 1e-12), 1 - 1e-12) for p in ps]
    expected = [math.log(p / (1 - p)) for p in expected]
    assert logit(np.array(ps)).tolist() == pytest.approx(expected)
    scores = [1 / (1 + math.exp(-(slope * value + offset))) for value in expected]
    assert calibration.probability(np.array(expected)).tolist() == pytest.approx(scores)
