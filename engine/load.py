"""A model on its device, ready to run steps: planned, allocated, filled."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.attention.torch import TorchAttention
from engine.config import EngineConfig, ModelShape
from engine.errors import ConfigError, ModelError
from engine.memory import (
    CPUCosts,
    MemoryPlan,
    allocate,
    compute_dtype,
    plan_memory,
    resident_bytes,
    step_tokens,
)
from engine.model import Model, rotary_table
from engine.runner import Runner, TorchRunner
from engine.weights import load_weights, read_adapter, read_shape, tensor_files

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a device brings to an engine. Digests are SHA-256 in hexadecimal, "" without an adapter."""

    shape: ModelShape
    runner: Runner
    plan: MemoryPlan
    step_tokens: int
    model_sha256: str
    adapter_sha256: str


def digest(path: Path) -> str:
    """SHA-256 of a model or adapter file; of a folder, that of the lines "<sha256>  <name>" of its
    safetensors files in order of name. An adapter names its base so."""
    try:
        if path.is_dir():
            lines = (f"{digest(file)}  {file.name}\n" for file in tensor_files(path))
            return hashlib.sha256("".join(lines).encode()).hexdigest()
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"model file {path} cannot be read: {error.strerror or error}") from error


def load_cpu(config: EngineConfig, model: Path, adapter: Path | None) -> Loaded:
    """On the CPU, in plain torch. Raises ModelError for the files, LoadRefused for the allowance."""
    if config.kv_dtype == "fp8_e4m3":
        raise ConfigError("engine.kv_dtype fp8_e4m3 needs a CUDA device; use auto on a CPU")
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = torch.device("cpu")
    shape = read_shape(model)
    costs = CPUCosts(resident_bytes())
    plan = plan_memory(shape, config, costs)
    model_sha256 = digest(model)
    merged = None if adapter is None else read_adapter(adapter, model_sha256)
    allocation = allocate(plan, device)
    into = allocation.weights(shape)
    _, weights = load_weights(model, _DTYPES[compute_dtype(config, costs)], device, into=into, adapter=merged)
    rotary = allocation.tensors["rope table"]
    rotary.copy_(rotary_table(shape, shape.context, device))
    runner = TorchRunner(
        Model(shape, weights, rotary=rotary), TorchAttention(allocation.kv, shape), allocation.kv
    )
    return Loaded(
        shape=shape,
        runner=runner,
        plan=plan,
        step_tokens=step_tokens(config, costs),
        model_sha256=model_sha256,
        adapter_sha256="" if adapter is None else digest(adapter),
    )
