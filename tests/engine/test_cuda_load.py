"""A load and its steps on a card that is counted: torch takes what the plan says, whatever the shape."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import Part, StepRow
from engine.config import EngineConfig, ModelShape
from engine.cuda.admission import torch_bytes
from engine.cuda.costs import PIECES_ROUNDING, TORCH_ROUNDING, CudaCosts
from engine.cuda.sizes import MOST_COLUMNS, column_slices, head_buffers
from engine.errors import LoadRefused
from engine.memory import LOGIT_ROWS, MIB, MemoryPlan, allocate_at_once, plan_memory
from engine.runner import Read, ReadPair, ReadToken, ReadVector, Runner
from engine.weights import Weights
from tests.engine.card import WORKSPACE, Card, install, scratch_bytes
from tests.engine.qwen3 import WHOLE
from tests.engine.test_cuda_plan import CONSTANTS, SMOLLM2

COSTS = CudaCosts(CONSTANTS)
LARGE = replace(SMOLLM2, vocabulary=151_936)
SHAPES = {
    "smollm2": SMOLLM2,
    "qwen3": WHOLE,
    "smollm2, large vocabulary": LARGE,
    "qwen3, small vocabulary": replace(WHOLE, vocabulary=49_152),
    "rows that torch splits": replace(SMOLLM2, vocabulary=130_561),
    "untied": replace(SMOLLM2, tied_embeddings=False),
}
PAGES = {"float16": {}, "bfloat16": {"dtype": "bfloat16"}, "fp8": {"kv_dtype": "fp8_e4m3"}}
MODULES = ("load", "runner", "head", "step")  # those that keep what they imported of the card


class Machine:
    """One with a counted card, and `engine.cuda` over it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.card = Card()
        install(patch, self.card)
        self.load: Any = import_module("engine.cuda.load")
        self.head: Any = import_module("engine.cuda.head")
        patch.setattr(self.load, "read_card", lambda: SimpleNamespace(free=100_000 * MIB))

    def run(self, shape: ModelShape, config: EngineConfig, *, cap: int | None = None) -> MemoryPlan:
        """All of a load that runs on the card, between admission and verification, and steps after it."""
        plan = plan_memory(shape, config, COSTS)
        self.card.clear(torch_bytes(plan) if cap is None else cap)
        self._patch.setattr(self.load, "torch_bytes", lambda plan: self.card.allocator.cap)
        self._patch.setattr(
            self.load,
            "load_weights",
            lambda *given, into, adapter: (shape, Weights.from_tensors(shape, into)),
        )
        with self.card.watching():
            allocation = allocate_at_once(plan, torch.device("meta"))
            runner = self.load._runner(config, shape, Path(), None, COSTS, allocation, lambda stage: None)
        with ThreadPoolExecutor(1) as thread:
            thread.submit(self._step, runner).result()
        return plan

    def _step(self, runner: Runner) -> None:
        """Reads in every way, alone and mixed; in a thread that is not the one that loaded."""
        pairs: list[Read] = [ReadPair(1, 2), ReadPair(3, 4)]
        tokens: list[Read] = [ReadToken(), ReadToken(temperature=0.7), ReadToken(allowed=(5, 6))]
        vector: list[Read] = [ReadVector()]
        many: list[Read] = [ReadToken()] * 150
        with self.card.watching():
            for reads in (pairs, tokens, vector, [*pairs, *vector, *tokens], many):
                rows: list[Part] = [StepRow(array("i", [7] * 3), 0, (0,), output=True) for _ in reads]
                runner.launch(rows, reads).collect()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    names = [f"engine.cuda.{name}" for name in MODULES]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield Machine(monkeypatch)
    for name in names:
        sys.modules.pop(name, None)


def reserved(plan: MemoryPlan) -> int:
    """One allocation and one workspace, as torch rounds them."""
    return -(-plan.tensor_bytes // (2 * MIB)) * 2 * MIB + WORKSPACE


shapes = st.builds(
    replace,
    st.sampled_from([SMOLLM2, WHOLE]),
    layers=st.integers(1, 30),
    vocabulary=st.integers(1, 200_000),
    intermediate=st.integers(1, 4000),
    context=st.integers(1, 50_000),
)


@given(shapes, st.integers(1, 4096), st.sampled_from(list(PAGES.values())))
def test_a_plan_leaves_torch_its_guard_and_less_than_a_rounding_more(
    shape: ModelShape, step_tokens: int, pages: dict[str, Any]
) -> None:
    plan = plan_memory(shape, EngineConfig(device="cuda", step_tokens=step_tokens, **pages), COSTS)
    guard = next(line.bytes for line in plan.lines if line.name == "torch guard")
    lost = plan.tensor_bytes - sum(line.bytes for line in plan.lines if line.dtype)
    assert lost <= PIECES_ROUNDING
    assert guard <= torch_bytes(plan) - reserved(plan) <= guard + TORCH_ROUNDING + PIECES_ROUNDING


@pytest.mark.parametrize("pages", PAGES.values(), ids=PAGES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_torch_takes_the_tensors_and_one_workspace_and_nothing_else(
    machine: Machine, shape: ModelShape, pages: dict[str, Any]
) -> None:
    plan = machine.run(shape, EngineConfig(device="cuda", step_tokens=2048, **pages))
    assert machine.card.allocator.peak == reserved(plan)


def test_a_reduction_that_torch_splits_would_take_what_no_line_has(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.head, "column_slices", lambda vocabulary: [(0, vocabulary)])
    plan = machine.run(LARGE, EngineConfig(device="cuda", step_tokens=512))
    assert machine.card.allocator.peak == reserved(plan) + 4 * MIB  # on the stream, in the captures' pool
    assert machine.card.allocator.reserved == reserved(plan) + 2 * MIB  # captures share theirs


def test_memory_never_runs_out_inside_a_capture(machine: Machine) -> None:
    config = EngineConfig(device="cuda", step_tokens=512)
    needed = reserved(machine.run(LARGE, config))
    for short in (1, 2, 4, 20, 34, 36, 300):
        with pytest.raises((LoadRefused, torch.OutOfMemoryError)):
            machine.run(LARGE, config, cap=needed + 2 * MIB - short * MIB)


@pytest.mark.parametrize("vocabulary", [1, 500, MOST_COLUMNS, MOST_COLUMNS + 1, 130_561, 151_936, 1 << 20])
def test_no_slice_of_a_vocabulary_is_split_and_none_of_it_is_left_out(vocabulary: int) -> None:
    slices = column_slices(vocabulary)
    assert [column for start, stop in slices for column in range(start, stop)] == list(range(vocabulary))
    for start, stop in slices:
        assert scratch_bytes(LOGIT_ROWS, stop - start) == scratch_bytes(8, stop - start) == (0, 0)


def test_the_limit_of_a_reduction_is_torchs() -> None:
    assert scratch_bytes(64, 130_560) == (0, 0)
    assert scratch_bytes(64, 130_561) == (16 * 64 * 9, 4 * 64)
    assert scratch_bytes(8, 151_936) == (16 * 8 * 19, 4 * 8)


@pytest.mark.parametrize("vocabulary", [1000, MOST_COLUMNS + 1, 151_936])
def test_the_likeliest_token_of_slices_is_that_of_all_columns(machine: Machine, vocabulary: int) -> None:
    shape = replace(SMOLLM2, vocabulary=vocabulary, hidden=8)
    buffers = {
        name: torch.zeros(size, dtype=getattr(torch, dtype))
        for name, (size, dtype, _) in head_buffers(shape, "float16").items()
    }
    head = machine.head.CapturedHead(torch.zeros(vocabulary, 8), buffers, None)
    generator = torch.Generator().manual_seed(1)
    head.logits.copy_(torch.randint(0, 40_000, head.logits.shape, generator=generator).float())
    head.logits[1] = 3.0  # equal everywhere: the first
    head.logits[2, -1] = 50_000.0
    head.logits[3, 7] = torch.nan
    for rows in (8, LOGIT_ROWS):
        head._choose(rows)
        logits, tokens = buffers["best logits"][:rows], buffers["best tokens"][:rows]
        best = head.logits[:rows].nan_to_num(torch.inf).amax(dim=1)
        assert torch.equal(logits.nan_to_num(torch.inf), best)
        first = (head.logits[:rows].nan_to_num(torch.inf) == best[:, None]).int().argmax(dim=1)
        assert torch.equal(tokens, first)
