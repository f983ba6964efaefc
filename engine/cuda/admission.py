"""Whether a card can hold an engine: before the load by the plan, after it by measurement."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.cuda.costs import TORCH_ROUNDING, CardConstants, CudaCosts, shipped_constants
from engine.cuda.nvml import CardMemory, process_bytes, read_card
from engine.errors import LoadRefused
from engine.memory import MIB, MemoryPlan, plan_memory
from engine.model_files import read_shape

MEASURED_LINES = ("CUDA context", "modules", "graphs")


def plan_cuda(
    config: EngineConfig, model: Path, constants: CardConstants | None = None
) -> tuple[MemoryPlan, CardMemory]:
    """The plan and the card as it is now; `constants` None: those shipped. Nothing is allocated and no
    context is made."""
    card = read_card()
    costs = CudaCosts(constants or shipped_constants(card.name, card.driver, torch.__version__))
    return plan_memory(read_shape(model), config, costs), card


def measured_constants(card: CardMemory, allowance_mib: int, model: Path) -> CardConstants:
    """Measures the card anew by a load in a child process, where a whole allowance is free for it.

    Raises LoadRefused where it is not, or where the child fails.
    """
    free_mib = card.free // MIB
    if free_mib < allowance_mib:
        raise LoadRefused(
            f"measuring loads an engine, which needs {allowance_mib:,} MiB free, and {free_mib:,} MiB are",
            needed_mib=allowance_mib,
            free_mib=free_mib,
        )
    command = [sys.executable, "-m", "engine.cuda.measure", str(model)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise LoadRefused(
            f"the measuring load failed: {last[0]}", needed_mib=allowance_mib, free_mib=free_mib
        )
    entry = json.loads(done.stdout.splitlines()[-1])
    return CardConstants(
        context_mib=float(entry["context_mib"]),
        modules_mib=float(entry["modules_mib"]),
        graphs_mib=float(entry["graphs_mib"]),
        source=f"measured now on {card.name}, driver {card.driver}",
    )


def held_bytes(plan: MemoryPlan) -> int:
    """What this process holds on the card already: a context stays until the process ends, and a second
    load must not be asked to find room for it again.

    Where NVML does not list the process, a container's usual case, the context is as large as the plan
    says. Kernels that are loaded already are not counted then: which they are, nobody tells.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0
    listed = process_bytes(os.getpid())
    if listed is not None:
        return listed
    return torch.cuda.memory_reserved() + _line(plan, "CUDA context")


def admit(plan: MemoryPlan, card: CardMemory, held: int) -> None:
    """Raises LoadRefused where the card has less free than the whole allowance needs, with the shortfall."""
    needed = plan.allowance - held
    if card.free >= needed:
        return
    needed_mib, free_mib = -(-needed // MIB), card.free // MIB
    raise LoadRefused(
        f"the allowance needs {needed_mib:,} MiB free on {card.name} and {free_mib:,} MiB are: "
        f"{needed_mib - free_mib:,} MiB short; free memory on the card or lower engine.allowance_mib",
        needed_mib=needed_mib,
        free_mib=free_mib,
    )


def admit_graphs(plan: MemoryPlan, *, reserved: int, cap: int, free: int) -> None:
    """Raises LoadRefused where torch (`reserved` of at most `cap` bytes) or the card (`free`) could not give
    what the captures take: memory that runs out inside a capture ends the process instead of raising.

    Arithmetic alone. A trial allocation would itself be rounded up beyond what the cap leaves.
    """
    driver = _line(plan, "graphs")
    short = max(reserved + TORCH_ROUNDING - cap, driver - free)
    if short > 0:
        raise LoadRefused(
            f"captured steps need {-(-short // MIB):,} MiB more than the card and the allowance leave; "
            "free memory on the card or lower engine.step_tokens",
            needed_mib=-(-driver // MIB),
            free_mib=free // MIB,
        )


def torch_bytes(plan: MemoryPlan) -> int:
    """The most that torch may hold: the plan less what the driver and the libraries take beside it."""
    return plan.total - sum(line.bytes for line in plan.lines if line.name in (*MEASURED_LINES, "guard"))


def _line(plan: MemoryPlan, name: str) -> int:
    return next(line.bytes for line in plan.lines if line.name == name)


def verify(plan: MemoryPlan, before: CardMemory, held: int) -> None:
    """NVML against the plan, once everything that serving can reach has run.

    The process's own figure where NVML lists it; else the card's difference, which a neighbour that
    grew meanwhile makes larger: then the load is refused too, since its memory is no longer there.
    """
    listed = process_bytes(os.getpid())
    footprint = listed if listed is not None else before.free + held - read_card().free
    if footprint > plan.allowance:
        raise LoadRefused(
            f"the loaded engine takes {footprint / MIB:,.0f} MiB and is allowed {plan.allowance // MIB:,}: "
            "run mcp-discovery plan --measure on this machine, or lower engine.step_tokens",
            needed_mib=-(-footprint // MIB),
            free_mib=plan.allowance // MIB,
        )


def out_of_memory(allowance_mib: int, free_mib: int, message: str) -> LoadRefused:
    """Why torch had no memory for a load: the card is full, or the plan, torch's bound, is too small."""
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", message)
    what = f" ({asked[1]} more were asked for)" if asked else ""
    if free_mib < allowance_mib:
        sentence = (
            f"the card ran out of memory while the engine was loading{what}, {free_mib:,} MiB are free now; "
            "something else took what was free before: try again when it is released"
        )
    else:
        sentence = (
            f"loading took more than the plan of {allowance_mib:,} MiB has{what}, though {free_mib:,} MiB "
            "are free; run mcp-discovery plan --measure on this machine, or lower engine.step_tokens"
        )
    return LoadRefused(sentence, needed_mib=allowance_mib, free_mib=free_mib)
