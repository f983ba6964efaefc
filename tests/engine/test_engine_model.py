"""The engine over the embedded model in float32: answers do not depend on pages, windows or company."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.canary import OUTPUT_TOKENS, read_answers, read_data, read_questions, run_canary
from engine.canary_answers import MARGIN, last_state
from engine.engine import Engine
from engine.errors import CanaryFailed
from engine.model import Model
from engine.request import Embed, Embedded, Generate, Generated, Outcome, Request, Score, Scored, Tokens
from engine.tokenizer import Tokenizer
from mcp_discovery.model_store import DEFAULT
from tests.engine.poison import PAGE_TOKENS, start

WAIT_S = 300.0


@pytest.fixture
def engines(model: Model) -> Iterator[Any]:
    started: list[Engine] = []

    def make(pages: int, **options: int) -> Engine:
        started.append(start(model, pages, **options))
        return started[-1]

    yield make
    for engine in started:
        engine.close()
        engine._core.pool.check()
        assert engine.status().pages.held == 0


@pytest.fixture(scope="module")
def group(tokenizer: Tokenizer) -> Score:
    """Prefixes that end inside a page and on its boundary, two of them the same, none aligned on purpose."""
    said = [
        "Returns the weather forecast of a city for the next days.",
        "Deletes a file.",
        "Sends a message to one or more recipients and returns its id, its time and the state of delivery.",
        "Deletes a file.",
        "Lists the open pull requests of a repository, newest first, with author and labels.",
    ]
    prefixes = [tuple(tokenizer.encode(f"Tool: {text} ")) * 2 for text in said]
    prefixes[0] = prefixes[0][: len(prefixes[0]) // PAGE_TOKENS * PAGE_TOKENS]
    yes, no = tokenizer.encode("yes")[0], tokenizer.encode("no")[0]
    return Score(tuple(prefixes), tuple(tokenizer.encode("\nRequest: will it rain?\nAnswer:")), yes, no)


@pytest.fixture(scope="module")
def alone(model: Model, group: Score) -> list[float]:
    """Each row by itself with dense attention."""
    pair = torch.tensor([group.positive, group.negative])
    with torch.inference_mode():
        logits = [model.logits(last_state(model, p + group.suffix), pair)[0].double() for p in group.prefixes]
    return [torch.sigmoid(positive - negative).item() for positive, negative in logits]


def assert_scores(outcome: Outcome, wanted: Sequence[float]) -> Scored:
    assert isinstance(outcome, Scored)
    assert outcome.probabilities == pytest.approx(wanted, abs=1e-4)
    return outcome


def test_scores_do_not_depend_on_cache_window_or_company(
    engines: Any, group: Score, alone: list[float], tokenizer: Tokenizer
) -> None:
    engine = engines(80)
    cold = assert_scores(engine.score(group), alone)
    assert cold.usage.cached_tokens == 0
    cached = assert_scores(engine.score(group), alone)
    whole = sum(len(prefix) // PAGE_TOKENS * PAGE_TOKENS for prefix in group.prefixes)
    assert cached.usage.cached_tokens == whole
    company: list[Request] = [
        replace(group, window=1),
        Generate(tuple(tokenizer.encode("Once upon a time")), 6),
        replace(group, prefixes=group.prefixes[::-1]),
        Embed(tuple(tokenizer.encode("Tool: Deletes a file. ")), keep=16),
    ]
    outcomes = engine.probe(company)
    assert_scores(outcomes[0], alone)
    assert_scores(outcomes[2], alone[::-1])


def test_scores_streamed_through_a_pool_of_one_row(engines: Any, group: Score, alone: list[float]) -> None:
    largest = max(-(-(len(prefix) + len(group.suffix)) // PAGE_TOKENS) for prefix in group.prefixes)
    engine = engines(largest)
    for _ in range(2):
        assert assert_scores(engine.score(group), alone).usage.pages <= largest


def test_one_part_full_prefix_serves_many_rows_at_once(
    engines: Any, group: Score, alone: list[float]
) -> None:
    engine = engines(80)
    index = next(i for i, prefix in enumerate(group.prefixes) if len(prefix) % PAGE_TOKENS)
    prefix = group.prefixes[index]
    engine.score(replace(group, prefixes=(prefix,)))
    many = assert_scores(engine.score(replace(group, prefixes=(prefix,) * 12)), [alone[index]] * 12)
    shared = len(prefix) // PAGE_TOKENS
    own = -(-(len(prefix) + len(group.suffix)) // PAGE_TOKENS) - shared
    assert many.usage.pages == shared + 12 * own


def test_embeddings_are_those_of_the_text_alone(engines: Any, model: Model, tokenizer: Tokenizer) -> None:
    texts = [tuple(tokenizer.encode(text * 6)) for text in ("A railway timetable. ", "A", "Rain, again, ")]
    engine = engines(60)
    requests: list[Request] = [Embed(text, keep=len(text)) for text in texts]
    for _ in range(2):  # the second time from cached pages
        for text, outcome in zip(texts, engine.probe(requests), strict=True):
            assert isinstance(outcome, Embedded)
            with torch.inference_mode():
                wanted = torch.nn.functional.normalize(last_state(model, text)[0], dim=-1)
            torch.testing.assert_close(torch.tensor(outcome.vector), wanted, atol=1e-5, rtol=0)


def prompts_of(tokenizer: Tokenizer, count: int) -> list[Tokens]:
    """Chat prompts of 20 to 90 tokens, some of which begin alike."""
    start_, end = tokenizer.special("<|im_start|>"), tokenizer.special("<|im_end|>")
    asks = ["Explain", "Write a short story about", "List five facts about", "Translate into French:"]
    about = [
        "the sea",
        "an old clock",
        "volcanoes",
        "honey bees",
        "the number seven",
        "winter",
        "glass",
        "maps",
    ]
    rng = random.Random(11)
    prompts = []
    for number in range(count):
        system = "You are a patient teacher who answers in plain words. " * rng.randrange(1, 5)
        text = f"system\n{system}"
        question = f"user\n{asks[number % 4]} {about[number // 4 % 8]}."
        head = [start_, *tokenizer.encode(text), end, *tokenizer.encode("\n")]
        body = [start_, *tokenizer.encode(question), end, *tokenizer.encode("\n")]
        prompts.append((*head, *body, start_, *tokenizer.encode("assistant\n")))
    return prompts


def test_greedy_continuations_equal_those_of_transformers(
    engines: Any, reference: Any, tokenizer: Tokenizer, group: Score, alone: list[float]
) -> None:
    """32 prompts, 64 tokens each, arriving at random among scores and embeddings, in a pool that does
    not hold all of them at once. Each token is held against the reference's likeliest one after the
    same tokens: by induction the two continuations are the same."""
    prompts = prompts_of(tokenizer, 32)
    engine = engines(150)
    rng = random.Random(5)
    generated: list[Future[Outcome]] = [Future() for _ in prompts]
    others: list[Future[Outcome]] = []
    for prompt, future in zip(prompts, generated, strict=True):
        engine.submit(Generate(prompt, 64, keep=64), on_done=future.set_result, caller=str(rng.randrange(3)))
        steps = engine.status().steps + rng.randrange(4)
        if rng.random() < 0.15:
            others.append(Future())
            engine.submit(replace(group, window=2), on_done=others[-1].set_result)
        while engine.status().steps < steps:
            threading.Event().wait(0.005)
    for future in others:
        assert_scores(future.result(WAIT_S), alone)
    with torch.inference_mode():
        for prompt, future in zip(prompts, generated, strict=True):
            outcome = future.result(WAIT_S)
            assert isinstance(outcome, Generated)
            assert len(outcome.tokens) == 64
            text = torch.tensor([[*prompt, *outcome.tokens[:-1]]])
            likeliest = reference(text, logits_to_keep=64).logits[0].argmax(dim=-1)
            assert tuple(likeliest.tolist()) == outcome.tokens


def test_the_canarys_known_answers_are_those_of_transformers(reference: Any) -> None:
    data = read_data()
    questions = read_questions(data)
    known = read_answers(data, DEFAULT.file_sha256, "")
    assert known is not None
    assert all(len(tokens) == OUTPUT_TOKENS for tokens in known.continuations)
    with torch.inference_mode():
        for prompt, tokens in zip(questions.prompts, known.continuations, strict=True):
            logits = reference(torch.tensor([[*prompt, *tokens[:-1]]]), logits_to_keep=len(tokens)).logits[0]
            best = logits.topk(2, dim=-1)
            assert tuple(best.indices[:, 0].tolist()) == tokens
            assert (best.values[:, 0] - best.values[:, 1]).min() >= MARGIN
        for prefix, probability in zip(questions.score.prefixes, known.probabilities, strict=True):
            row = torch.tensor([prefix + questions.score.suffix])
            logits = reference(row, logits_to_keep=1).logits[0, -1].double()
            odds = logits[questions.score.positive] - logits[questions.score.negative]
            assert torch.sigmoid(odds).item() == pytest.approx(probability, abs=1e-4)
        first, second = (reference.model(torch.tensor([text]))[0][0, -1] for text in questions.texts)
    assert torch.cosine_similarity(first, second, dim=0).item() == pytest.approx(known.cosine, abs=1e-4)


def test_the_canary_passes_in_a_small_pool(engines: Any, model: Model) -> None:
    engine = engines(12)
    told = run_canary(engine.probe, model.shape.vocabulary, DEFAULT.file_sha256, "")
    assert told == "known answers of the float32 reference"


def test_a_wrong_weight_does_not_pass_the_canary(engines: Any, model: Model) -> None:
    """One of 30 layers loses its MLP: the smallest error of a loader worth the name."""
    down = model.weights.layers[20].down
    right = down.clone()
    down.zero_()
    try:
        with pytest.raises(CanaryFailed):
            run_canary(engines(12).probe, model.shape.vocabulary, DEFAULT.file_sha256, "")
    finally:
        down.copy_(right)
