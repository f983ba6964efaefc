"""An engine is on the card whole or not at all: stages and allocations that fail, neighbours, exits."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import engine.cuda.load as load
from engine.config import EngineConfig
from engine.cuda import admission
from engine.cuda.costs import CUBLAS_WORKSPACE_BYTES, TORCH_ROUNDING
from engine.cuda.nvml import MIB, read_card
from engine.errors import EngineFault, LoadRefused
from engine.load import Loaded
from tests.faults.tiny_model import make_model
from tests.gpu.conftest import SMOL

pytestmark = pytest.mark.gpu
CONFIG = EngineConfig(device="cuda", step_tokens=1024, step_rows=64)
STAGES = ("admission", "context", "allocation", "weights", "kernels", "graphs", "runner", "verification")
NOISE = 4 * MIB  # what NVML's figure may differ by between two looks at the same state


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random model of four layers."""
    return make_model(tmp_path_factory.mktemp("model"), SMOL)


class Neighbour:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.neighbour"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def tell(self, order: str) -> int:
        """Does it and returns what is free now, in MiB."""
        assert self._process.stdin is not None
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()
        return int(self._line())

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def neighbour() -> Iterator[Neighbour]:
    other = Neighbour()
    yield other
    other.close()


def loaded_once(model: Path) -> Loaded:
    """Loads, so that context and kernels are there, whatever ran before."""
    return load.load_cuda(CONFIG, model, None)


@pytest.fixture
def baseline(model: Path) -> int:
    """Bytes in use on the card with everything loaded lazily in place and the engine gone."""
    loaded_once(model)
    load.release()
    assert torch.cuda.memory_reserved() == 0
    return read_card().used


def test_a_load_takes_what_its_plan_says(model: Path, baseline: int) -> None:
    torch.cuda.reset_peak_memory_stats()
    loaded = loaded_once(model)
    plan, held = loaded.plan, admission.held_bytes(loaded.plan)
    # A failed comparison keeps the frame, and with it the engine, which the tests after it would trip over.
    del loaded
    reserved = torch.cuda.max_memory_reserved()
    load.release()
    tensors = -(-plan.tensor_bytes // TORCH_ROUNDING) * TORCH_ROUNDING
    # One more segment of torch's may come, for small tensors: the plan's guard has room for two.
    assert 0 <= reserved - tensors - CUBLAS_WORKSPACE_BYTES <= TORCH_ROUNDING
    assert reserved <= admission.torch_bytes(plan)
    assert held <= plan.allowance
    assert abs(read_card().used - baseline) <= NOISE


@pytest.mark.parametrize("stage", STAGES)
def test_a_failure_at_any_stage_leaves_the_card_as_it_was(model: Path, baseline: int, stage: str) -> None:
    def fail(name: str) -> None:
        if name == stage:
            raise EngineFault("planted")

    for _ in range(2):
        with pytest.raises(EngineFault, match="planted"):
            load.load_cuda(CONFIG, model, None, on_stage=fail)
        assert torch.cuda.memory_reserved() == 0
        assert abs(read_card().used - baseline) <= NOISE


def test_every_allocation_that_fails_leaves_the_card_as_it_was(
    model: Path, baseline: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cap that lets one allocation more through each time, until a load succeeds."""
    whole = admission.torch_bytes(loaded_once(model).plan)
    load.release()
    refused = 0
    for short in range(60, -1, -2):
        monkeypatch.setattr(load, "torch_bytes", lambda plan, short=short: whole - short * MIB)
        try:
            load.load_cuda(CONFIG, model, None)
        except LoadRefused:
            refused += 1
        load.release()
        assert torch.cuda.memory_reserved() == 0
        assert abs(read_card().used - baseline) <= NOISE
    assert 10 <= refused <= 30


def test_a_planted_leak_is_seen(model: Path, baseline: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[object] = []
    real = load.allocate_at_once
    monkeypatch.setattr(load, "allocate_at_once", lambda *given: kept.append(real(*given)) or kept[-1])

    def fail(name: str) -> None:
        if name == "kernels":
            raise EngineFault("planted")

    with pytest.raises(EngineFault):
        load.load_cuda(CONFIG, model, None, on_stage=fail)
    assert torch.cuda.memory_reserved() > 0
    assert read_card().used - baseline > 500 * MIB
    kept.clear()
    load.release()


def test_four_loads_beside_a_neighbour_that_fills_the_card_end_where_they_began(
    model: Path, baseline: int, neighbour: Neighbour
) -> None:
    def let_the_neighbour_in(name: str) -> None:
        if name == "allocation":
            neighbour.tell("leave 200")

    neighbour.tell("free")
    before = read_card().used
    for _ in range(4):
        with pytest.raises(LoadRefused, match="ran out of memory"):
            load.load_cuda(CONFIG, model, None, on_stage=let_the_neighbour_in)
        neighbour.tell("free")
        assert torch.cuda.memory_reserved() == 0
        assert abs(read_card().used - before) <= NOISE


def test_admission_beside_a_neighbour_is_exact(model: Path, baseline: int, neighbour: Neighbour) -> None:
    plan, _ = admission.plan_cuda(CONFIG, model)
    held_mib = -(-admission.held_bytes(plan) // MIB)
    free = neighbour.tell(f"leave {2740 - held_mib - 10}")
    with pytest.raises(LoadRefused) as refused:
        load.load_cuda(CONFIG, model, None)
    assert abs(refused.value.free_mib - free) <= 2
    assert abs(refused.value.short_mib - (2740 - held_mib - free)) <= 2
    assert neighbour.tell(f"leave {2740 - held_mib + 4}") >= 2740 - held_mib
    load.load_cuda(CONFIG, model, None)
    load.release()


def in_a_process_of_its_own(program: str, model: Path) -> str:
    """The last line that a program prints which has no context yet; `model` is its argument."""
    given = (
        "import sys; from pathlib import Path; from engine.config import EngineConfig\n"
        "from engine.cuda.costs import CardConstants; from engine.cuda.load import load_cuda\n"
        "from engine.cuda.nvml import read_card; from engine.errors import LoadRefused\n"
        "config = EngineConfig(device='cuda', step_tokens=1024, step_rows=64)\n"
    )
    command = [sys.executable, "-c", given + program, str(model)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_a_plan_without_the_context_is_caught(model: Path) -> None:
    """The mutant whose pages take what the context needs: its footprint is above the allowance."""
    refused = in_a_process_of_its_own(
        "try: load_cuda(config, Path(sys.argv[1]), None, constants=CardConstants(0.0, 0.0, 16.0, 'mutant'))\n"
        "except LoadRefused as error: print(error)",
        model,
    )
    assert "is allowed 2,740" in refused


def test_an_exit_returns_the_card(model: Path) -> None:
    before = read_card().used
    used = in_a_process_of_its_own(
        "loaded = load_cuda(config, Path(sys.argv[1]), None)\nprint(read_card().used)", model
    )
    assert int(used) - before > 2000 * MIB
    assert read_card().used == before
