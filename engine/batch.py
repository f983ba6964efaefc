"""A step's plan as flat tensors.

A step runs R rows of one or more new tokens each, T tokens in all. A row's keys and values live
in pages of `page_tokens` tokens; page ids index the second axis of the KV cache.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of every page: `data` is [layers, pages + 1, 2, page_tokens, kv_heads, head_dim].

    Index 0 on the third axis is keys, 1 values. The last page belongs to no sequence: padding
    writes there. Zeroed at creation, since a kernel may multiply what it has masked by zero.
    """

    data: Tensor

    @property
    def pages(self) -> int:
        return int(self.data.shape[1]) - 1

    @property
    def page_tokens(self) -> int:
        return int(self.data.shape[3])


@dataclass(slots=True)
class StepRow:
    """One sequence's share of a step: tokens [start, start + len(tokens)) of it, over `pages`.

    A value: not frozen only because creating a frozen one costs four times as much, once a row.
    """

    tokens: array[int]  # int32, so that a step's are joined as bytes; not to be changed
    start: int  # tokens before these whose keys and values are in the pages
    pages: tuple[int, ...]  # every page up to the last of these tokens, in order
    output: bool  # read the hidden state of the last token


@dataclass(slots=True)
class StepBlock:
    """R rows of one request that a step runs whole, each with its output read: row r computes `counts[r]`
    tokens after the `starts[r]` that are in its pages already. All arrays are int32.

    What rows have is laid end to end, so that the host's work on a step goes by requests, not by rows.
    """

    tokens: array[int]  # [sum of counts]
    counts: array[int]  # [R]
    starts: array[int]  # [R]
    pages: array[int]  # [sum of page_counts]
    page_counts: array[int]  # [R], exactly those that the row's tokens fill
    output = True

    def __len__(self) -> int:
        return len(self.counts)

    def rows(self) -> Iterator[StepRow]:
        """The same as single rows."""
        token = page = 0
        for count, start, pages in zip(self.counts, self.starts, self.page_counts, strict=True):
            yield StepRow(
                self.tokens[token : token + count], start, tuple(self.pages[page : page + pages]), True
            )
            token, page = token + count, page + pages


Part = StepRow | StepBlock
"""What a request runs in a step."""


def single_rows(parts: Iterable[Part]) -> list[StepRow]:
    """Every row of a step by itself, in order."""
    rows: list[StepRow] = []
    for part in parts:
        if isinstance(part, StepBlock):
            rows.extend(part.rows())
        else:
            rows.append(part)
    return rows


@dataclass(frozen=True, slots=True)
class StepBatch:
    """R rows, T tokens, O outputs. Index tensors of attention stay on the host (int32): attention
    backends put what they need on the device when they plan."""

    tokens: Tensor  # int64 [T], device
    positions: Tensor  # int64 [T], device
    slots: Tensor  # int64 [T], device: page * page_tokens + offset, where each token's k and v go
    outputs: Tensor  # int64 [O], device: token rows whose hidden state is read
    query_starts: Tensor  # int32 [R + 1], host: row r has tokens [query_starts[r], query_starts[r + 1])
    lengths: Tensor  # int32 [R], host: tokens of row r in pages once this step has written its own
    page_starts: Tensor  # int32 [R + 1], host: row r's pages in page_ids
    page_ids: Tensor  # int32 [sum of pages], host


def build_batch(rows: list[StepRow], page_tokens: int, device: torch.device) -> StepBatch:
    """Flat tensors of a step. Raises ValueError where a row's pages do not cover its tokens."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    outputs: list[int] = []
    query_starts, page_starts = [0], [0]
    lengths: list[int] = []
    page_ids: list[int] = []
    for row in rows:
        end = row.start + len(row.tokens)
        if not row.tokens or len(row.pages) * page_tokens < end:
            raise ValueError(f"{len(row.pages)} pages do not cover tokens {row.start} to {end}")
        tokens.extend(row.tokens)
        positions.extend(range(row.start, end))
        slots.extend(
            row.pages[p // page_tokens] * page_tokens + p % page_tokens for p in range(row.start, end)
        )
        if row.output:
            outputs.append(len(tokens) - 1)
        used = -(-end // page_tokens)
        page_ids.extend(row.pages[:used])
        lengths.append(end)
        query_starts.append(len(tokens))
        page_starts.append(len(page_ids))

    def on_device(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)

    def on_host(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return StepBatch(
        tokens=on_device(tokens),
        positions=on_device(positions),
        slots=on_device(slots),
        outputs=on_device(outputs),
        query_starts=on_host(query_starts),
        lengths=on_host(lengths),
        page_starts=on_host(page_starts),
        page_ids=on_host(page_ids),
    )
