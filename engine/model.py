"""A Llama-family decoder (Llama, Qwen3) that reads top to bottom.

T new tokens of any number of sequences, flat; attention is whatever callable the caller brings:
over pages in the engine, dense and differentiable in training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine.attention.base import Attention
from engine.batch import StepBatch
from engine.config import ModelShape
from engine.weights import LayerWeights, Weights

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [T, heads, head_dim], k, v [T, kv_heads, head_dim]) -> [T, heads, head_dim]; k, q rotated.

The inputs may be views whose last axis alone is contiguous."""


class Ops(Protocol):
    """The operations of a layer apart from attention. All but `rms_norm` may write into their
    activations: those are read no more after the call."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x weight^T. `weight` is the very tensor of `Weights`: training keys its adapters by it."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Over the last axis: x / sqrt(mean(x^2) + eps) * weight, statistics in float32."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(residual + x), residual + x)."""
        ...

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """Rotates the pairs (d, d + head_dim / 2) of each head by the row of `table` at its position."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2 f] -> [T, f]: silu of the first half times the second."""
        ...


class TorchOps:
    """`Ops` in plain torch: any device, float32 and bfloat16, differentiable, nothing in place."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.linear(x, weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = residual + x
        return self.rms_norm(total, weight, eps), total

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = table[positions].unsqueeze(1).chunk(2, dim=-1)

        def turn(x: Tensor) -> Tensor:
            first, second = x.float().chunk(2, dim=-1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

        return turn(q), turn(k)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up


class PaddedOps(TorchOps):
    """`TorchOps` for steps on a CPU, whose bfloat16 products have a multiple of `ROWS` rows.

    oneDNN keeps a kernel for each size of a product that it has seen, 1,024 of them at 2/3 MiB each. Steps
    have as many rows as it happens, so that without padding these come to half a GiB in time. Rows of a
    product do not touch each other, and a matrix unit works on many at once anyway.
    """

    ROWS = 32

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        rows = x.shape[0]
        missing = -rows % self.ROWS
        if not missing or x.dtype is not torch.bfloat16:
            return functional.linear(x, weight)
        return functional.linear(functional.pad(x, (0, 0, 0, missing)), weight)[:rows]


def rotary_table(shape: ModelShape, positions: int, device: torch.device) -> Tensor:
    """float32 [positions, head_dim]: cosines, then sines, of position * theta^(-2 d / head_dim).

    Angles are computed in float64: at position 8,000 a float32 product is off by 5e-4.
    """
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float64, device=device) / shape.head_dim
    steps = torch.arange(positions, dtype=torch.float64, device=device)
    angles = torch.outer(steps, shape.rope_theta**-exponents)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float()


class Model:
    """The decoder. Weights are in one dtype, which is that of activations too."""

    def __init__(
        self, shape: ModelShape, weights: Weights, ops: Ops | None = None, *, rotary: Tensor | None = None
    ) -> None:
        """`rotary`: a `rotary_table` as long as the longest sequence; None: one over the whole context."""
        self.shape = shape
        self.weights = weights
        self.ops: Ops = TorchOps() if ops is None else ops
        device = weights.embedding.device
        self.rotary = rotary_table(shape, shape.context, device) if rotary is None else rotary

    def forward(self, batch: StepBatch, attention: Attention) -> Tensor:
        """Final-normed hidden states [O, hidden] at `batch.outputs`; keys and values go to pages."""
        attention.plan(batch)
        hidden = self.hidden_states(batch.tokens, batch.positions, attention, rows=batch.outputs)
        return self.final_norm(hidden)

    def hidden_states(
        self, tokens: Tensor, positions: Tensor, attend: Attend, *, rows: Tensor | None = None
    ) -> Tensor:
        """[T, hidden] before the final norm, or [O, hidden] of the tokens `rows` alone.

        tokens, positions: int64 [T]; rows: int64 [O] or None.
        """
        residual = functional.embedding(tokens, self.weights.embedding)
        x = self.ops.rms_norm(residual, self.weights.layers[0].attention_norm, self.shape.norm_eps)
        last = self.shape.layers - 1
        for index, layer in enumerate(self.weights.layers):
            x = attend(index, *self._queries_keys_values(x, positions, layer)).flatten(1)
            if index == last and rows is not None:
                # Nothing after the last attention mixes tokens: the rest is for the rows alone.
                x, residual = x[rows], residual[rows]
            x = self.ops.linear(x, layer.o)
            x, residual = self.ops.add_rms_norm(x, residual, layer.mlp_norm, self.shape.norm_eps)
            x = self.ops.linear(self.ops.silu_mul(self.ops.linear(x, layer.gate_up)), layer.down)
            if index < last:
                following = self.weights.layers[index + 1].attention_norm
                x, residual = self.ops.add_rms_norm(x, residual, following, self.shape.norm_eps)
        return residual + x

    def _queries_keys_values(
        self, x: Tensor, positions: Tensor, layer: LayerWeights
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, hidden] -> q [T, heads, head_dim] and k, v [T, kv_heads, head_dim], q and k rotated."""
        shape = self.shape
        heads = self.ops.linear(x, layer.qkv).view(x.shape[0], -1, shape.head_dim)
        q, k, v = torch.split(heads, [shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = self.ops.rms_norm(q, layer.q_norm, shape.norm_eps)
            k = self.ops.rms_norm(k, layer.k_norm, shape.norm_eps)
        q, k = self.ops.rotate(q, k, positions, self.rotary)
        return q, k, v

    def final_norm(self, hidden: Tensor) -> Tensor:
        """[O, hidden] -> [O, hidden]."""
        return self.ops.rms_norm(hidden, self.weights.final_norm, self.shape.norm_eps)

    def logits(self, hidden: Tensor, columns: Tensor | None = None) -> Tensor:
        """float32 [O, vocabulary] of final-normed states, or [O, C] of the token ids `columns` alone.

        A few columns are computed in float32: bfloat16 would round a logit near 20 to a multiple of 1/8.
        """
        if columns is None:
            return functional.linear(hidden, self.weights.head).float()
        return functional.linear(hidden.float(), self.weights.head[columns].float())
