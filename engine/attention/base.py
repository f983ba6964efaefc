"""Attention over pages: one protocol, a backend a device."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from engine.batch import StepBatch


class Attention(Protocol):
    """Writes a step's keys and values into pages and attends over them.

    `plan` is called once a step, before the first layer; the call then serves each layer. Causal:
    a row's token at position p sees positions 0..p of its own pages and nothing else.
    """

    name: str

    def plan(self, batch: StepBatch) -> None: ...

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, heads, head_dim]; k, v [T, kv_heads, head_dim], rotated; returns [T, heads, head_dim]."""
        ...
