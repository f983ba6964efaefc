"""A run on a tiny base: it learns, it resumes exactly, and it says what is wrong in a sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.weights import load_weights, read_adapter
from mcp_discovery.discovery.prompts import VERSION
from mcp_discovery.model_store import digest
from mcp_discovery.training import train
from mcp_discovery.training.batches import BatchSize
from mcp_discovery.training.data import DataError
from mcp_discovery.training.groups import Mixture
from mcp_discovery.training.options import TrainOptions
from mcp_discovery.training.train import main, run_training, schedule


def make_options(base: Path, **changed: object) -> TrainOptions:
    options = TrainOptions(
        model=base,
        steps=8,
        rank=4,
        alpha=8.0,
        learning_rate=3e-3,
        size=BatchSize(groups=3, candidates=4, pairs=3),
        mixture=Mixture(augmentation=0.3),
        mine_at=(0.5,),
        keep_at=(0.5, 0.75),
        device="cpu",
        log_every=4,
    )
    return replace(options, **changed)  # type: ignore[arg-type]


def test_loss_goes_down_and_the_adapter_loads(tiny_base: Path, tool_set: Path, tmp_path: Path) -> None:
    out = tmp_path / "adapter.safetensors"
    options = make_options(tiny_base, steps=40, mine_at=(), dev=(tool_set,), dev_queries=6, log_every=10)
    report = run_training([tool_set], out, options)
    assert report.history[-1]["loss"] < 0.8 * report.history[0]["loss"]
    adapter = read_adapter(out, digest(tiny_base))
    assert adapter.metadata["prompt_version"] == VERSION
    load_weights(tiny_base, torch.float32, torch.device("cpu"), adapter=adapter)
    assert report.sha256 == digest(out)
    stored = json.loads(out.with_suffix(".report.json").read_text())
    assert set(stored["dev"]["100%"]["figures"]["office"]) >= {"bm25", "dense", "rrf", "scored"}
    assert "step 40 of 40" in out.with_suffix(".log").read_text()


def test_the_best_on_what_was_held_out_is_written(tiny_base: Path, tool_set: Path, tmp_path: Path) -> None:
    out = tmp_path / "adapter.safetensors"
    rate = {"learning_rate": 0.02, "also_written": 1}
    report = run_training([tool_set], out, make_options(tiny_base, hold_out={"office": 0.5}, **rate))
    merits = {name: verdict.merit for name, verdict in report.held_out.items()}
    assert list(merits) == ["50%", "75%", "100%", "50%-100%"]
    assert len(set(merits.values())) > 1
    assert merits[report.chosen] == max(merits.values())
    metadata = read_adapter(out, digest(tiny_base)).metadata
    assert metadata["snapshot"] == report.chosen
    assert len(list(tmp_path.glob("adapter.*.safetensors"))) == 1  # the next best


@pytest.mark.parametrize("stopped_at", [3, 5, 7])  # before and after mining, and after two snapshots
def test_a_resumed_run_ends_in_the_same_weights(
    tiny_base: Path, tool_set: Path, tmp_path: Path, stopped_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mean = "50%-100%"  # of snapshots from before and after the break
    whole = run_training([tool_set], tmp_path / "whole.safetensors", make_options(tiny_base, choose=mean))
    checkpoint = tmp_path / "checkpoint.pt"
    options = make_options(tiny_base, choose=mean, checkpoint=checkpoint, save_every_s=0.0)

    class Interrupted(Exception):
        pass

    def interrupt(run: train._Run, *rest: object) -> None:
        if run._step == stopped_at:
            raise Interrupted
        train_step(run, *rest)  # type: ignore[arg-type]

    train_step = train._Run._train
    with monkeypatch.context() as patch:
        patch.setattr(train._Run, "_train", interrupt)
        with pytest.raises(Interrupted):
            run_training([tool_set], tmp_path / "parts.safetensors", options)
    parts = run_training([tool_set], tmp_path / "parts.safetensors", options)
    assert parts.steps == whole.steps == 8
    expected, found = load_file(whole.adapter), load_file(parts.adapter)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_the_seed_decides(tiny_base: Path, tool_set: Path, tmp_path: Path) -> None:
    runs = [
        run_training([tool_set], tmp_path / f"{run}.safetensors", make_options(tiny_base, steps=2, seed=seed))
        for run, seed in enumerate((1, 1, 2))
    ]
    first, same, other = (load_file(run.adapter) for run in runs)
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_what_cannot_be_done_is_said_in_a_sentence(
    tiny_base: Path, tool_set: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DataError, match="at least 1 step"):
        TrainOptions(model=tiny_base, steps=0)
    arguments = ["--model", str(tiny_base), "--out", str(tmp_path / "a.safetensors"), "--steps", "1"]
    assert main(["--data", str(tmp_path), *arguments]) == 2
    assert "is not a tool set" in capsys.readouterr().err
    assert main(["--data", str(tool_set), *arguments, "--factor", "office"]) == 2
    assert "NAME=NUMBER" in capsys.readouterr().err


def test_the_rate_rises_then_falls() -> None:
    rates = [schedule(at / 100, 0.03, 0.02) for at in range(101)]
    assert max(rates) == rates[3] == 1.0
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[-1] == pytest.approx(0.02)
