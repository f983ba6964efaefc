"""A model on its device, ready to run steps: planned, allocated, filled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.attention.torch import TorchAttention
from engine.config import EngineConfig, ModelShape
from engine.errors import ConfigError
from engine.memory import (
    MemoryPlan,
    allocate,
    compute_dtype,
    cpu_costs,
    plan_memory,
    step_tokens,
)
from engine.model import Model, PaddedOps, rotary_table
from engine.model_files import digest, read_shape
from engine.runner import Runner, TorchRunner
from engine.weights import load_weights, read_adapter

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def nothing_to_release() -> None:
    """On a CPU memory goes back with the last reference to it."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a device brings to an engine. Digests are SHA-256 in hexadecimal, "" without an adapter.

    `slow_steps`: a full step takes about as long as a short request.
    `release` returns to the device what nobody references any more; whoever lets go of the rest calls it.
    """

    shape: ModelShape
    runner: Runner
    plan: MemoryPlan
    step_tokens: int
    model_sha256: str
    adapter_sha256: str
    release: Callable[[], None] = nothing_to_release
    slow_steps: bool = False


def load(config: EngineConfig, model: Path, adapter: Path | None) -> Loaded:
    """On the device of the configuration; `auto` is the card where there is one.

    Raises ModelError for the files, ConfigError where device or kernels are missing, LoadRefused for
    the allowance; nothing is left allocated then.
    """
    has_card = torch.cuda.is_available()
    if config.device == "cuda" and not has_card:
        raise ConfigError("engine.device is cuda and there is no CUDA device; use cpu or auto")
    if config.device == "cpu" or not has_card:
        return load_cpu(config, model, adapter)
    try:
        from engine.cuda.load import load_cuda  # these imports touch the card
    except ImportError as error:
        raise ConfigError(f"the engine on CUDA lacks {error.name}; install mcp-discovery[cuda]") from error
    return load_cuda(config, model, adapter)


def load_cpu(config: EngineConfig, model: Path, adapter: Path | None) -> Loaded:
    """On the CPU, in plain torch. Raises ModelError for the files, LoadRefused for the allowance."""
    if config.kv_dtype == "fp8_e4m3":
        raise ConfigError("engine.kv_dtype fp8_e4m3 needs a CUDA device; use auto on a CPU")
    for key, value in (("dtype", config.dtype), ("kv_dtype", config.kv_dtype)):
        if value == "float16":
            raise ConfigError(f"engine.{key} float16 needs a CUDA device; use auto on a CPU")
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = torch.device("cpu")
    shape = read_shape(model)
    costs = cpu_costs()
    plan = plan_memory(shape, config, costs)
    model_sha256 = digest(model)
    merged = None if adapter is None else read_adapter(adapter, model_sha256)
    allocation = allocate(plan, device)
    into = allocation.weights(shape)
    _, weights = load_weights(model, _DTYPES[compute_dtype(config, costs)], device, into=into, adapter=merged)
    rotary = allocation.tensors["rope table"]
    rotary.copy_(rotary_table(shape, shape.context, device))
    runner = TorchRunner(
        Model(shape, weights, PaddedOps(), rotary=rotary), TorchAttention(allocation.kv, shape), allocation.kv
    )
    return Loaded(
        shape=shape,
        runner=runner,
        plan=plan,
        step_tokens=step_tokens(config, costs),
        model_sha256=model_sha256,
        adapter_sha256="" if adapter is None else digest(adapter),
        slow_steps=True,
    )
