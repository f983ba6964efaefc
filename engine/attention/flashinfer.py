"""Attention over pages by FlashInfer's paged prefill kernels (fa2).

One compiled module serves prefill and decode: FlashInfer's tensor-core decode is the same kernel with a
query tile of 16. Splitting along keys is off, so the float workspace is not used and a row's
reduction order does not depend on the rest of the batch.

The two functions of the module, plan and paged_run, are called directly instead of through the wrapper
class: the wrapper's plan loops over the rows in Python (1 to 2 ms at 400 rows, as long as a
quarter of a step) and always allocates 8 MiB of workspace and as much pinned memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.batch import KVCache, StepBatch
from engine.config import ModelShape
from engine.errors import EngineError

CAUSAL, NHD, NO_WINDOW, NO_SPLIT_SIZE = 1, 0, -1, -1
MOST_SMS = 160  # of any card these plans are for
PACKED_TILES = (16, 64, 128)  # query rows x group of one thread block, FA2DetermineCtaTileQ


def query_tile(tokens: int, rows: int, group: int) -> int:
    """Query rows of one thread block in a captured plan: FA2DetermineCtaTileQ of the longest row."""
    longest = max(tokens - rows + 1, 0) * group
    return next((size for size in PACKED_TILES if longest <= size), PACKED_TILES[-1])


def query_tiles(tokens: int, rows: int, group: int) -> int:
    """Thread blocks along the queries that a captured plan launches: the most that any `rows` rows of
    `tokens` tokens need (PrefillSplitQOKVIndptr)."""
    return -(-tokens * group // query_tile(tokens, rows, group)) + rows - 1


def int_workspace_bytes(tokens: int, rows: int, group: int) -> int:
    """The most int workspace of a captured plan, from PrefillPlan: three int32 a tile, one a row and
    one more, two scalars, each array aligned to 16 bytes; never fewer tiles than two blocks an SM."""
    tiles = max(query_tiles(tokens, rows, group), 2 * MOST_SMS)
    return 3 * (4 * tiles + 16) + 4 * (rows + 1) + 16 + 64


@dataclass(frozen=True, slots=True)
class Index:
    """A step's row index on the device, int32: FlashInfer's three arrays and the page ids."""

    query_starts: Tensor  # [R + 1]
    page_starts: Tensor  # [R + 1]
    last_page: Tensor  # [R], tokens in each row's last page
    page_ids: Tensor  # [sum of pages]


def load_module(dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int) -> Any:
    """FlashInfer's compiled module (plan, paged_run). Importing FlashInfer initialises CUDA.

    Raises EngineError where FlashInfer, or the kernel built ahead, is missing.
    """
    try:
        from flashinfer.prefill import get_batch_prefill_module

        return get_batch_prefill_module(
            "fa2", dtype, kv_dtype, dtype, torch.int32, head_dim, head_dim, 0, False, False, False
        )
    except ImportError as error:
        raise EngineError(
            "FlashInfer is not installed: install mcp-discovery[cuda], or serve with --device cpu"
        ) from error
    except RuntimeError as error:
        raise EngineError(
            f"a FlashInfer kernel is not built ({error}): run mcp-discovery model build-kernels"
        ) from error


class FlashInferAttention:
    """The attention protocol on CUDA. One instance serves one KV cache on one stream.

    `workspace` is uint8 on the device, at least `int_workspace_bytes`; plans are written to it in stream
    order, so every plan of a stream may share it. The pinned halves are alternated by `turn`: the
    copy of a plan may still be queued while the next is made.
    """

    def __init__(self, kv: KVCache, shape: ModelShape, dtype: torch.dtype, workspace: Tensor) -> None:
        self.name = (
            f"flashinfer fa2 paged prefill and decode, pages {str(kv.data.dtype).removeprefix('torch.')}"
        )
        self._kv = kv
        self._shape = shape
        self._module = load_module(dtype, kv.data.dtype, shape.head_dim)
        self._workspace = workspace
        self._float_workspace = workspace[:16]  # never written: no split along keys
        self._pinned = [torch.zeros(workspace.numel(), dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        processors = torch.cuda.get_device_properties(kv.data.device).multi_processor_count
        self._least_tiles = 2 * processors // shape.kv_heads  # a captured plan never launches fewer
        self._scale = 1.0 / math.sqrt(shape.head_dim)
        self._plan: list[int] = []
        self._index: Index | None = None

    def plan_rows(self, query_starts: Tensor, page_starts: Tensor, lengths: Tensor, tokens: int) -> list[int]:
        """Plans R rows from int32 host tensors; the plan's arrays follow the stream to the device."""
        return self._call_plan(query_starts, page_starts, lengths, tokens, turn=0, captured=False)

    def plan_captured(
        self,
        query_starts: Tensor,
        page_starts: Tensor,
        lengths: Tensor,
        tokens: int,
        *,
        turn: int,
        tiles: int,
    ) -> list[int]:
        """The same for a graph of at most `tokens` tokens and exactly R rows, the last of them empty.

        The graph always launches the same query `tiles`. Those that this step does not need are pointed
        at the first tile of the empty row. What an earlier plan left there would be read as the index of
        a row, wherever that points, or as a tile far beyond the row's keys.
        """
        pinned = self._pinned[turn].view(torch.int32)
        pinned.zero_()
        pinned[: max(tiles, self._least_tiles)].fill_(lengths.numel() - 1)  # the plan's first array: rows
        return self._call_plan(query_starts, page_starts, lengths, tokens, turn=turn, captured=True)

    def _call_plan(
        self,
        query_starts: Tensor,
        page_starts: Tensor,
        lengths: Tensor,
        tokens: int,
        *,
        turn: int,
        captured: bool,
    ) -> list[int]:
        shape = self._shape
        plan = self._module.plan(
            self._float_workspace, self._workspace, self._pinned[turn], query_starts, page_starts, lengths,
            tokens, lengths.numel(), shape.heads, shape.kv_heads, self._kv.page_tokens, captured,
            shape.head_dim, shape.head_dim, True, NO_WINDOW, NO_SPLIT_SIZE, True, 0,
        )  # fmt: skip
        return [int(value) for value in plan]

    def attend(self, layer: int, q: Tensor, out: Tensor, plan: list[int], index: Index) -> None:
        """Causal attention of q [T, heads, head_dim] (any row stride) over the pages of `layer`."""
        pages = self._kv.data[layer]
        self._module.paged_run(
            self._float_workspace, self._workspace, plan, q, pages[:, 0], pages[:, 1],
            index.query_starts, index.page_starts, index.page_ids, index.last_page, out, None,
            CAUSAL, NHD, NO_WINDOW, False, None, None, None, None, None, None,
            0.0, self._scale, None, None, None, 1.0, 1e4, 0, self._float_workspace.numel(),
        )  # fmt: skip

    def plan(self, batch: StepBatch) -> None:
        device = self._kv.data.device
        page_tokens = self._kv.page_tokens
        self._plan = self.plan_rows(
            batch.query_starts, batch.page_starts, batch.lengths, batch.tokens.numel()
        )
        self._index = Index(
            query_starts=batch.query_starts.to(device),
            page_starts=batch.page_starts.to(device),
            last_page=((batch.lengths - 1) % page_tokens + 1).to(device),
            page_ids=batch.page_ids.to(device),
        )
        self._slots = batch.slots

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._index is None:
            raise EngineError("attention was called before its plan")
        pages = self._kv.data[layer]
        page, offset = self._slots // self._kv.page_tokens, self._slots % self._kv.page_tokens
        pages[page, 0, offset] = k.to(pages.dtype)
        pages[page, 1, offset] = v.to(pages.dtype)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        self.attend(layer, q, out, self._plan, self._index)
        return out
