"""`plan`: what the engine would take, line by line, and whether it may; allocates nothing."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from engine.errors import LoadRefused
from engine.memory import MIB, CPUCosts, MemoryPlan, plan_memory, resident_bytes
from engine.weights import read_shape
from mcp_discovery import model_store
from mcp_discovery.commands.common import settings
from mcp_discovery.config import Config
from mcp_discovery.exits import LOAD_REFUSED, OK


def run(arguments: argparse.Namespace) -> int:
    config = settings(arguments)
    try:
        plan = _plan(config)
    except LoadRefused as refusal:
        if not arguments.json:
            raise
        print(json.dumps(_refused(refusal), indent=2))
        return LOAD_REFUSED
    print(json.dumps(_admitted(plan, config), indent=2) if arguments.json else _text(plan, config))
    return OK


def _plan(config: Config) -> MemoryPlan:
    shape = read_shape(model_store.locate(config.engine.model))
    return plan_memory(shape, config.engine_config(), CPUCosts(resident_bytes()))


def _text(plan: MemoryPlan, config: Config) -> str:
    process, available = resident_bytes() / MIB, _available_bytes() / MIB
    return "\n".join(
        [
            plan.table(),
            f"this process holds {process:,.0f} MiB now; the machine has {available:,.0f} MiB available",
            f"admit: {plan.pages:,} pages of {config.engine.page_tokens} tokens",
        ]
    )


def _admitted(plan: MemoryPlan, config: Config) -> dict[str, object]:
    return {
        "admit": True,
        "allowance_mib": plan.allowance // MIB,
        "total_bytes": plan.total,
        "pages": plan.pages,
        "page_tokens": config.engine.page_tokens,
        "page_bytes": plan.page_bytes,
        "lines": [asdict(line) for line in plan.lines],
        "process_bytes": resident_bytes(),
        "available_bytes": _available_bytes(),
    }


def _refused(refusal: LoadRefused) -> dict[str, object]:
    return {
        "admit": False,
        "needed_mib": refusal.needed_mib,
        "free_mib": refusal.free_mib,
        "short_mib": refusal.short_mib,
        "reason": str(refusal),
    }


def _available_bytes() -> int:
    """What the machine can give without swapping; 0 where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    fields = dict(line.split(":", 1) for line in lines)
    return 1024 * int(fields.get("MemAvailable", "0 kB").split()[0])
