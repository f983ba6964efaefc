"""Builds every kernel that serving can reach, ahead of serving: a serving process compiles nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from engine.attention.flashinfer import load_module
from engine.config import EngineConfig, ModelShape
from engine.cuda.costs import DTYPE
from engine.cuda.kernels import rms_norm, rotate_append, silu_mul
from engine.errors import EngineError
from engine.model import rotary_table

NO_COMPILING = "FLASHINFER_DISABLE_JIT"  # FlashInfer then loads what was built ahead, or fails


def build_kernels(shape: ModelShape, config: EngineConfig) -> Iterator[str]:
    """Builds FlashInfer's modules and Triton's kernels for a model, with pages of the activations' dtype
    and of fp8, naming each before it is built.

    A FlashInfer module takes 10 to 40 s and needs nvcc. It is put where FlashInfer looks for modules
    that were built ahead, in its own package. Needs a card. Raises EngineError where a build fails.
    """
    os.environ.pop(NO_COMPILING, None)
    dtype: torch.dtype = getattr(torch, DTYPE if config.dtype == "auto" else config.dtype)
    for pages in (dtype, torch.float8_e4m3fn):
        yield f"attention, head_dim {shape.head_dim}, pages of {str(pages).removeprefix('torch.')}"
        load_module(dtype, pages, shape.head_dim)
        yield "norm, rotation and MLP of that page type"
        _build_triton(shape, config.page_tokens, dtype, pages)
    _keep_modules()


def _build_triton(shape: ModelShape, page_tokens: int, dtype: torch.dtype, page_dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    heads = shape.heads + 2 * shape.kv_heads
    x = torch.zeros((1, shape.hidden), dtype=dtype, device=device)
    gain = torch.ones(max(shape.hidden, shape.head_dim), dtype=dtype, device=device)
    rms_norm(x, gain[: shape.hidden], shape.norm_eps, torch.empty_like(x))
    gate_up = torch.zeros((1, 2 * shape.intermediate), dtype=dtype, device=device)
    silu_mul(gate_up, gate_up[:, : shape.intermediate].contiguous())
    place = torch.zeros(1, dtype=torch.int32, device=device)
    norm = gain[: shape.head_dim]
    rotate_append(
        torch.zeros((1, heads * shape.head_dim), dtype=dtype, device=device),
        rotary_table(shape, 1, device),
        place,
        place,
        torch.zeros((1, 2, page_tokens, shape.kv_heads, shape.head_dim), device=device).to(page_dtype),
        (norm, norm) if shape.qk_norm else None,
        heads=shape.heads,
        eps=shape.norm_eps,
    )
    torch.cuda.synchronize()


def _keep_modules() -> None:
    """Copies what was compiled to where FlashInfer looks first."""
    from flashinfer.jit import env

    built, kept = Path(env.FLASHINFER_JIT_DIR), Path(env.FLASHINFER_AOT_DIR)
    try:
        for library in built.glob("*/*.so"):
            target = kept / library.parent.name / library.name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(library, target)
    except OSError as error:
        raise EngineError(f"built kernels cannot be put into {kept}: {error.strerror}") from error
