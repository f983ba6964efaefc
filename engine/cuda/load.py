"""A model on a card: admitted, planned, allocated at once, captured; or nothing left behind.

Stages run in order, each named to `on_stage` before it runs: measuring and fault injection both hang there.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable
from pathlib import Path

import torch

from engine.attention.flashinfer import FlashInferAttention
from engine.config import EngineConfig, ModelShape
from engine.cuda.admission import admit, admit_graphs, held_bytes, out_of_memory, torch_bytes, verify
from engine.cuda.build import NO_COMPILING
from engine.cuda.costs import CardConstants, CudaCosts, shipped_constants
from engine.cuda.head import CapturedHead
from engine.cuda.nvml import read_card
from engine.cuda.runner import CudaRunner
from engine.cuda.sizes import activation_shapes, head_buffers
from engine.cuda.step import DTYPES, CapturedSteps, scale_residual
from engine.errors import ConfigError, EngineError, EngineFault
from engine.load import Loaded
from engine.memory import MIB, Allocation, allocate_at_once, compute_dtype, plan_memory, step_tokens
from engine.model import rotary_table
from engine.model_files import digest, read_shape
from engine.weights import Adapter, load_weights, read_adapter

OnStage = Callable[[str], None]


def load_cuda(
    config: EngineConfig,
    model: Path,
    adapter: Path | None,
    *,
    on_stage: OnStage = lambda stage: None,
    constants: CardConstants | None = None,
) -> Loaded:
    """On the card, over FlashInfer's kernels. `constants`: of this card; None: those shipped for it.

    Raises ModelError for the files, LoadRefused for the allowance or the card, EngineError where
    kernels are missing. Whatever it raises, nothing it allocated is left.
    """
    problem: EngineError
    try:
        return _load(config, model, adapter, on_stage, constants)
    except EngineError as error:
        problem = error
    except torch.OutOfMemoryError as error:
        problem = out_of_memory(config.allowance_mib, read_card().free // MIB, str(error))
    except RuntimeError as error:
        problem = EngineFault(f"the card failed while the engine was loading: {str(error).splitlines()[0]}")
    # The frames of a traceback, its own or that of what caused it, hold the tensors of the failed load.
    problem.__traceback__ = problem.__context__ = problem.__cause__ = None
    release()
    raise problem


def release() -> None:
    """Returns to the card whatever torch holds and nobody references, its libraries' workspaces too.

    A card that has failed answers no more in this process, and takes all back with the process's end.
    """
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize()
            torch._C._cuda_clearCublasWorkspaces()  # else each failed load would leave one
            torch.cuda.empty_cache()


def _load(
    config: EngineConfig,
    model: Path,
    adapter: Path | None,
    on_stage: OnStage,
    constants: CardConstants | None,
) -> Loaded:
    on_stage("admission")
    card = read_card()
    shape = read_shape(model)
    costs = CudaCosts(constants or shipped_constants(card.name, card.driver, torch.__version__))
    plan = plan_memory(shape, config, costs)
    held = held_bytes(plan)
    admit(plan, card, held)
    model_sha256 = digest(model)
    merged = None if adapter is None else read_adapter(adapter, model_sha256)
    on_stage("context")
    device = torch.device("cuda")
    torch.set_num_threads(1)  # what a step does on the host is too small to be worth waking others for
    os.environ[NO_COMPILING] = "1"
    torch.cuda.init()  # type: ignore[no-untyped-call]
    whole = torch.cuda.get_device_properties(device).total_memory  # less than NVML's total
    torch.cuda.set_per_process_memory_fraction(torch_bytes(plan) / whole, 0)
    on_stage("allocation")
    allocation = allocate_at_once(plan, device)
    runner = _runner(config, shape, model, merged, costs, allocation, on_stage)
    on_stage("verification")
    verify(plan, card, held)
    return Loaded(
        shape=shape,
        runner=runner,
        plan=plan,
        step_tokens=step_tokens(config, costs),
        model_sha256=model_sha256,
        adapter_sha256="" if adapter is None else digest(adapter),
        release=release,
    )


def _runner(
    config: EngineConfig,
    shape: ModelShape,
    model: Path,
    adapter: Adapter | None,
    costs: CudaCosts,
    allocation: Allocation,
    on_stage: OnStage,
) -> CudaRunner:
    device, tensors = torch.device("cuda"), allocation.tensors
    dtype = tensors["weights"].dtype
    if dtype not in DTYPES:
        raise ConfigError(f"engine.dtype {compute_dtype(config, costs)} has no kernels on CUDA; use auto")
    on_stage("weights")
    _, weights = load_weights(model, dtype, device, into=allocation.weights(shape), adapter=adapter)
    scale_residual(weights)
    tensors["rope table"].copy_(rotary_table(shape, shape.context, torch.device("cpu")))
    on_stage("kernels")
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    attention = FlashInferAttention(allocation.kv, shape, dtype, tensors["attention plan"])
    tokens, rows = step_tokens(config, costs), config.step_rows
    steps = CapturedSteps(
        shape,
        weights,
        allocation.kv,
        attention,
        table=tensors["rope table"],
        activations={
            name: tensors[f"activations: {name}"] for name in activation_shapes(shape, tokens, rows)
        },
        staging=tensors["staging"],
        sections=costs.sections(shape, config),
        sizes=costs.sizes(shape, config),
        stream=stream,
    )
    steps.warm_up()
    on_stage("graphs")
    admit_graphs(
        allocation.plan,
        reserved=torch.cuda.memory_reserved(),
        cap=torch_bytes(allocation.plan),
        free=read_card().free,
    )
    pool = torch.cuda.graph_pool_handle()  # one for all: they run one after the other
    steps.capture(pool)
    buffers = {name: tensors[name] for name in head_buffers(shape, compute_dtype(config, costs))}
    head = CapturedHead(weights.head, buffers, stream)
    head.capture(pool)
    on_stage("runner")
    kernels = f"{attention.name}; triton norms, rope and MLP; captured steps of at most {tokens} tokens"
    runner = CudaRunner(steps, head, weights.head, stream, kernels)
    runner.warm_up()
    return runner
