"""Low-rank adapters of the four matrices of every layer: W + (alpha / rank) B A.

A step merges them into the frozen base and runs the merged model, rounded as serving rounds it, so an
adapter is trained on exactly the weights that it will make.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.config import ModelShape
from engine.errors import ModelError
from engine.weights import Adapter, Weights

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

    @classmethod
    def stored(cls, adapter: Adapter, layers: int, device: torch.device) -> LoRA:
        """An adapter from its file, to go on with. Raises ModelError where it leaves out a matrix."""
        a, b = {}, {}
        for name in MATRICES:
            names = [f"layers.{index}.{name}" for index in range(layers)]
            if missing := next((each for each in names if each not in adapter.pairs), None):
                raise ModelError(f"adapter {adapter.path} leaves out {missing}: train a new one instead")
            down, up = zip(*(adapter.pairs[each] for each in names), strict=True)
            a[name] = torch.stack(down).to(device).requires_grad_()
            b[name] = torch.stack(up).to(device).requires_grad_()
        rank = a[MATRICES[0]].shape[1]
        return cls(rank, adapter.scale * rank, a, b)

    def parameters(self) -> list[Tensor]:
        return [part[name] for part in (self.a, self.b) for name in MATRICES]

    def state(self) -> dict[str, Tensor]:
        """Every parameter by name, as stored in checkpoints."""
        return {
            f"{kind}.{name}": part[name] for kind, part in (("a", self.a), ("b", self.b)) for name in MATRICES
        }

    def copied(self) -> dict[str, Tensor]:
        """`state` as it is now."""
        return {name: parameter.detach().clone() for name, parameter in self.state().items()}

    def replaced(self, state: Mapping[str, Tensor]) -> LoRA:
        """An adapter of the same kind with the parameters of `state`."""
        a, b = ({name: state[f"{kind}.{name}"] for name in MATRICES} for kind in ("a", "b"))
        return replace(self, a=a, b=b)

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

    def merged(self, adapter: LoRA, kept: Mapping[str, Tensor] | None = None) -> list[LayerMatrices]:
        """The matrices of every layer, differentiable in the adapter's parameters.

        kept: per matrix a factor for each row of A, float32 [layers, rank, 1]; see `kept_rows`.
        """
        scale = adapter.alpha / adapter.rank
        parts = []
        for name in MATRICES:
            a = adapter.a[name] if kept is None else adapter.a[name] * kept[name]
            merged = torch.baddbmm(self._stacked[name], adapter.b[name], a, alpha=scale)
            parts.append(merged.to(self._dtype).unbind(0))
        return [LayerMatrices(*layer) for layer in zip(*parts, strict=True)]


def kept_rows(adapter: LoRA, dropout: float, seed: str) -> dict[str, Tensor]:
    """Zero for a row of A that a step leaves out, 1 / (1 - dropout) for the others."""
    generator = torch.Generator().manual_seed(random.Random(seed).getrandbits(62))
    factors = {}
    for name in MATRICES:
        layers, rank, _ = adapter.a[name].shape
        kept = torch.rand(layers, rank, 1, generator=generator) >= dropout
        factors[name] = (kept / (1.0 - dropout)).to(adapter.a[name].device)
    return factors


def averaged(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of the factors of several states of one run (Izmailov et al., 2018).

    Along one trajectory the factors stay near each other, so the product of the means is near the mean
    of the products.
    """
    return {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}
