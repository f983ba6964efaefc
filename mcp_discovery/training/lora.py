"""Low-rank adapters of the four matrices of every layer: W + (alpha / rank) B A.

A step merges them into the frozen base and runs the merged model, rounded as serving rounds it, so an
adapter is trained on exactly the weights that it will make.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.config import ModelShape
from engine.weights import Weights

MATRICES = ("qkv", "o", "gate_up", "down")


class LayerMatrices(NamedTuple):
    """Merged matrices of one layer, in the compute dtype."""

    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class LoRA:
    """Per matrix: `a` float32 [layers, rank, in] and `b` float32 [layers, out, rank]."""

    rank: int
    alpha: float
    a: Mapping[str, Tensor]
    b: Mapping[str, Tensor]

    @classmethod
    def create(cls, weights: Weights, rank: int, alpha: float, seed: int) -> LoRA:
        """A drawn from N(0, 1 / in), B zero: an adapter that changes nothing yet."""
        generator = torch.Generator().manual_seed(seed)
        layers, device = len(weights.layers), weights.embedding.device
        a, b = {}, {}
        for name in MATRICES:
            out, width = getattr(weights.layers[0], name).shape
            drawn = torch.randn(layers, rank, width, generator=generator) * width**-0.5
            a[name] = drawn.to(device).requires_grad_()
            b[name] = torch.zeros(layers, out, rank, device=device, requires_grad=True)
        return cls(rank, alpha, a, b)

    def parameters(self) -> list[Tensor]:
        return [part[name] for part in (self.a, self.b) for name in MATRICES]

    def state(self) -> dict[str, Tensor]:
        """Every parameter by name, as stored in checkpoints."""
        return {
            f"{kind}.{name}": part[name] for kind, part in (("a", self.a), ("b", self.b)) for name in MATRICES
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.state().items():
                parameter.copy_(state[name])

    def save(self, path: Path, metadata: Mapping[str, str]) -> None:
        """The adapter as `engine.weights.read_adapter` reads it, in bfloat16."""
        tensors = {}
        for name in MATRICES:
            for index, (a, b) in enumerate(zip(self.a[name], self.b[name], strict=True)):
                tensors[f"layers.{index}.{name}.lora_a"] = a.detach().to("cpu", torch.bfloat16).contiguous()
                tensors[f"layers.{index}.{name}.lora_b"] = b.detach().to("cpu", torch.bfloat16).contiguous()
        whole = {"rank": str(self.rank), "alpha": str(self.alpha), **metadata}
        save_file(tensors, path, metadata=whole)


def adapter_bytes(shape: ModelShape, rank: int) -> int:
    """Bytes of the tensors of an adapter on disk, in bfloat16."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    widths = (
        (shape.hidden + queries + 2 * keys)
        + (queries + shape.hidden)
        + (shape.hidden + 2 * shape.intermediate)
        + (shape.intermediate + shape.hidden)
    )
    return 2 * rank * widths * shape.layers


class Base:
    """The base's matrices, stacked by layer in float32, ready to be merged with an adapter."""

    def __init__(self, weights: Weights, dtype: torch.dtype) -> None:
        """weights: in float32; dtype: of the merged matrices."""
        self._dtype = dtype
        self._stacked = {
            name: torch.stack([getattr(layer, name) for layer in weights.layers]) for name in MATRICES
        }

    def merged(self, adapter: LoRA) -> list[LayerMatrices]:
        """The matrices of every layer, differentiable in the adapter's parameters."""
        scale = adapter.alpha / adapter.rank
        parts = [
            torch.baddbmm(self._stacked[name], adapter.b[name], adapter.a[name], alpha=scale)
            .to(self._dtype)
            .unbind(0)
            for name in MATRICES
        ]
        return [LayerMatrices(*layer) for layer in zip(*parts, strict=True)]
