"""`mcp-discovery train`: a run from the command line, and what it says where it cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.weights import read_adapter
from mcp_discovery.cli import main
from mcp_discovery.model_store import digest
from mcp_discovery.training.data import DataError
from mcp_discovery.training.options import TrainOptions, changed

SMALL = ("groups=2", "candidates=4", "pairs=2", "rank=4", "alpha=8", "log_every=1", "held_queries=4")


def train(base: Path, sets: Path, out: Path, *more: str) -> int:
    small = [part for setting in SMALL for part in ("--set", setting)]
    where = ["--model", str(base), "--out", str(out), "--device", "cpu", "--steps", "3"]
    return main(["train", str(sets), *where, *small, *more])


def test_a_run_leaves_an_adapter_that_a_second_run_goes_on_from(
    tiny_base: Path, tool_set: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    larger = ("--set", "rank=6", "--set", "alpha=12")
    assert train(tiny_base, tool_set, first, "--adapter", "none", *larger) == 0
    told = capsys.readouterr().out
    assert "step 3 of 3" in told
    assert f"serve --adapter {first}" in told
    calibration = json.loads(first.with_suffix(".json").read_text())
    assert calibration["adapter_sha256"] == digest(first)
    assert not first.with_suffix(".checkpoint").exists()
    assert train(tiny_base, tool_set, second, "--adapter", str(first), "--hold-out", "0") == 0
    before, after = (read_adapter(path, digest(tiny_base)) for path in (first, second))
    assert after.metadata["rank"] == "6"
    moved = max(float((before.pairs[name][1] - after.pairs[name][1]).abs().max()) for name in before.pairs)
    assert 0 < moved < 3 * 3e-4  # three small steps from where the first ended


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--out", "adapter.bin"], "an adapter is a .safetensors file"),
        (["--set", "depth=3"], "there is no training option to set by 'depth=3'"),
        (["--set", "groups=few"], "'groups=few' needs a whole number after ="),
        (["--hold-out", "1.5"], "hold out a share between 0 and 1 of office"),
        (["--adapter", "missing.safetensors"], "does not exist"),
        (["--set", "rank=90000"], "an adapter of rank 90000 is larger"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    tiny_base: Path,
    tool_set: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert train(tiny_base, tool_set, tmp_path / "a.safetensors", "--adapter", "none", *arguments) == 2
    told = capsys.readouterr().err
    assert sentence in told
    assert "Traceback" not in told


def test_a_folder_without_a_set_is_named(
    tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tiny_base, tmp_path, tmp_path / "a.safetensors") == 2
    assert f"{tmp_path} is not a tool set" in capsys.readouterr().err


def test_any_option_can_be_set_by_name(tiny_base: Path) -> None:
    options = TrainOptions(tiny_base)
    found = changed(options, ["learning_rate=1e-4", "keep_at=0.5,0.8", "foreign=0.3", "factors.office=2"])
    assert (found.learning_rate, found.keep_at, found.mixture.foreign) == (1e-4, (0.5, 0.8), 0.3)
    assert found.factors == {**options.factors, "office": 2.0}
    assert changed(options, []) == options
    for setting in ("model=elsewhere", "steps=2.5", "factors=2", "steps.a=2", "compiled=perhaps"):
        with pytest.raises(DataError, match=r"there is no training option|needs"):
            changed(options, [setting])
