"""`train DIR...`: fine-tunes the discovery adapter on labelled sets.

The run is seeded, tells its progress, and goes on from its checkpoint beside the output where it was
broken off; see docs/training.md.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

from engine.errors import ConfigError
from mcp_discovery import adapters, model_store
from mcp_discovery.commands.common import settings
from mcp_discovery.exits import CommandFailed
from mcp_discovery.training.batches import BatchSize
from mcp_discovery.training.data import DataError, find_sets
from mcp_discovery.training.options import TrainOptions, changed
from mcp_discovery.training.train import TrainReport, run_training

CPU_SIZE = BatchSize(groups=4, pairs=8)
NEW_RATE, FINE_TUNING_RATE = 5e-4, 1e-4  # an adapter that is trained already needs smaller steps


def run(arguments: argparse.Namespace) -> int:
    engine = settings(arguments).engine
    card = model_store.describe(model_store.locate(engine.model))
    start = adapters.resolve(engine.adapter, card.sha256)
    out: Path = arguments.out
    if out.suffix != ".safetensors":
        raise ConfigError(f"an adapter is a .safetensors file, --out is {out}")
    checkpoint = out.with_suffix(".checkpoint")
    try:
        options = _options(arguments, card.path, None if start is None else start.path, engine.device)
        report = run_training(arguments.sets, out, options)
    except DataError as error:
        raise ConfigError(str(error)) from error
    except torch.OutOfMemoryError as error:
        raise CommandFailed(
            "the device has too little memory for a step; make it smaller: --set groups=N --set pairs=N"
        ) from error
    checkpoint.unlink(missing_ok=True)
    print(_what_now(report))
    return 0


def _options(arguments: argparse.Namespace, model: Path, start: Path | None, device: str) -> TrainOptions:
    cuda = device != "cpu" and torch.cuda.is_available()
    share: float = arguments.hold_out
    names = [folder.name for folder in find_sets(arguments.sets)]
    options = TrainOptions(
        model=model,
        start=start,
        steps=arguments.steps,
        seed=arguments.seed,
        learning_rate=NEW_RATE if start is None else FINE_TUNING_RATE,
        size=BatchSize() if cuda else CPU_SIZE,
        hold_out=dict.fromkeys(names, share) if share else {},
        also_written=0,
        device=device,
        workers=max(min((os.cpu_count() or 1) - 2, 14), 0) if cuda else 0,
        compiled=cuda,
        checkpoint=arguments.out.with_suffix(".checkpoint"),
    )
    return changed(options, arguments.settings)


def _what_now(report: TrainReport) -> str:
    return f"serve it with: mcp-discovery serve --adapter {report.adapter}"
