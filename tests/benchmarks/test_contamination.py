"""The check that finds somebody else's answer, against answers that are off by noise alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks.contamination import (
    Answer,
    Reference,
    Tolerance,
    answer_of,
    compare,
    indistinguishable,
)

TOLERANCE = Tolerance(log_odds=0.2, doubt=1.0)
NOISE = 0.0999  # of each score, so that of a difference is within the tolerance
LIMIT = 4
REFERENCE = Reference(("a", "b", "c", "d"), (0.9, 0.7, 0.4, 0.2), LIMIT, assurance=5.0)


def sigmoid(value: float) -> float:
    return 1.0 / (1.0 + math.exp(-value))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[dict[str, float], set[str], dict[str, float]]:
    """Log odds of all candidates, those of them that may be none, and each one's noise."""
    count = draw(st.integers(0, 9))
    values = draw(st.lists(st.floats(-4.0, 4.0), min_size=count, max_size=count))
    noise = draw(st.lists(st.floats(-NOISE, NOISE), min_size=count, max_size=count))
    names = [f"t{number}" for number in range(count)]
    uncertain = draw(st.sets(st.sampled_from(names))) if names else set()
    return dict(zip(names, values, strict=True)), uncertain, dict(zip(names, noise, strict=True))


def reference_of(world: dict[str, float], uncertain: set[str], assurance: float | None = None) -> Reference:
    tools: list[str] = []
    certain = 0
    for tool in sorted(world, key=lambda each: -world[each]):
        tools.append(tool)
        certain += tool not in uncertain
        if certain == LIMIT:
            break
    scores = tuple(sigmoid(world[tool]) for tool in tools)
    return Reference(tuple(tools), scores, LIMIT, frozenset(uncertain & set(tools)), assurance)


def noisy(
    world: dict[str, float], noise: dict[str, float], absent: set[str], limit: int, min_score: float | None
) -> Answer:
    """As a server gives it whose scores are off by `noise` and for which `absent` are no candidates."""
    scores = {tool: sigmoid(value + noise[tool]) for tool, value in world.items() if tool not in absent}
    kept = [
        tool for tool in sorted(scores, key=lambda each: -scores[each]) if scores[tool] >= (min_score or 0)
    ]
    return Answer(tuple(kept[:limit]), tuple(scores[tool] for tool in kept[:limit]), limit, min_score)


@given(
    world=worlds(),
    data=st.data(),
    limit=st.integers(1, LIMIT),
    min_score=st.one_of(st.none(), st.floats(0.0, 1.0)),
)
def test_noise_within_the_tolerance_is_clean(
    world: tuple[dict[str, float], set[str], dict[str, float]],
    data: st.DataObject,
    limit: int,
    min_score: float | None,
) -> None:
    values, uncertain, noise = world
    absent = data.draw(st.sets(st.sampled_from(sorted(uncertain)))) if uncertain else set()
    answer = noisy(values, noise, absent, limit, min_score)
    assert compare(reference_of(values, uncertain), answer, TOLERANCE).sentence == ""


@given(world=worlds(), data=st.data(), sign=st.sampled_from((-1.0, 1.0)))
def test_one_score_beyond_the_tolerance_is_found(
    world: tuple[dict[str, float], set[str], dict[str, float]], data: st.DataObject, sign: float
) -> None:
    values, _, noise = world
    answer = noisy(values, noise, set(), LIMIT, None)
    assume(answer.tools)
    wrong = data.draw(st.sampled_from(answer.tools))
    noise[wrong] = sign * data.draw(st.floats(0.21, 3.0))
    scores = tuple(sigmoid(values[tool] + noise[tool]) for tool in answer.tools)
    reference = reference_of(values, set())
    assume(wrong in reference.tools)
    assert not compare(reference, replace(answer, scores=scores), TOLERANCE).clean


@given(world=worlds(), data=st.data())
def test_a_clean_answer_is_within_the_tolerance_by_brute_force(
    world: tuple[dict[str, float], set[str], dict[str, float]], data: st.DataObject
) -> None:
    values, _, _ = world
    noise = {tool: data.draw(st.floats(-0.5, 0.5)) for tool in values}
    answer = noisy(values, noise, set(), LIMIT, None)
    reference = reference_of(values, set())
    if not compare(reference, answer, TOLERANCE).clean:
        assert any(abs(value) > NOISE for value in noise.values())
        return
    assert len(answer.tools) == min(LIMIT, len(values))
    least = min(answer.scores, default=0.0)
    for tool in reference.tools:
        if tool in answer.tools:
            assert abs(noise[tool]) <= 0.2 + 1e-9
        else:
            assert sigmoid(values[tool] - 0.2) <= least + 1e-9
    for at, tool in enumerate(answer.tools):
        assert all(
            values[later] - values[tool] <= 0.2 + 1e-9
            or later not in reference.tools
            or tool not in reference.tools
            for later in answer.tools[at:]
        )


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (Answer(("a", "b", "c", "d"), (0.9, 0.7, 0.4, 0.2), 3), "It has 4 tools, 3 were asked for."),
        (Answer(("a", "a", "c", "d"), (0.9, 0.7, 0.4, 0.2), 4), "It offers a tool twice."),
        (Answer(("a", "b", "d", "c"), (0.9, 0.7, 0.2, 0.4), 4), "It is not in the order of scores"),
        (Answer(("a", "b", "c"), (0.9, 0.7, 0.4), 4), "It lacks d, which alone gets 0.2000."),
        (Answer((), (), 4), "It lacks a, which alone gets 0.9000."),
        (Answer(("b", "a", "c", "d"), (0.9, 0.7, 0.4, 0.2), 4), "It gives b 0.9000, alone it gets 0.7000."),
        (Answer(("a", "x", "c", "d"), (0.9, 0.7, 0.4, 0.2), 4), "It offers x with 0.7000"),
        (Answer(("a", "b", "c", "x"), (0.9, 0.7, 0.4, 0.19), 4), ""),
        (Answer(("a", "b"), (0.9, 0.7), 4, min_score=0.5), ""),
        (Answer(("a",), (0.9,), 4, min_score=0.5), "It lacks b, which alone gets 0.7000."),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(answer: Answer, sentence: str) -> None:
    if sentence.startswith("It is not in"):
        sentence = "Its tools are not in the order of their scores."
    assert compare(REFERENCE, answer, TOLERANCE).sentence.startswith(sentence)
    assert compare(REFERENCE, answer, TOLERANCE).clean == (not sentence)


@pytest.mark.parametrize(
    ("assurance", "offered", "clean"),
    [
        (5.0, True, True),
        (5.0, False, False),
        (0.9, False, True),
        (-0.9, True, True),
        (-5.0, True, False),
        (-5.0, False, True),
        (None, False, False),
    ],
)
def test_a_request_that_no_tool_serves_gets_none(assurance: float | None, offered: bool, clean: bool) -> None:
    reference = replace(REFERENCE, assurance=assurance)
    answer = Answer(reference.tools, reference.scores, LIMIT) if offered else Answer((), (), LIMIT)
    assert compare(reference, answer, TOLERANCE).clean == clean


@pytest.mark.parametrize(
    ("assurance", "offered", "clean"), [(-5.0, 1, True), (-5.0, 0, False), (-5.0, 4, False), (5.0, 1, False)]
)
def test_a_tool_that_is_named_is_offered_all_the_same(assurance: float, offered: int, clean: bool) -> None:
    reference = replace(REFERENCE, scores=(1.0, 0.7, 0.4, 0.2), assurance=assurance, named=1)
    answer = Answer(reference.tools[:offered], reference.scores[:offered], LIMIT)
    assert compare(reference, answer, TOLERANCE).clean == clean


def test_a_reference_says_nothing_about_a_longer_answer() -> None:
    with pytest.raises(ValueError, match="limit 5"):
        compare(REFERENCE, Answer((), (), 5), TOLERANCE)


@given(world=worlds())
def test_the_answer_of_a_reference_is_clean(
    world: tuple[dict[str, float], set[str], dict[str, float]],
) -> None:
    values, uncertain, _ = world
    for assurance in (None, 3.0, -3.0):
        reference = reference_of(values, uncertain, assurance)
        assert compare(reference, answer_of(reference, 2), TOLERANCE).clean


def test_swapped_answers_are_found_and_those_that_look_alike_are_counted() -> None:
    other = Reference(("b", "a", "c", "e"), (0.9, 0.7, 0.4, 0.2), LIMIT, assurance=5.0)
    like = replace(REFERENCE, scores=(0.91, 0.71, 0.41, 0.21))
    assert not compare(REFERENCE, answer_of(other, LIMIT), TOLERANCE).clean
    assert not compare(other, answer_of(REFERENCE, LIMIT), TOLERANCE).clean
    everyone = [REFERENCE, other, like]
    assert indistinguishable(everyone, LIMIT, TOLERANCE) == pytest.approx(1 / 3)
    sampled = indistinguishable(everyone, LIMIT, TOLERANCE, pairs=2, seed=1)
    assert sampled in (0.0, 0.5, 1.0)
    assert indistinguishable([REFERENCE], LIMIT, TOLERANCE) == 0.0


def test_an_answer_is_read_from_a_result() -> None:
    result = {"tools": [{"id": "s/a", "score": 0.5}, {"id": "s/b", "score": 0.25}]}
    assert Answer.of(result, 5) == Answer(("s/a", "s/b"), (0.5, 0.25), 5)
