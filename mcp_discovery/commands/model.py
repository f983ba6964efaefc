"""`model fetch | show | verify | build-kernels`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model_files import read_shape
from mcp_discovery import adapters, model_store
from mcp_discovery.adapters import AdapterFile
from mcp_discovery.commands.common import Progress, printable, settings, table
from mcp_discovery.discovery.prompts import VERSION
from mcp_discovery.model_store import ModelCard


def run(arguments: argparse.Namespace) -> int:
    model = getattr(arguments, "model", None) or settings(arguments).engine.model
    if arguments.action == "fetch" and model in (None, model_store.DEFAULT.name):
        print(_fetch())
        return 0
    path = model_store.locate(model)
    if arguments.action == "build-kernels":
        return _build_kernels(path, settings(arguments).engine_config())
    if arguments.action == "fetch":
        print(path)  # a model of one's own is there already
        return 0
    card = model_store.verify(path) if arguments.action == "verify" else model_store.describe(path)
    adapter = adapters.resolve(settings(arguments).engine.adapter, card.sha256)
    if arguments.json:
        shown = {**asdict(card), "path": str(card.path), "adapter": _adapter_json(adapter)}
        print(json.dumps(shown, indent=2))
    else:
        print(table([*_facts(card), *_adapter_facts(adapter)]))
        if arguments.action == "verify":
            print("the files are whole")
    return 0


def _fetch() -> Path:
    bars: dict[str, Progress] = {}

    def show(what: str, done: int, total: int) -> None:
        bars.setdefault(what, Progress(what, "bytes"))(done, total)

    return model_store.fetch(show)


def _build_kernels(path: Path, config: EngineConfig) -> int:
    """On a machine with a card: everything that serving this model on it would compile."""
    if not torch.cuda.is_available():
        raise ConfigError("kernels are built on the card they are for, and there is no CUDA device here")
    try:
        from engine.cuda.build import build_kernels
    except ImportError as error:
        raise ConfigError(f"building kernels lacks {error.name}; install mcp-discovery[cuda]") from None
    for kernel in build_kernels(read_shape(path), config):
        print(f"building {kernel}", flush=True)
    print("all kernels are built")
    return 0


def _adapter_json(adapter: AdapterFile | None) -> dict[str, object] | None:
    return None if adapter is None else {**asdict(adapter), "path": str(adapter.path)}


def _adapter_facts(adapter: AdapterFile | None) -> list[tuple[str, str]]:
    if adapter is None:
        return [("adapter", "none: the model is served as it is")]
    return [
        ("adapter", printable(str(adapter.path))),
        ("", f"rank {adapter.rank}, prompt version {VERSION}"),
        ("", f"sha256 {adapter.sha256}"),
    ]


def _facts(card: ModelCard) -> list[tuple[str, str]]:
    return [
        ("name", printable(card.name)),
        ("licence", printable(card.licence)),
        ("path", str(card.path)),
        ("size", f"{card.size_bytes:,} bytes"),
        ("format", f"{card.format}, {card.quantisation}"),
        ("parameters", f"{card.parameters:,}"),
        ("architecture", f"{card.shape.architecture}, {card.shape.layers} layers of {card.shape.hidden}"),
        ("sha256", card.sha256),
    ]
