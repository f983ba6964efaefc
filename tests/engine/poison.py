"""An engine whose free pages hold what must never be read."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from engine.attention.torch import TorchAttention
from engine.batch import KVCache
from engine.core import Core, CoreLimits
from engine.engine import Engine
from engine.model import Model
from engine.pages import PagePool
from engine.runner import TorchRunner
from engine.schedule import StepLimits

PAGE_TOKENS = 16


def start(model: Model, pages: int, *, step_tokens: int = 256, poison: float = math.nan) -> Engine:
    """An engine whose free pages hold `poison`, from the first moment on."""
    shape = model.shape
    size = (shape.layers, pages + 1, 2, PAGE_TOKENS, shape.kv_heads, shape.head_dim)
    kv = KVCache(torch.full(size, poison))

    def spoil(freed: Sequence[int]) -> None:
        kv.data[:, list(freed)] = poison

    limits = CoreLimits(
        step=StepLimits(tokens=step_tokens, rows=64),
        depth=1,
        max_queue=1000,
        max_queued_tokens=1_000_000,
        vocabulary=shape.vocabulary,
        context=shape.context,
    )
    pool = PagePool(pages, PAGE_TOKENS, on_free=spoil)
    engine = Engine(Core(pool, limits), TorchRunner(model, TorchAttention(kv, shape), kv))
    engine.start()
    engine.mark_ready()
    return engine
