"""Qwen3-0.6B's whole shape, with random weights, inside the default allowance and beside transformers.

Steps of 2,048 tokens: at the default of 8,192 the activations would leave 4,000 tokens of pages, so they
leave 5,900.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.engine import CardSampler
from engine import Engine, EngineConfig
from engine.cuda.costs import CUBLAS_WORKSPACE_BYTES, TORCH_ROUNDING
from engine.cuda.load import release
from tests.engine.qwen3 import WHOLE, Questions, Reference, ask, check, make_folder

pytestmark = pytest.mark.gpu
CONFIG = EngineConfig(device="cuda", step_tokens=2048)
MARGIN = 0.1  # of logits with a standard deviation of 2: a few times what float16 makes of them


def test_the_whole_shape_serves_inside_the_allowance_and_agrees_with_transformers(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, WHOLE)
    questions = Questions.random(WHOLE, prompts=(1, 40, 700, 1500), output=24)
    sampler = CardSampler()
    try:
        with Engine.create(CONFIG, folder) as engine:
            answers = ask(engine, questions)
            assert engine.drain(timeout=30)
            status, reserved = engine.status(), torch.cuda.memory_reserved()
            assert engine.loaded is not None
            plan = engine.loaded.plan
        # A failed comparison keeps the frame, and with it the engine, over which later tests would trip.
        del engine
        release()
    finally:
        peak = sampler.close()
    print(f"{plan.table()}\nNVML peak {peak / 2**20:,.1f} MiB; {status.kernels}")
    assert (plan.allowance >> 20, status.pages.held) == (2740, 0)
    assert status.pages.total * CONFIG.page_tokens > 5000
    tensors = -(-plan.tensor_bytes // TORCH_ROUNDING) * TORCH_ROUNDING
    assert 0 <= reserved - tensors - CUBLAS_WORKSPACE_BYTES <= TORCH_ROUNDING
    assert peak <= plan.total
    check(questions, answers, Reference(folder), MARGIN)
