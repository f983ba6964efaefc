"""The hidden states of a step, once they are on the host, against the same in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from engine.batch import StepRow
from engine.cuda.outputs import Wanted
from engine.errors import EngineFault
from engine.runner import Output, Read, ReadPair, ReadVector

HIDDEN, VOCABULARY = 576, 40


def wanted(reads: list[Read]) -> Wanted:
    rows = [StepRow(tokens=(1,), start=0, pages=(0,), output=True) for _ in reads]  # type: ignore[arg-type]
    return Wanted.of(rows, reads)


def read(states: Tensor, head: Tensor, reads: list[Read]) -> list[Output]:
    outputs: list[Output] = [0] * len(reads)
    wanted(reads).read_states(states, lambda one, other: head[one].float() - head[other].float(), outputs)
    return outputs


def test_scores_and_vectors_are_those_of_float64_whatever_stands_between_them() -> None:
    random = torch.Generator().manual_seed(3)
    head = torch.randn((VOCABULARY, HIDDEN), generator=random).to(torch.float16)
    states = torch.randn((60, HIDDEN), generator=random).to(torch.float16)
    reads: list[Read] = [
        ReadVector() if place % 7 == 3 else ReadPair(place % 3, 5 + place % 2) for place in range(len(states))
    ]
    for state, wants, output in zip(states.double(), reads, read(states, head, reads), strict=True):
        if isinstance(wants, ReadPair):
            logit = float(state @ (head[wants.positive].double() - head[wants.negative].double()))
            assert output == pytest.approx(1.0 / (1.0 + math.exp(-logit)), abs=1e-5)
        else:
            assert torch.allclose(torch.tensor(output, dtype=torch.float64), state / state.norm(), atol=1e-6)


@pytest.mark.parametrize("size", [0.0, 100.0, 1e4])
def test_scores_stay_between_0_and_1_however_far_the_logits_are_apart(size: float) -> None:
    head = torch.zeros((2, HIDDEN), dtype=torch.float16)
    head[0] = size
    states = torch.stack([torch.ones(HIDDEN), -torch.ones(HIDDEN)]).to(torch.float16)
    ones = read(states, head, [ReadPair(0, 1), ReadPair(0, 1)])
    assert ones == ([0.5, 0.5] if not size else [1.0, pytest.approx(0.0)])


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("kind", [ReadPair(0, 1), ReadVector()])
def test_one_value_that_is_not_finite_ends_the_step(value: float, kind: Read) -> None:
    head = torch.ones((2, HIDDEN), dtype=torch.float16)
    head[1] = 0.5
    states = torch.ones((20, HIDDEN), dtype=torch.float16)
    states[11, 17] = value
    with pytest.raises(EngineFault, match="not finite"):
        read(states, head, [kind] * len(states))


def test_a_vector_without_a_length_stays_one() -> None:
    states = torch.zeros((1, HIDDEN), dtype=torch.float16)
    assert read(states, states, [ReadVector()]) == [(0.0,) * HIDDEN]
