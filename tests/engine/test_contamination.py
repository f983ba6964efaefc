"""Many requests at once in few pages, some of them taken back: each gets the answer it gets alone."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from concurrent.futures import Future

import pytest

from engine.engine import Engine, RequestHandle
from engine.model import Model
from engine.pages import PagePool
from engine.prefix_tree import Pages, PrefixTree
from engine.request import (
    Cancelled,
    Embed,
    Embedded,
    Generate,
    Generated,
    Outcome,
    Request,
    Score,
    Scored,
    Tokens,
)
from tests.engine.poison import start

WAIT_S = 120.0
VOCABULARY = 97
TIGHT, ROOMY = 24, 400
TOLERANCE = 1e-4


def requests(count: int, seed: int) -> list[Request]:
    """Of all kinds, over prefixes that begin alike; most end inside a page."""
    rng = random.Random(seed)

    def some(most: int) -> Tokens:
        return tuple(rng.randrange(1, VOCABULARY) for _ in range(rng.randint(1, most)))

    system = some(20)
    prefixes = [system + some(60) for _ in range(10)]
    made: list[Request] = []
    for _ in range(count):
        prefix = rng.choice(prefixes)
        rows = tuple(rng.choices(prefixes, k=rng.randint(1, 8)))
        kinds: list[Request] = [
            Embed(prefix + some(20), keep=rng.choice((0, 100))),
            Generate(prefix + some(20), rng.randint(1, 8), keep=rng.choice((0, 100))),
            Score(rows, some(30), 1, 2, rng.choice((None, 1, 3))),
        ]
        made.append(rng.choice(kinds))
    return made


def one_at_a_time(model: Model, asked: Iterable[Request]) -> list[Outcome]:
    """Each by an engine that has nothing else in its pages."""
    outcomes = []
    for request in asked:
        with start(model, ROOMY) as engine:
            outcomes += engine.probe([request])
    return outcomes


def all_at_once(engine: Engine, asked: Iterable[Request], cancelled: float, seed: int) -> list[Outcome]:
    """As many as `cancelled` says of them are taken back, each when a random one of the others has ended."""
    rng = random.Random(seed)
    answers: list[Future[Outcome]] = []
    handles: list[RequestHandle] = []
    for number, request in enumerate(asked):
        answers.append(Future())
        handles.append(engine.submit(request, on_done=answers[-1].set_result, caller=f"c{number % 3}"))
    for handle in handles:
        if rng.random() < cancelled:
            answers[rng.randrange(len(answers))].result(WAIT_S)
            handle.cancel()
    return [answer.result(WAIT_S) for answer in answers]


def is_same(outcome: Outcome, alone: Outcome) -> bool:
    if isinstance(outcome, Scored) and isinstance(alone, Scored):
        return outcome.probabilities == pytest.approx(alone.probabilities, abs=TOLERANCE)
    if isinstance(outcome, Embedded) and isinstance(alone, Embedded):
        return outcome.vector == pytest.approx(alone.vector, abs=TOLERANCE)
    return isinstance(outcome, Generated) and isinstance(alone, Generated) and outcome.tokens == alone.tokens


def contaminated(outcomes: list[Outcome], alone: list[Outcome]) -> list[int]:
    """Requests that were answered otherwise than alone, or failed."""
    return [
        number
        for number, (outcome, reference) in enumerate(zip(outcomes, alone, strict=True))
        if not isinstance(outcome, Cancelled) and not is_same(outcome, reference)
    ]


@pytest.mark.parametrize("poison", [math.nan, 1e4])
def test_answers_under_load_are_those_alone(make_tiny_model: Callable[..., Model], poison: float) -> None:
    model = make_tiny_model()
    asked = requests(80, seed=1)
    alone = one_at_a_time(model, asked)
    with start(model, TIGHT, step_tokens=64, poison=poison) as engine:
        outcomes = all_at_once(engine, asked, cancelled=0.2, seed=2)
        assert contaminated(outcomes, alone) == []
        assert 0 < sum(isinstance(outcome, Cancelled) for outcome in outcomes) < 30
        assert contaminated(all_at_once(engine, asked, cancelled=0.0, seed=3), alone) == []
        assert engine.status().pages.held == 0


def swapped(outcomes: list[Outcome], first: int, second: int) -> list[Outcome]:
    outcomes = list(outcomes)
    outcomes[first], outcomes[second] = outcomes[second], outcomes[first]
    return outcomes


def test_two_answers_that_are_swapped_are_found(make_tiny_model: Callable[..., Model]) -> None:
    """Of every pair of the same kind; all of these answers can be told apart."""
    alone = one_at_a_time(make_tiny_model(), requests(16, seed=4))
    for second in range(len(alone)):
        for first in range(second):
            if type(alone[first]) is type(alone[second]):
                assert contaminated(swapped(alone, first, second), alone) == [first, second]


@pytest.mark.interpreted
def test_a_prefix_that_is_somebody_elses_is_found(
    make_tiny_model: Callable[..., Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool takes every prefix for the one that was published last and is as long."""
    model = make_tiny_model()
    asked = requests(30, seed=5)
    alone = one_at_a_time(model, asked)
    match, known = PrefixTree.match, dict[int, Pages]()

    def last_match(self: PrefixTree, tokens: Tokens, most: int) -> Pages:
        chain = match(self, tokens, most)
        other = known.get(len(chain), chain)
        known[len(chain)] = chain
        return other if all(page in self.node_of for page in other) else chain

    monkeypatch.setattr(PrefixTree, "match", last_match)
    with start(model, ROOMY) as engine:
        outcomes = all_at_once(engine, asked, cancelled=0.0, seed=6)
    assert len(contaminated(outcomes, alone)) > 3


@pytest.mark.interpreted
def test_a_page_that_is_free_and_still_read_is_found(
    make_tiny_model: Callable[..., Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chain is shared and not pinned, so that its pages are handed out under its reader."""
    model = make_tiny_model()
    asked = [each for each in requests(120, seed=7) if isinstance(each, Embed | Generate)]
    alone = one_at_a_time(model, asked)
    reserve = PagePool.reserve
    monkeypatch.setattr(PagePool, "reserve", lambda self, own, chains=(): reserve(self, own))
    with start(model, 12, step_tokens=16) as engine:
        outcomes = all_at_once(engine, asked, cancelled=0.0, seed=8)
    assert contaminated(outcomes, alone)
