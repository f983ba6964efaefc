"""Attention over pages in plain torch, on any device: the reference of every other backend.

Rows of similar length are padded into one block and attended at once. A block gathers keys and
values token by token; its padding reads the row's own first token, so what lies in a page beyond a
row's length is never touched, and the mask hides the padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional

from engine.batch import KVCache, StepBatch
from engine.config import ModelShape

_SPAN_QUERIES = 256  # a row with more new tokens is attended in spans of this many
_BLOCK_KEYS = 16_384  # most keys a block gathers, unless one span alone has more


@dataclass(frozen=True, slots=True)
class _Span:
    """New tokens of one row: flat tokens [first, first + queries), the last at position keys - 1."""

    row: int
    first: int
    queries: int
    keys: int


@dataclass(frozen=True, slots=True)
class _Block:
    """B spans padded to Q queries and K keys. Tensors are on the cache's device."""

    queries: Tensor  # int64 [B, Q]: flat token of each query; padding repeats the last
    keys: Tensor  # int64 [B, K]: flat key slot of each position; padding repeats the first
    mask: Tensor  # bool [B, 1, G * Q, K]: True where query sees key; G = heads / kv_heads
    used: Tensor | None  # int64: which of the B * Q queries are real; None: all


class TorchAttention:
    """`Attention` by gather and `scaled_dot_product_attention`. Pages may be of another dtype."""

    name = "torch"

    def __init__(self, kv: KVCache, shape: ModelShape) -> None:
        self._kv = kv
        self._group = shape.heads // shape.kv_heads
        self._key_slots = torch.empty(0, dtype=torch.int64)
        self._blocks: list[_Block] = []

    def plan(self, batch: StepBatch) -> None:
        """Everything about a step that no layer changes."""
        self._key_slots = _key_slots(batch.slots, self._kv.page_tokens)
        pages = _page_table(batch)
        spans = _spans(batch)
        self._blocks = [self._block(block, pages) for block in _blocks(spans)]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        page_tokens = self._kv.page_tokens
        slots = self._kv.data[layer].flatten(0, 2)  # [(pages + 1) * 2 * page_tokens, kv_heads, head_dim]
        slots.index_copy_(0, self._key_slots, k.to(slots.dtype))
        slots.index_copy_(0, self._key_slots + page_tokens, v.to(slots.dtype))
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for block in self._blocks:
            keys = slots[block.keys].to(q.dtype).transpose(1, 2)
            values = slots[block.keys + page_tokens].to(q.dtype).transpose(1, 2)
            attended = functional.scaled_dot_product_attention(
                self._fold(q[block.queries]), keys, values, attn_mask=block.mask
            )
            attended = self._unfold(attended).flatten(0, 1)
            targets = block.queries.flatten()
            if block.used is not None:
                attended, targets = attended[block.used], targets[block.used]
            out.index_copy_(0, targets, attended)
        return out

    def _fold(self, q: Tensor) -> Tensor:
        """[B, Q, kv_heads * G, D] -> [B, kv_heads, G * Q, D]: the heads of a group share their keys."""
        rows, queries, heads, width = q.shape
        grouped = q.view(rows, queries, heads // self._group, self._group, width)
        return grouped.permute(0, 2, 3, 1, 4).flatten(2, 3)

    def _unfold(self, attended: Tensor) -> Tensor:
        """[B, kv_heads, G * Q, D] -> [B, Q, kv_heads * G, D]."""
        rows, kv_heads, _, width = attended.shape
        grouped = attended.reshape(rows, kv_heads, self._group, -1, width)
        return grouped.permute(0, 3, 1, 2, 4).flatten(2, 3)

    def _block(self, spans: list[_Span], pages: Tensor) -> _Block:
        page_tokens, device = self._kv.page_tokens, self._kv.data.device
        row, first, queries, keys = torch.tensor([(s.row, s.first, s.queries, s.keys) for s in spans]).T
        column = torch.arange(int(queries.max()))
        position = torch.arange(int(keys.max()))
        real_query = column < queries[:, None]
        query = first[:, None] + torch.minimum(column, queries[:, None] - 1)
        within = torch.where(position < keys[:, None], position, 0)
        page = torch.gather(pages[row], 1, within // page_tokens)
        slot = _key_slots(page * page_tokens + within % page_tokens, page_tokens)
        # Bottom-right aligned: query j of n sits at position keys - n + j. Padding sees the first key.
        sees = position <= torch.where(real_query, (keys - queries)[:, None] + column, 0)[:, :, None]
        used = None if bool(real_query.all()) else real_query.flatten().nonzero().squeeze(1).to(device)
        mask = sees.repeat(1, self._group, 1).unsqueeze(1)
        return _Block(query.to(device), slot.to(device), mask.to(device), used)


def _key_slots(slots: Tensor, page_tokens: int) -> Tensor:
    """Slots (page * page_tokens + offset) as rows of the cache, where a page is keys, then values.

    The value of a key's slot is `page_tokens` rows further on.
    """
    return slots + slots // page_tokens * page_tokens


def _page_table(batch: StepBatch) -> Tensor:
    """int64 [R, most pages of a row], padded with 0."""
    counts = batch.page_starts.diff()
    column = torch.arange(int(counts.max()))
    index = torch.where(column < counts[:, None], batch.page_starts[:-1, None] + column, 0)
    return batch.page_ids.long()[index]


def _spans(batch: StepBatch) -> list[_Span]:
    """Each row's new tokens, cut into spans of at most `_SPAN_QUERIES`."""
    spans = []
    starts = batch.query_starts.tolist()
    for row, length in enumerate(batch.lengths.tolist()):
        for first in range(starts[row], starts[row + 1], _SPAN_QUERIES):
            queries = min(_SPAN_QUERIES, starts[row + 1] - first)
            keys = length - (starts[row + 1] - first - queries)
            spans.append(_Span(row, first, queries, keys))
    return spans


def _blocks(spans: list[_Span]) -> list[list[_Span]]:
    """Spans whose query counts and key counts have the same bit lengths, at most `_BLOCK_KEYS` a block."""

    def size(span: _Span) -> tuple[int, int]:
        return (span.queries - 1).bit_length(), (span.keys - 1).bit_length()

    blocks: list[list[_Span]] = []
    for (_, key_bits), group in groupby(sorted(spans, key=size), key=size):
        members = list(group)
        most = max(1, _BLOCK_KEYS >> key_bits)
        blocks.extend(members[at : at + most] for at in range(0, len(members), most))
    return blocks
