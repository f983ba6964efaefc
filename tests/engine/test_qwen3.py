"""Qwen3 from published files through the whole engine, beside transformers: the shape in small."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import Engine, EngineConfig
from tests.engine.qwen3 import TINY, Questions, Reference, ask, check, make_folder

MARGIN = 1e-3  # float32 on both sides


@pytest.mark.parametrize("step_tokens", [64, 512], ids=["sliced", "whole"])
def test_scores_and_continuations_agree_with_transformers(tmp_path: Path, step_tokens: int) -> None:
    folder = make_folder(tmp_path, TINY)
    questions = Questions.random(TINY, prompts=(1, 40, 300), output=16)
    config = EngineConfig(
        device="cpu", dtype="float32", allowance_mib=4096, step_tokens=step_tokens, max_pages=200
    )
    with Engine.create(config, folder) as engine:
        answers = ask(engine, questions)
    check(questions, answers, Reference(folder), MARGIN)
