"""Measures what a plan cannot compute: context, modules and graphs, by loading an engine stage by stage.

    python -m engine.cuda.measure MODEL      prints an entry of card_constants.json

Run it in a process of its own, on a card where nobody else changes what they hold meanwhile: the
figures are differences of what NVML says of the whole card, less what torch holds.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.cuda.costs import CardConstants, describe
from engine.cuda.load import load_cuda
from engine.cuda.nvml import MIB, CardMemory, read_card

ROOM = CardConstants(700.0, 500.0, 100.0, "more than any card seen takes, for the measurement alone")


def measure(config: EngineConfig, model: Path) -> tuple[CardMemory, CardConstants]:
    """The card as it was before, and its constants in MiB, rounded up."""
    before = read_card()
    at: dict[str, float] = {}

    def note(stage: str) -> None:
        at[stage] = _beside_torch(before)

    load_cuda(config, model, None, on_stage=note, constants=ROOM)
    graphs = at["runner"] - at["graphs"]
    modules = at["verification"] - at["allocation"] - graphs
    return before, CardConstants(
        context_mib=math.ceil(at["allocation"]),
        modules_mib=math.ceil(modules),
        graphs_mib=math.ceil(graphs),
        source=f"measured now on {before.name}",
    )


def _beside_torch(before: CardMemory) -> float:
    """MiB that this process holds besides torch's own."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0.0
    torch.cuda.synchronize()
    return (read_card().used - before.used - torch.cuda.memory_reserved()) / MIB


def main() -> None:
    card, constants = measure(EngineConfig(device="cuda"), Path(sys.argv[1]))
    print(json.dumps(describe(constants, card.name, card.driver)))


if __name__ == "__main__":
    main()
