"""A planted error must not pass the canary, neither with known answers nor without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

import pytest
import torch

from engine.attention.torch import TorchAttention
from engine.batch import KVCache, Part, single_rows
from engine.canary import (
    SIXTEEN_BIT,
    Answers,
    Questions,
    _check_scores,
    read_answers,
    read_data,
    read_questions,
    run_canary,
)
from engine.canary_answers import answer
from engine.engine import Engine
from engine.errors import CanaryFailed, ConfigError
from engine.model import Model
from engine.model_files import digest
from engine.pages import PagePool
from engine.request import Embedded, Failed, Generated, Outcome, Request, Score, Scored
from engine.runner import InFlight, Read, TorchRunner, single_reads
from mcp_discovery.model_store import DEFAULT
from tests.engine.fakes import make_core

PAGE_TOKENS = 16
OURS = ("a model", "an adapter")


def probe_of(
    model: Model, wrap: Callable[[TorchRunner], object] = lambda runner: runner, pages: int = 32
) -> Engine:
    shape = model.shape
    size = (shape.layers, pages + 1, 2, PAGE_TOKENS, shape.kv_heads, shape.head_dim)
    kv = KVCache(torch.zeros(size))
    core, _ = make_core(pages, PAGE_TOKENS, step_tokens=48, step_rows=16)
    core.limits = replace(core.limits, vocabulary=shape.vocabulary, context=shape.context)
    core.not_ready = "it has not passed its canary"
    core.pool = PagePool(pages, PAGE_TOKENS)
    runner = wrap(TorchRunner(model, TorchAttention(kv, shape), kv))
    engine = Engine(core, runner)  # type: ignore[arg-type]
    engine.start()
    return engine


@pytest.fixture
def known(make_tiny_model: Callable[..., Model], monkeypatch: pytest.MonkeyPatch) -> Model:
    """A tiny model whose answers are among the known ones."""
    model = make_tiny_model()
    data = read_data()
    fold = lambda values: [token % model.shape.vocabulary for token in values]  # noqa: E731
    asked = data["questions"]
    for name in ("prompts", "prefixes", "texts"):
        asked[name] = [fold(values) for values in asked[name]]
    asked["suffix"] = fold(asked["suffix"])
    asked["positive"], asked["negative"] = 1, 2
    with torch.inference_mode():
        answers = answer(model, read_questions(data))
    data["answers"].append(
        {
            "model_sha256": OURS[0],
            "adapter_sha256": OURS[1],
            "continuations": answers.continuations,
            "probabilities": answers.probabilities,
            "cosine": answers.cosine,
        }
    )
    monkeypatch.setattr("engine.canary.read_data", lambda: data)
    return model


def run(engine: Engine, name: tuple[str, str] = OURS) -> str:
    try:
        return run_canary(engine.probe, engine._core.limits.vocabulary, *name)
    finally:
        engine.close()


def test_known_answers_pass(known: Model) -> None:
    engine = probe_of(known)
    assert run(engine) == "known answers of the float32 reference"
    assert not engine.status().ready


@pytest.mark.parametrize("name", ["qkv", "o", "gate_up", "down", "mlp_norm"])
def test_a_wrong_weight_fails(known: Model, name: str) -> None:
    weight = getattr(known.weights.layers[1], name)
    weight.mul_(-1.0)
    with pytest.raises(CanaryFailed):
        run(probe_of(known))


def test_a_wrong_weight_of_an_unknown_model_is_not_found_and_that_is_said(known: Model) -> None:
    known.weights.layers[1].o.mul_(-1.0)
    assert "not known" in run(probe_of(known), ("another", ""))


class Shifted:
    """A runner that mixes pages up: rows of a step beside others read one page of their neighbour."""

    def __init__(self, runner: TorchRunner) -> None:
        self._runner = runner
        self.depth, self.kernels = runner.depth, runner.kernels

    def launch(self, parts: list[Part], reads: list[Read]) -> InFlight:
        rows = single_rows(parts)
        if len(rows) > 1:
            first = rows[1].pages[0]
            rows = [replace(row, pages=(first, *row.pages[1:])) if row.start else row for row in rows]
        return self._runner.launch([*rows], single_reads(parts, reads))


@pytest.mark.parametrize("name", [OURS, ("another", "")])
def test_mixed_up_pages_fail_with_and_without_known_answers(known: Model, name: tuple[str, str]) -> None:
    with pytest.raises(CanaryFailed):
        run(probe_of(known, Shifted), name)


class Broken(Shifted):
    def launch(self, parts: list[Part], reads: list[Read]) -> InFlight:
        raise RuntimeError("no such kernel")


def test_a_step_that_fails_fails_the_canary_and_logs_its_reason(
    known: Model, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(CanaryFailed, match="A step failed on the device"):
        run(probe_of(known, Broken))
    assert "no such kernel" in caplog.text


@dataclass
class Lying:
    """Answers as the reference does, but for one thing."""

    questions: Questions
    answers: Answers
    score: Callable[[Score], tuple[float, ...]]
    vector: tuple[float, float] = (1.0, 0.0)
    token: int = 0

    def __call__(self, requests: list[Request]) -> list[Outcome]:
        generated = iter(self.answers.continuations)
        vectors = iter([self.vector, (self.answers.cosine, (1 - self.answers.cosine**2) ** 0.5)])
        outcomes: list[Outcome] = []
        for request in requests:
            kind = type(request).__name__
            if isinstance(request, Score):
                outcomes.append(Scored(self.score(request)))
            elif kind == "Generate":
                tokens = next(generated)
                outcomes.append(Generated((tokens[0] + self.token, *tokens[1:])))
            else:
                outcomes.append(Embedded(next(vectors)))
        return outcomes


def lying(**lies: object) -> tuple[Lying, str]:
    data = read_data()
    name = data["answers"][0]["model_sha256"]
    answers = read_answers(data, name, data["answers"][0]["adapter_sha256"])
    assert answers is not None
    truth = {"score": lambda request: answers.probabilities}
    return Lying(read_questions(data), answers, **{**truth, **lies}), name  # type: ignore[arg-type]


def off(by: float, window: int | None) -> Callable[[Score], tuple[float, ...]]:
    probabilities = lying()[0].answers.probabilities
    return lambda request: tuple(p + by * (request.window == window) for p in probabilities)


def test_the_truth_passes() -> None:
    probe, name = lying()
    assert run_canary(probe, 49_152, name, "") == "known answers of the float32 reference"
    probe, name = lying(score=off(SIXTEEN_BIT.probability - 0.001, None))
    assert run_canary(probe, 49_152, name, "") == "known answers of the float32 reference"


@pytest.mark.parametrize(
    ("lies", "message"),
    [
        ({"token": 1}, "continuation came out wrong"),
        ({"score": off(SIXTEEN_BIT.probability + 0.001, None)}, "known probabilities: one is 0.343"),
        ({"score": off(SIXTEEN_BIT.probability + 0.001, 1)}, "row by row"),
        ({"score": off(float("nan"), None)}, "known probabilities: .* has nan"),
        ({"score": lambda request: (0.343074, 0.174823, 0.138134 / 2)}, "known probabilities: one is 0.138"),
        ({"vector": (0.9, 0.435889)}, "cosine"),
        ({"vector": (float("nan"), 0.0)}, "cosine"),
    ],
)
def test_a_lie_does_not_pass(lies: dict[str, object], message: str) -> None:
    probe, name = lying(**lies)
    with pytest.raises(CanaryFailed, match=message):
        run_canary(probe, 49_152, name, "")


def test_a_probability_near_nothing_is_compared_by_its_odds() -> None:
    probe, _ = lying()
    probe.answers = replace(probe.answers, probabilities=(1e-5, 1e-5, 1e-5))
    for got, passes in ((2e-5, True), (1e-4, False), (1e-6, False)):
        probe.score = lambda request, got=got: (got,) * 3
        outcome = probe([probe.questions.score])[0]
        if passes:
            _check_scores(outcome, probe.answers.probabilities, SIXTEEN_BIT, "known")
        else:
            with pytest.raises(CanaryFailed, match="known: one is 1e-05"):
                _check_scores(outcome, probe.answers.probabilities, SIXTEEN_BIT, "known")


def test_the_shipped_adapter_has_known_answers() -> None:
    """`python -m engine.canary_answers MODEL ADAPTER` computes them for a new one."""
    adapters = list(Path(str(resources.files("mcp_discovery").joinpath("adapters"))).glob("*.safetensors"))
    assert adapters
    for adapter in adapters:
        assert read_answers(read_data(), DEFAULT.file_sha256, digest(adapter)), f"none for {adapter.name}"


def test_a_request_that_was_not_answered_fails() -> None:
    failed = Failed("device_fault", "A step failed on the device; the engine has stopped.")
    with pytest.raises(CanaryFailed, match="the engine has stopped"):
        run_canary(lambda requests: [failed] * len(requests), 49_152, "unknown", "")


def test_too_few_pages_are_a_matter_of_configuration(make_tiny_model: Callable[..., Model]) -> None:
    model = make_tiny_model()
    with (
        probe_of(model, pages=1) as engine,
        pytest.raises(ConfigError, match=r"has 1 pages of 16 tokens, .* needs \d+: raise max_pages"),
    ):
        run_canary(engine.probe, model.shape.vocabulary, "unknown", "")
