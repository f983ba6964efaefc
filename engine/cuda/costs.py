"""What an engine costs on a card besides weights and pages: computed lines and measured ones.

A CUDA context, the kernels that libraries load when they are first used, and captured graphs cannot be
computed. They are constants of a card, a driver and the libraries' versions, measured by loading an
engine stage by stage in a process of its own (`measure.py`) and shipped in `card_constants.json`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

import torch

from engine.attention.flashinfer import int_workspace_bytes
from engine.config import EngineConfig, ModelShape
from engine.cuda.sizes import Bucket, activation_shapes, buckets, head_buffers
from engine.cuda.staging import Sections
from engine.errors import LoadRefused
from engine.memory import (
    MIB,
    MemoryLine,
    compute_dtype,
    step_tokens,
    tensor_line,
)

CUBLAS_WORKSPACE_BYTES = 32 * MIB  # what torch takes for a handle on Hopper
TORCH_ROUNDING = 2 * MIB  # torch takes device memory in multiples of it
PIECES_ROUNDING = 16 << 10  # 512 bytes for each tensor of the one allocation


@dataclass(frozen=True, slots=True)
class CardConstants:
    """Measured MiB: `context`, `modules` (kernels loaded lazily), `graphs` (all captured steps)."""

    context_mib: float
    modules_mib: float
    graphs_mib: float
    source: str  # how it was measured, for the lines of the plan


def shipped_constants(card: str, driver: str, torch_version: str) -> CardConstants:
    """The constants for a card, or for the nearest that were measured: the same card before any other.

    Raises LoadRefused where none were measured for this kind of card.
    """
    entries: list[dict[str, Any]] = json.loads(
        resources.files("engine.cuda").joinpath("card_constants.json").read_text()
    )
    same_card = [entry for entry in entries if entry["card"] == card]
    if not same_card:
        raise LoadRefused(
            f"no memory constants were measured for {card}: run mcp-discovery plan --measure on it once",
            needed_mib=0,
            free_mib=0,
        )

    def nearness(entry: dict[str, Any]) -> tuple[bool, bool]:
        return entry["driver"] == driver, entry["torch"] == torch_version

    best = max(same_card, key=nearness)
    exact = all(nearness(best))
    how = f"measured on {best['card']}, driver {best['driver']}, torch {best['torch']}"
    return CardConstants(
        best["context_mib"],
        best["modules_mib"],
        best["graphs_mib"],
        how if exact else f"{how}; this machine has driver {driver}, torch {torch_version}",
    )


DTYPE = "float16"
"""Of weights and activations where nothing else is asked for: eight times finer than bfloat16, and what
does not fit its range is kept small (`step.RESIDUAL_SCALE`) or cut off (`kernels.silu_mul`)."""


@dataclass(frozen=True, slots=True)
class CudaCosts:
    """`DeviceCosts` of a card. The computed lines are tensors of the one allocation."""

    constants: CardConstants
    dtype: str = DTYPE
    step_tokens: int = 8192
    guard_mib: int = 10

    def lines(self, shape: ModelShape, config: EngineConfig) -> list[MemoryLine]:
        tokens, rows = step_tokens(config, self), config.step_rows
        dtype, group = compute_dtype(config, self), shape.heads // shape.kv_heads
        measured = self.constants
        sections = self.sections(shape, config)
        workspace = max(
            int_workspace_bytes(size.plan_tokens, size.rows, group) for size in buckets(tokens, rows, group)
        )
        return [
            MemoryLine("CUDA context", _mib(measured.context_mib), measured.source),
            MemoryLine("modules", _mib(measured.modules_mib), f"kernels loaded lazily, {measured.source}"),
            MemoryLine("graphs", _mib(measured.graphs_mib), f"captured steps, {measured.source}"),
            MemoryLine(
                "cuBLAS workspace", CUBLAS_WORKSPACE_BYTES, "one handle on one stream, torch's default"
            ),
            MemoryLine(
                "torch rounding",
                TORCH_ROUNDING + PIECES_ROUNDING,
                "where each tensor ends, and all of them",
            ),
            MemoryLine(
                "torch guard", 2 * TORCH_ROUNDING, "not foreseen, of torch: for small tensors, for captures"
            ),
            MemoryLine("guard", self.guard_mib * MIB, "not foreseen, beside torch"),
            tensor_line(
                "staging", (sections.end,), "int32", "tokens, positions, slots, page tables of a step"
            ),
            tensor_line(
                "attention plan", (workspace,), "uint8", "query tiles of a step, FlashInfer's PrefillPlan"
            ),
            *(
                tensor_line(name, size, kind, why)
                for name, (size, kind, why) in head_buffers(shape, dtype).items()
            ),
            *(
                tensor_line(f"activations: {name}", size, dtype, f"the largest step, {tokens} tokens")
                for name, size in activation_shapes(shape, tokens, rows).items()
            ),
        ]

    def sections(self, shape: ModelShape, config: EngineConfig) -> Sections:
        """Of a step's inputs, with room for rows that are all as long as the context: rows share pages, so a
        step's page ids may be many more than the pool has pages."""
        most_pages = -(-shape.context // config.page_tokens)
        return Sections.of(step_tokens(config, self), config.step_rows, config.step_rows * most_pages)

    def sizes(self, shape: ModelShape, config: EngineConfig) -> tuple[Bucket, ...]:
        return buckets(step_tokens(config, self), config.step_rows, shape.heads // shape.kv_heads)


def _mib(value: float) -> int:
    return int(value * MIB)


def describe(constants: CardConstants, card: str, driver: str) -> dict[str, Any]:
    """An entry of `card_constants.json`."""
    entry = {"card": card, "driver": driver, "torch": torch.__version__, **asdict(constants)}
    del entry["source"]
    return entry
