"""`plan`: what the engine would take, line by line, and whether it may; allocates nothing."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from engine.errors import ConfigError, LoadRefused
from engine.memory import MIB, MemoryPlan, cpu_costs, plan_memory
from engine.model_files import read_shape
from mcp_discovery import model_store
from mcp_discovery.assemble import DiscoveryModel
from mcp_discovery.commands.common import settings
from mcp_discovery.config import Config
from mcp_discovery.discovery.catalogue import Catalogue
from mcp_discovery.discovery.sources import files
from mcp_discovery.exits import LOAD_REFUSED, OK
from mcp_discovery.gate import Gate
from mcp_discovery.service import choices


@dataclass(frozen=True, slots=True)
class Planned:
    """`plan` None: not even one page fits. `refusal` None: it may be loaded. Sizes are bytes."""

    plan: MemoryPlan | None
    refusal: LoadRefused | None
    device: str
    total: int
    free: int
    page_tokens: int


def run(arguments: argparse.Namespace) -> int:
    config = settings(arguments)
    model = model_store.locate(config.engine.model)
    if _wants_card(config):
        planned = _on_card(config, model, measure=arguments.measure)
    elif arguments.measure:
        raise ConfigError("plan --measure measures a card, and the engine would run on the CPU here")
    else:
        planned = _on_cpu(config, model)
    print(json.dumps(_as_json(planned), indent=2) if arguments.json else _text(planned))
    return LOAD_REFUSED if planned.refusal else OK


def _wants_card(config: Config) -> bool:
    device = config.engine.device
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("engine.device is cuda and there is no CUDA device; use cpu or auto")
    return device != "cpu" and torch.cuda.is_available()


def _on_cpu(config: Config, model: Path) -> Planned:
    """The plan of a server on this machine. Its process is taken to be as large as this one, which has by
    then read what a server reads before it loads its engine."""
    plan, refusal = None, None
    held = server_before_its_engine(config)
    try:
        plan = plan_memory(read_shape(model), config.engine_config(), cpu_costs())
    except LoadRefused as error:
        refusal = error
    total, free = _machine_bytes()
    del held
    return Planned(plan, refusal, "this machine", total, free, config.engine.page_tokens)


def server_before_its_engine(config: Config) -> object:
    """Modules, catalogue and indexes of a server, to be kept while their size is measured."""
    from mcp_discovery.commands import serve  # noqa: F401 - only a CPU's plan needs all that a server imports

    catalogue = Catalogue.of(files.load(config.catalogue_paths()).tools)
    model = DiscoveryModel.of(config.engine.model, config.engine.adapter)
    gate = Gate("nothing is served", config.engine.page_tokens)
    return model.discovery(
        gate, catalogue, choices(config), device=config.engine.device, page_tokens=config.engine.page_tokens
    )


def _on_card(config: Config, model: Path, *, measure: bool) -> Planned:
    try:
        from engine.cuda.admission import (  # needs the packages of the extra
            admit,
            measured_constants,
            plan_cuda,
        )
        from engine.cuda.nvml import read_card
    except ImportError as error:
        raise ConfigError(f"planning for a card lacks {error.name}; install mcp-discovery[cuda]") from None
    plan, refusal, card = None, None, read_card()
    try:
        constants = measured_constants(card, config.engine.allowance_mib, model) if measure else None
        plan, card = plan_cuda(config.engine_config(), model, constants)
        admit(plan, card, 0)
    except LoadRefused as error:
        refusal = error
    return Planned(plan, refusal, card.name, card.total, card.free, config.engine.page_tokens)


def _text(planned: Planned) -> str:
    lines = [] if planned.plan is None else [planned.plan.table()]
    lines.append(f"{planned.device} has {planned.free / MIB:,.0f} of {planned.total / MIB:,.0f} MiB free")
    if planned.refusal is not None:
        lines.append(f"refuse, {planned.refusal.short_mib:,} MiB short: {planned.refusal}")
    elif planned.plan is not None:
        lines.append(f"admit: {planned.plan.pages:,} pages of {planned.page_tokens} tokens")
    return "\n".join(lines)


def _as_json(planned: Planned) -> dict[str, object]:
    shown: dict[str, object] = {
        "admit": planned.refusal is None,
        "short_mib": planned.refusal.short_mib if planned.refusal else 0,
        "reason": str(planned.refusal or ""),
        "device": {"name": planned.device, "total_bytes": planned.total, "free_bytes": planned.free},
    }
    if planned.plan is not None:
        shown |= {
            "allowance_mib": planned.plan.allowance // MIB,
            "total_bytes": planned.plan.total,
            "pages": planned.plan.pages,
            "page_tokens": planned.page_tokens,
            "page_bytes": planned.plan.page_bytes,
            "lines": [asdict(line) for line in planned.plan.lines],
        }
    return shown


def _machine_bytes() -> tuple[int, int]:
    """Memory of the machine, and what it can give without swapping; 0 where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0, 0
    fields = dict(line.split(":", 1) for line in lines)
    total, free = (int(fields.get(name, "0 kB").split()[0]) for name in ("MemTotal", "MemAvailable"))
    return 1024 * total, 1024 * free
