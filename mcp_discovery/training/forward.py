"""The decoder over padded blocks of rows: dense, causal, differentiable.

The same arithmetic as `engine.model.Model`, one layer a call, so that a compiler sees one layer and
compiles it once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from engine.config import ModelShape
from engine.model import TorchOps, rotary_table
from engine.weights import Weights
from mcp_discovery.training.batches import Block, Layout
from mcp_discovery.training.lora import LayerMatrices

Layer = Callable[..., Tensor]


OPS = TorchOps()


def attend(q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[Block]) -> Tensor:
    """Causal attention within each row. q [T, heads, d]; k, v [T, kv_heads, d]; returns [T, heads * d]."""
    group = q.shape[1] // k.shape[1]
    outputs = []
    for start, rows, length in blocks:
        part = slice(start, start + rows * length)
        q_rows, k_rows, v_rows = (
            x[part].view(rows, length, -1, x.shape[2]).transpose(1, 2)
            for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
        )
        out = functional.scaled_dot_product_attention(q_rows, k_rows, v_rows, is_causal=True)
        outputs.append(out.transpose(1, 2).reshape(rows * length, -1))
    return torch.cat(outputs)


class Heads(NamedTuple):
    """The numbers of a model's shape that a layer needs."""

    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float


def layer_forward(
    hidden: Tensor,
    norms: tuple[Tensor, Tensor],
    head_norms: tuple[Tensor, Tensor] | None,
    matrices: LayerMatrices,
    positions: Tensor,
    rotary: Tensor,
    shape: Heads,
    blocks: tuple[Block, ...],
) -> Tensor:
    """[T, hidden] -> [T, hidden]. norms: before attention, before the MLP; head_norms: q's and k's."""
    x = OPS.rms_norm(hidden, norms[0], shape.norm_eps)
    heads = OPS.linear(x, matrices.qkv).view(x.shape[0], -1, shape.head_dim)
    q, k, v = torch.split(heads, [shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
    if head_norms is not None:
        q = OPS.rms_norm(q, head_norms[0], shape.norm_eps)
        k = OPS.rms_norm(k, head_norms[1], shape.norm_eps)
    q, k = OPS.rotate(q, k, positions, rotary)
    hidden = hidden + OPS.linear(attend(q, k, v, blocks), matrices.o)
    x = OPS.rms_norm(hidden, norms[1], shape.norm_eps)
    return hidden + OPS.linear(OPS.silu_mul(OPS.linear(x, matrices.gate_up)), matrices.down)


class Decoder:
    """A frozen base model; each call brings the matrices to use."""

    def __init__(self, shape: ModelShape, weights: Weights, longest: int, *, compiled: bool) -> None:
        """longest: tokens of the longest row; compiled: training passes go through torch.compile."""
        self.weights = weights
        self._heads = Heads(shape.heads, shape.kv_heads, shape.head_dim, shape.norm_eps)
        self._rotary = rotary_table(shape, longest, weights.embedding.device)
        self._trained: Layer = layer_forward
        if compiled:
            self._trained = torch.compile(layer_forward, fullgraph=True, dynamic=False)

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    def hidden_states(
        self,
        tokens: Tensor,
        positions: Tensor,
        layout: Layout,
        matrices: Sequence[LayerMatrices],
        rows: Tensor,
    ) -> Tensor:
        """Final-normed states [O, hidden] of the tokens `rows`. tokens, positions: int64 [T] in `layout`."""
        training = torch.is_grad_enabled()
        step = self._trained if training else layer_forward
        hidden = functional.embedding(tokens, self.weights.embedding)
        if training:
            hidden.requires_grad_()  # so that the first layer is compiled like all others
        for layer, changed in zip(self.weights.layers, matrices, strict=True):
            norms = (layer.attention_norm, layer.mlp_norm)
            qk = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
            hidden = step(hidden, norms, qk, changed, positions, self._rotary, self._heads, layout.blocks)
        return OPS.rms_norm(hidden[rows], self.weights.final_norm, self._heads.norm_eps)
