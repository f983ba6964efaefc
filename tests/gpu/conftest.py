"""Shapes, random models and page tables for the tests on a card."""

from __future__ import annotations

import subprocess
import sys
from array import array
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from engine.batch import KVCache, StepRow
from engine.config import ModelShape
from engine.model_files import weight_tensors
from engine.weights import Weights

SMOL = ModelShape(
    architecture="llama", layers=4, hidden=576, heads=9, kv_heads=3, head_dim=64, intermediate=1536,
    vocabulary=1024, context=2048, rope_theta=1e5, norm_eps=1e-5, tied_embeddings=True, qk_norm=False,
)  # fmt: skip
QWEN = ModelShape(
    architecture="qwen3", layers=3, hidden=1024, heads=16, kv_heads=8, head_dim=128, intermediate=3072,
    vocabulary=1024, context=2048, rope_theta=1e6, norm_eps=1e-6, tied_embeddings=True, qk_norm=True,
)  # fmt: skip
WIDE = ModelShape(
    architecture="llama", layers=2, hidden=512, heads=8, kv_heads=1, head_dim=64, intermediate=1024,
    vocabulary=512, context=1024, rope_theta=1e4, norm_eps=1e-5, tied_embeddings=True, qk_norm=False,
)  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def kernels() -> None:
    """Built before the first test; minutes on a machine that has none of them, seconds on others."""
    subprocess.run([sys.executable, "-m", "tests.gpu.kernels"], check=True)


@pytest.fixture(params=[SMOL, QWEN, WIDE], ids=["group3", "qwen3", "group8"])
def shape(request: pytest.FixtureRequest) -> ModelShape:
    value: ModelShape = request.param
    return value


def random_weights(shape: ModelShape, seed: int = 0) -> dict[str, Tensor]:
    """float32 on the CPU, rounded to bfloat16 so that both sides compute with the same numbers."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, size in weight_tensors(shape):
        noise = torch.randn(size, generator=generator)
        value = 1.0 + 0.1 * noise if len(size) == 1 else noise * size[-1] ** -0.5
        tensors[name] = value.bfloat16().float()
    return tensors


def weights_on(tensors: dict[str, Tensor], shape: ModelShape, dtype: torch.dtype, device: str) -> Weights:
    return Weights.from_tensors(shape, {name: t.to(device, dtype) for name, t in tensors.items()})


def empty_pages(shape: ModelShape, pages: int, dtype: torch.dtype, device: str) -> KVCache:
    size = (shape.layers, pages + 1, 2, 16, shape.kv_heads, shape.head_dim)
    return KVCache(torch.zeros(size, dtype=dtype, device=device))


@dataclass
class Sequences:
    """Random sequences with shuffled pages, fed in slices."""

    tokens: list[list[int]]
    pages: list[tuple[int, ...]]

    @classmethod
    def random(cls, lengths: list[int], vocabulary: int, pages: int, seed: int) -> Sequences:
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(pages, generator=generator).tolist()
        tokens, tables = [], []
        for length in lengths:
            tokens.append(torch.randint(vocabulary, (length,), generator=generator).tolist())
            tables.append(tuple(order.pop() for _ in range(-(-length // 16))))
        return cls(tokens, tables)

    def rows(self, slices: list[tuple[int, int, int]]) -> list[StepRow]:
        """(sequence, start, end) -> rows whose last token is read."""
        return [
            StepRow(array("i", self.tokens[s][start:end]), start, self.pages[s], output=True)
            for s, start, end in slices
        ]
