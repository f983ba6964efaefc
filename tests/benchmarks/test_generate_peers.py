"""The comparison with other engines: what is measured, the weights handed over, and what a failure says."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from benchmarks import generate_peers as peers
from engine.model import Model
from engine.model_files import weight_tensors
from engine.weights import Weights, load_weights
from tests.engine.conftest import TINY, random_weights
from tests.engine.test_weights import named, write_gguf

CPU = torch.device("cpu")
SHAPE = replace(TINY["llama"], context=1024)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = Model(SHAPE, Weights.from_tensors(SHAPE, random_weights(SHAPE)))
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", model)


@pytest.fixture(scope="module")
def folder(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return peers.write_folder(gguf, tmp_path_factory.mktemp("folder") / "model")


class Scripted:
    """Ends what was offered in the groups given, every one with `length` tokens."""

    def __init__(self, groups: Sequence[int], length: int = peers.OUTPUT) -> None:
        self._groups, self._length = groups, length
        self.offered: list[list[int]] = []

    def offer(self, prompts: Sequence[list[int]]) -> None:
        self.offered = list(prompts)

    def ended(self) -> Iterator[peers.Ended]:
        at = 0
        for size in self._groups:
            yield [(index, (7,) * self._length) for index in range(at, at + size)]
            at += size
        while True:
            yield []

    def close(self) -> None: ...


def test_a_race_ends_with_the_last_request() -> None:
    peer = Scripted([0, 2, 3])
    times, answers = peers.race(peer, [[1]] * 5, limit_s=60)
    assert len(times) == 5
    assert times == sorted(times)
    assert answers.keys() == set(range(5))
    assert len(peer.offered) == 5


def test_a_race_ends_at_its_limit_with_what_has_ended() -> None:
    times, answers = peers.race(Scripted([2]), [[1]] * 5, limit_s=0.0)
    assert len(times) == len(answers) == 2


def test_an_answer_of_another_length_is_refused() -> None:
    with pytest.raises(RuntimeError, match="ended with 11 tokens, not 12"):
        peers.race(Scripted([5], length=peers.OUTPUT - 1), [[1]] * 5, limit_s=60)


@given(
    group=st.integers(1, 50),
    groups=st.integers(20, 60),
    gap=st.floats(0.001, 1.0),
    late=st.floats(0.0, 10.0),
)
def test_the_steady_rate_knows_no_start_and_no_groups(
    group: int, groups: int, gap: float, late: float
) -> None:
    """Groups that end at even gaps have one rate, whatever their size and however late the first is."""
    times = [late + gap * (1 + index // group) for index in range(group * groups)]
    found = peers.rates(times)
    assert found["steady_requests_per_s"] == pytest.approx(group / gap, rel=1e-3, abs=0.06)
    assert found["overall_requests_per_s"] == pytest.approx(len(times) / times[-1], abs=0.06)


def test_ends_all_at_once_have_no_steady_rate() -> None:
    assert peers.rates([2.0, 2.0]) == {"overall_requests_per_s": 1.0, "steady_requests_per_s": None}


def test_no_end_at_all_has_no_rate() -> None:
    with pytest.raises(RuntimeError, match="no request has ended"):
        peers.rates([])


def test_prompts_share_no_prefix_and_come_again() -> None:
    prompts = peers.make_prompts(200, 49_152, seed=1)
    assert {len(prompt) for prompt in prompts} == {peers.PROMPT}
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 200  # no page in common
    assert all(0 <= token < 49_152 for prompt in prompts for token in prompt)
    assert prompts == peers.make_prompts(200, 49_152, seed=1)


def test_the_folder_holds_the_weights_of_the_file(gguf: Path, folder: Path) -> None:
    shape, weights = load_weights(folder, torch.bfloat16, CPU)
    expected_shape, expected = load_weights(gguf, torch.bfloat16, CPU)
    assert shape == replace(expected_shape, norm_eps=shape.norm_eps)
    assert shape.norm_eps == pytest.approx(expected_shape.norm_eps)
    theirs = named(shape, expected)
    for name, tensor in named(shape, weights).items():
        assert torch.equal(tensor, theirs[name]), name
    assert named(shape, weights).keys() == dict(weight_tensors(shape)).keys()


def test_transformers_reads_the_folder_as_the_same_model(folder: Path) -> None:
    shape, weights = load_weights(folder, torch.float32, CPU)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert model.config.eos_token_id is None
    assert torch.equal(model.model.embed_tokens.weight, weights.embedding)
    queries = shape.heads * shape.head_dim
    assert torch.equal(model.model.layers[1].self_attn.q_proj.weight, weights.layers[1].qkv[:queries])
    assert torch.equal(model.lm_head.weight, weights.head)


def given_arguments(out: Path, gguf: Path, *more: str) -> Any:
    return peers.arguments(["--model", str(gguf), "--out", str(out), "--device", "cpu", *more])


def test_ours_runs_in_its_own_process(tmp_path: Path, gguf: Path) -> None:
    out = tmp_path / "results.json"
    peers.compete(given_arguments(out, gguf, "--only", "ours", "--requests", "3"))
    ours = json.loads(out.read_text())["results"]["ours"]
    assert "failed" not in ours
    assert ours["requests"] == 3
    assert ours["overall_requests_per_s"] > 0
    assert "first_tokens" not in ours
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.json", "results.ours.log"]


def test_an_early_end_leaves_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gguf: Path
) -> None:
    out = tmp_path / "results.json"
    written: list[dict[str, Any]] = []

    def run_peer(name: str, setting: peers.Setting, given: Any, log: Path) -> dict[str, Any]:
        if out.exists():
            written.append(json.loads(out.read_text())["results"])
        if name == "transformers":
            raise KeyboardInterrupt
        rate = {"ours": 900.0, "vllm": 600.0}[name]
        return {"steady_requests_per_s": rate, "first_tokens": {"0": 5}}

    monkeypatch.setattr(peers, "run_peer", run_peer)
    with pytest.raises(KeyboardInterrupt):
        peers.compete(given_arguments(out, gguf))
    after_ours, after_vllm = written
    assert after_ours.keys() == {"shape", "ours"}
    assert after_vllm.keys() == {"shape", "ours", "vllm"}
    assert after_vllm["ours"] == after_ours["ours"] == {"steady_requests_per_s": 900.0}
    assert after_vllm["vllm"]["first_tokens_as_ours"] == 1.0
    document = json.loads(out.read_text())
    assert document["results"] == after_vllm
    assert [target["measured"] for target in document["targets"]] == [1.5]


def test_a_failure_is_a_sentence_in_the_result(tmp_path: Path, gguf: Path, folder: Path) -> None:
    missing = peers.Setting(tmp_path / "missing.gguf", folder, "cpu", 100.0, 2)
    found = peers.run_peer("ours", missing, given_arguments(tmp_path / "o.json", gguf), tmp_path / "o.log")
    assert found["failed"].startswith("ours ended with exit code 1: ")
    assert "ModelError: there is no model at" in found["failed"]


def test_one_that_takes_too_long_is_ended(tmp_path: Path, gguf: Path, folder: Path) -> None:
    short = given_arguments(tmp_path / "o.json", gguf, "--timeout-s", "0.01")
    found = peers.run_peer("ours", peers.Setting(gguf, folder, "cpu", 100.0, 2), short, tmp_path / "o.log")
    assert found == {"failed": "ours had not ended after 0.01 s"}


def test_the_cause_is_told_rather_than_its_consequence() -> None:
    log = (
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
        "(Worker) ERROR ValueError: No available memory for the cache blocks.\n"
    )
    assert peers.failure("vllm", log, 1, 9) == (
        "vllm ended with exit code 1: ValueError: No available memory for the cache blocks."
    )
    assert peers.failure("vllm", "", -9, 9) == "vllm ended with exit code -9: it said nothing"
    assert peers.failure("vllm", "a\nb\n", 2, 9) == "vllm ended with exit code 2: b"


@pytest.mark.parametrize(
    ("failures", "asked"),
    [
        ([], [100.0]),
        (["no memory"], [100.0, 150.0]),
        (["no memory"] * 9, [100.0, 150.0, 200.0]),
        (["no such module"], [100.0]),
    ],
)
def test_vllm_gets_more_memory_only_where_it_lacked_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gguf: Path, failures: list[str], asked: list[float]
) -> None:
    seen: list[float] = []

    def run_peer(name: str, setting: peers.Setting, given: Any, log: Path) -> dict[str, Any]:
        seen.append(setting.memory_mib)
        return {"failed": failures[len(seen) - 1]} if len(seen) <= len(failures) else {"requests": 1}

    monkeypatch.setattr(peers, "run_peer", run_peer)
    setting = peers.Setting(gguf, tmp_path, "cuda", 100.0, 2)
    found = peers.run_vllm(setting, given_arguments(tmp_path / "o.json", gguf), tmp_path / "o.log")
    assert seen == asked
    assert found["given_mib"] == asked[-1]
    assert found["refused_with_less"] == [text for text in failures[: len(seen)] if "memory" in text]


def test_vllm_sees_its_own_packages_in_place_of_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", "ours")
    assert peers.child_environment("transformers", tmp_path)["PYTHONPATH"] == "ours"
    assert peers.child_environment("vllm", None)["PYTHONPATH"] == "ours"
    path = peers.child_environment("vllm", tmp_path)["PYTHONPATH"].split(":")
    assert path == [str(tmp_path), str(Path.cwd())]


def test_the_target_is_the_ratio_of_steady_rates() -> None:
    results: dict[str, dict[str, Any]] = {
        "ours": {"steady_requests_per_s": 900.0, "first_tokens": {"0": 5, "1": 6}, "nvml_peak_mib": 2700.0},
        "vllm": {"steady_requests_per_s": 600.0, "first_tokens": {"0": 5, "1": 7}},
        "transformers": {"failed": "it failed"},
    }
    compared = peers.compare(results)
    assert compared["vllm"] == {"steady_requests_per_s": 600.0, "first_tokens_as_ours": 0.5}
    assert compared["ours"] == {"steady_requests_per_s": 900.0, "nvml_peak_mib": 2700.0}
    assert compared["transformers"] == {"failed": "it failed"}
    assert peers.compare(results) == compared  # the tokens are still there for the next peer
    found = {target.key: target.measured for target in peers.targets(compared)}
    assert found == {"engine.generate_700_12_ratio_to_vllm": 1.5, "memory.allowance_mib": 2700.0}
    assert peers.targets({"vllm": results["vllm"]}) == []
