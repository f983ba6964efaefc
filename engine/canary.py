"""Known answers that must come out before an engine serves.

The answers of the models we know lie in `data/canary.json`, by the digests of model and adapter;
`canary_answers.py` computes them in float32 with dense attention, one request at a time. A model
that we do not know is held against itself: what is computed among others, from cached prefixes or
through a window of one row must equal what is computed alone. That finds broken kernels and mixed-up
pages, not wrong weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from engine.errors import CanaryFailed, ConfigError, Refusal, RefusalCode
from engine.request import Embed, Embedded, Generate, Generated, Outcome, Request, Score, Scored, Tokens

OUTPUT_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Most that an answer may be off; `log_odds` speaks where a probability is near 0 or 1. Of a
    continuation the first `tokens` are compared."""

    probability: float = 0.04
    log_odds: float = 1.0
    cosine: float = 0.01
    tokens: int = OUTPUT_TOKENS


SIXTEEN_BIT = Tolerance()
"""float16 and bfloat16 stay within it, a wrong weight does not."""
FP8_PAGES = Tolerance(probability=0.2, log_odds=1.5, cosine=0.05, tokens=1)
"""Keys and values of three bits after the point: by far most of the error is theirs."""

Probe = Callable[[list[Request]], list[Outcome]]
"""Submits requests together and waits for their outcomes."""


@dataclass(frozen=True, slots=True)
class Questions:
    """`prompts` are continued greedily, `score` is scored, the two `texts` are embedded and compared."""

    prompts: tuple[Tokens, ...]
    score: Score
    texts: tuple[Tokens, Tokens]


@dataclass(frozen=True, slots=True)
class Answers:
    """Continuations end where the next token is in doubt; `cosine` is that of the two texts' vectors."""

    continuations: tuple[Tokens, ...]
    probabilities: tuple[float, ...]
    cosine: float


def read_data() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(resources.files("engine").joinpath("data/canary.json").read_text())
    return data


def read_questions(data: dict[str, Any]) -> Questions:
    """In the token ids of the embedded model's tokenizer."""
    asked = data["questions"]
    first, second = asked["texts"]
    score = Score(
        prefixes=tuple(map(tuple, asked["prefixes"])),
        suffix=tuple(asked["suffix"]),
        positive=asked["positive"],
        negative=asked["negative"],
    )
    return Questions(tuple(map(tuple, asked["prompts"])), score, (tuple(first), tuple(second)))


def read_answers(data: dict[str, Any], model_sha256: str, adapter_sha256: str) -> Answers | None:
    """None for a model and adapter whose answers are not known."""
    for known in data["answers"]:
        if (known["model_sha256"], known["adapter_sha256"]) == (model_sha256, adapter_sha256):
            return Answers(
                continuations=tuple(map(tuple, known["continuations"])),
                probabilities=tuple(known["probabilities"]),
                cosine=known["cosine"],
            )
    return None


def run_canary(
    probe: Probe,
    vocabulary: int,
    model_sha256: str,
    adapter_sha256: str,
    tolerance: Tolerance = SIXTEEN_BIT,
) -> str:
    """What was compared, in a sentence. Raises CanaryFailed where something came out wrong, ConfigError
    where the engine has too few pages for the questions."""
    probe = _within_pages(probe)
    data = read_data()
    questions = _within(read_questions(data), vocabulary)
    answers = read_answers(data, model_sha256, adapter_sha256)
    if answers is None:
        _check_consistency(probe, questions, tolerance)
        return "consistent with itself; the answers of this model and adapter are not known"
    _check_answers(probe, questions, answers, tolerance)
    return "known answers of the float32 reference"


def _within_pages(probe: Probe) -> Probe:
    """As `probe`; raises ConfigError where a question can never fit."""

    def served(requests: list[Request]) -> list[Outcome]:
        outcomes = probe(requests)
        refusals = [outcome for outcome in outcomes if isinstance(outcome, Refusal)]
        large = [each for each in refusals if each.code is RefusalCode.REQUEST_TOO_LARGE]
        if large:
            raise ConfigError(
                f"the engine has {large[0].pages_total} pages of {large[0].page_tokens} tokens, its start-up "
                f"check needs {max(each.pages_needed for each in large)}: raise max_pages or allowance_mib"
            )
        return outcomes

    return served


def _within(questions: Questions, vocabulary: int) -> Questions:
    """The same shapes in a smaller vocabulary, whatever they mean there."""

    def fold(tokens: Tokens) -> Tokens:
        return tuple(token % vocabulary for token in tokens)

    score = questions.score
    negative = score.negative % vocabulary
    positive = score.positive % vocabulary
    return Questions(
        prompts=tuple(map(fold, questions.prompts)),
        score=replace(
            score,
            prefixes=tuple(map(fold, score.prefixes)),
            suffix=fold(score.suffix),
            positive=positive if positive != negative else (negative + 1) % vocabulary,
            negative=negative,
        ),
        texts=(fold(questions.texts[0]), fold(questions.texts[1])),
    )


def _check_answers(probe: Probe, questions: Questions, answers: Answers, tolerance: Tolerance) -> None:
    """All at once, then the score once more, from what is resident by then and row by row."""
    generate: list[Request] = [Generate(prompt, OUTPUT_TOKENS) for prompt in questions.prompts]
    embed: list[Request] = [Embed(text) for text in questions.texts]
    outcomes = probe([*generate, questions.score, *embed])
    for outcome, expected in zip(outcomes, answers.continuations, strict=False):
        known = expected[: tolerance.tokens]
        if not isinstance(outcome, Generated) or outcome.tokens[: len(known)] != known:
            raise CanaryFailed(f"a known continuation came out wrong: {_got(outcome)}")
    _check_scores(outcomes[len(generate)], answers.probabilities, tolerance, "known probabilities")
    streamed = probe([replace(questions.score, window=1)])[0]
    what = "known probabilities, row by row from cached prefixes,"
    _check_scores(streamed, answers.probabilities, tolerance, what)
    first, second = (_vector(outcome) for outcome in outcomes[-2:])
    cosine = _dot(first, second)
    if not abs(cosine - answers.cosine) <= tolerance.cosine:
        raise CanaryFailed(f"a known cosine is {answers.cosine:.4f}, this engine has {cosine:.4f}")


def _check_consistency(probe: Probe, questions: Questions, tolerance: Tolerance) -> None:
    """The first score finds nothing resident, the others find what it left."""
    alone = probe([questions.score])[0]
    if not isinstance(alone, Scored):
        raise CanaryFailed(f"a score was not answered: {_got(alone)}")
    crowd: list[Request] = [Embed(text) for text in (*questions.texts, *questions.prompts)]
    among = probe([*crowd, questions.score, replace(questions.score, window=1)])
    _check_scores(among[-2], alone.probabilities, tolerance, "probabilities beside other requests")
    _check_scores(among[-1], alone.probabilities, tolerance, "probabilities through a window of one row")
    for request, together in zip(crowd, among, strict=False):
        cosine = _dot(_vector(together), _vector(probe([request])[0]))
        if not cosine >= 1.0 - tolerance.cosine:
            raise CanaryFailed(f"a vector beside other requests has cosine {cosine:.4f} with the one alone")


def _check_scores(outcome: Outcome, expected: Sequence[float], most: Tolerance, what: str) -> None:
    if not isinstance(outcome, Scored):
        raise CanaryFailed(f"a score was not answered: {_got(outcome)}")
    for got, wanted in zip(outcome.probabilities, expected, strict=True):
        apart = abs(_log_odds(got) - _log_odds(wanted))
        if not (abs(got - wanted) <= most.probability and apart <= most.log_odds):
            raise CanaryFailed(f"{what}: one is {wanted:.6g}, this engine has {got:.6g}")


def _log_odds(probability: float) -> float:
    """log(p / (1 - p)), for p of 1e-9 to 1 - 1e-9."""
    bounded = min(max(probability, 1e-9), 1 - 1e-9)
    return math.log(bounded / (1 - bounded))


def _vector(outcome: Outcome) -> tuple[float, ...]:
    if not isinstance(outcome, Embedded):
        raise CanaryFailed(f"a text was not embedded: {_got(outcome)}")
    return outcome.vector


def _dot(first: Sequence[float], second: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(first, second, strict=True))


def _got(outcome: Outcome) -> str:
    return getattr(outcome, "message", "") or f"{outcome}"[:200]
