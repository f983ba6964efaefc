"""A step on the card as few Python calls: one copy in, one plan, one captured graph.

Launched kernel by kernel a step is some 270 Python calls, each of which gives the interpreter lock
away; beside a busy thread that takes longer than the kernels. So the whole decoder is captured at a
few sizes (`Bucket`), over buffers that never move, and a step pads itself to the smallest that fits.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.attention.flashinfer import PACKED_TILES, FlashInferAttention, Index, query_tile, query_tiles
from engine.batch import KVCache, StepRow
from engine.config import ModelShape
from engine.cuda.kernels import rms_norm, rotate_append, silu_mul
from engine.weights import Weights

SHORT_ROW = 26  # tokens: a query of a dozen words in its frame


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """The size of a captured step: at most `tokens` new tokens in at most `rows - 1` rows, whose attention
    needs at most `tiles` query tiles. A graph launches all its tiles, needed or not, so a step of
    many short rows has a size of its own: for those the bound that holds for any rows is twice too high.
    """

    tokens: int
    rows: int
    plan_tokens: int  # what attention is planned for: it makes the tiles

    @classmethod
    def of_any_rows(cls, tokens: int, step_rows: int) -> Bucket:
        return cls(tokens, min(tokens, step_rows) + 1, tokens)

    @classmethod
    def of_short_rows(cls, tokens: int, step_rows: int, group: int) -> Bucket:
        """Rows of one tile each: at most 128 / group tokens, at least `SHORT_ROW` on average."""
        rows = min(tokens // SHORT_ROW, step_rows) + 1
        return cls(tokens, rows, rows + PACKED_TILES[-1] // group // 2)

    def tiles(self, group: int) -> int:
        return query_tiles(self.plan_tokens, self.rows, group)

    def tile(self, group: int) -> int:
        return query_tile(self.plan_tokens, self.rows, group)


def buckets(step_tokens: int, step_rows: int, group: int) -> tuple[Bucket, ...]:
    """Sizes to capture: a few small ones, then an eighth of the largest apart, so that padding costs
    little where the card is busy."""
    eighths = {step_tokens * eighth // 8 for eighth in range(1, 8)}
    sizes = {size for size in {16, 64, 256, 512, step_tokens} | eighths if 0 < size <= step_tokens}
    short = {Bucket.of_short_rows(size, step_rows, group) for size in sizes if size >= 512}
    return tuple(sorted(short | {Bucket.of_any_rows(size, step_rows) for size in sizes}))


@dataclass(frozen=True, slots=True)
class Sections:
    """Offsets of a step's int32 inputs in one staging array, so that one copy brings all of them."""

    tokens: int
    positions: int
    slots: int
    outputs: int
    query_starts: int
    page_starts: int
    last_page: int
    lengths: int
    page_ids: int
    end: int

    @classmethod
    def of(cls, step_tokens: int, step_rows: int, page_ids: int) -> Sections:
        # Each section starts on 16 bytes: kernels read it in vectors.
        sizes = (*(step_tokens,) * 3, *(step_rows + 2,) * 5, page_ids)
        return cls(*accumulate((-(-size // 4) * 4 for size in sizes), initial=0))


def activation_shapes(shape: ModelShape, step_tokens: int, step_rows: int) -> dict[str, tuple[int, ...]]:
    """The step's activation buffers by name, in the activation dtype."""
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    return {
        "residual": (step_tokens, shape.hidden),
        "normed": (step_tokens, shape.hidden),
        "qkv": (step_tokens, qkv),
        "attended": (step_tokens, shape.heads * shape.head_dim),
        "gate_up": (step_tokens, 2 * shape.intermediate),
        "activated": (step_tokens, shape.intermediate),
        "last_attended": (step_rows + 1, shape.heads * shape.head_dim),
        "last_residual": (step_rows + 1, shape.hidden),
        "hidden": (step_rows + 1, shape.hidden),
    }


class CapturedSteps:
    """The decoder over fixed buffers, captured once a bucket. One stream, one thread."""

    def __init__(
        self,
        shape: ModelShape,
        weights: Weights,
        kv: KVCache,
        attention: FlashInferAttention,
        *,
        table: Tensor,  # rotary_table, float32 [context, head_dim]
        activations: Mapping[str, Tensor],  # activation_shapes
        staging: Tensor,  # int32 [Sections.end], device
        sections: Sections,
        sizes: Sequence[Bucket],
        stream: torch.cuda.Stream,
    ) -> None:
        self._shape, self._weights, self._kv, self._attention = shape, weights, kv, attention
        self._table, self._buffers, self._sections = table, activations, sections
        self._group = shape.heads // shape.kv_heads
        self._sizes = sorted(sizes)  # by tokens, then rows: short rows before any rows
        self._stream = stream
        self._staging = staging
        self._pinned = [torch.zeros(sections.end, dtype=torch.int32, pin_memory=True) for _ in range(2)]
        self._host = [pinned.numpy() for pinned in self._pinned]
        self.empty_row = StepRow(
            array("i", [0]), start=0, pages=(kv.pages,), output=True
        )  # on the scratch page
        self._graphs: dict[Bucket, torch.cuda.CUDAGraph] = {}
        self._plans: dict[Bucket, list[int]] = {}

    @property
    def most_outputs(self) -> int:
        """Most rows of a step."""
        return max(bucket.rows for bucket in self._sizes) - 1

    def warm_up(self) -> None:
        """Runs each bucket once, so that every kernel it needs is loaded."""
        with torch.cuda.stream(self._stream), torch.inference_mode():
            for bucket in self._sizes:
                self._plans[bucket] = self._prepare([self.empty_row], bucket, turn=0)
                self._forward(bucket)
                self._stream.synchronize()

    def capture(self) -> None:
        """Captures each bucket. After `warm_up`: what a capture loads for the first time would fail it."""
        pool = torch.cuda.graph_pool_handle()
        with torch.cuda.stream(self._stream), torch.inference_mode():
            for bucket in reversed(self._sizes):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=self._stream):
                    self._forward(bucket)
                self._graphs[bucket] = graph
            self._stream.synchronize()

    def launch(self, rows: Sequence[StepRow], turn: int) -> Tensor:
        """Queues a step; returns the final-normed hidden states [outputs, hidden] in row order, a view that
        the next launch overwrites. `turn` alternates 0, 1: step n - 2 must have ended."""
        bucket = self._bucket(rows)
        with torch.cuda.stream(self._stream):
            plan = self._prepare(rows, bucket, turn)
            if plan != self._plans[bucket]:
                raise AssertionError("a plan left the layout that its graph was captured with")
            self._graphs[bucket].replay()
        return self._buffers["hidden"][: sum(row.output for row in rows)]

    def _bucket(self, rows: Sequence[StepRow]) -> Bucket:
        """The smallest size that the step fits; of two, the one with fewer tiles."""
        lengths = np.fromiter((len(row.tokens) for row in rows), np.int64, len(rows))
        tokens, group = int(lengths.sum()), self._group
        for bucket in self._sizes:
            if tokens <= bucket.tokens and len(rows) < bucket.rows:
                needed = int((-(-lengths * group // bucket.tile(group))).sum())
                if needed <= bucket.tiles(group):
                    return bucket
        raise AssertionError(f"a step of {tokens} tokens in {len(rows)} rows is larger than any captured")

    def _prepare(self, rows: Sequence[StepRow], bucket: Bucket, turn: int) -> list[int]:
        """Fills the staging array, sends it on its way and plans the attention."""
        at = self._sections
        used = fill(self._host[turn], at, rows, bucket, self._kv.page_tokens, self._kv.pages)
        self._staging[:used].copy_(self._pinned[turn][:used], non_blocking=True)
        host = self._pinned[turn]
        return self._attention.plan_captured(
            host[at.query_starts : at.query_starts + bucket.rows + 1],
            host[at.page_starts : at.page_starts + bucket.rows + 1],
            host[at.lengths : at.lengths + bucket.rows],
            bucket.plan_tokens,
            turn=turn,
            tiles=bucket.tiles(self._group),
        )

    def _forward(self, bucket: Bucket) -> None:
        """The decoder, top to bottom, over buffers that stay where they are."""
        shape, weights, at = self._shape, self._weights, self._sections
        b = {name: tensor[: bucket.tokens] for name, tensor in self._buffers.items()}
        rows = {name: tensor[: bucket.rows] for name, tensor in self._buffers.items()}
        x, h, qkv, gate_up, activated = b["residual"], b["normed"], b["qkv"], b["gate_up"], b["activated"]
        attended = b["attended"]
        q = qkv.view(bucket.tokens, -1, shape.head_dim)[:, : shape.heads]
        tokens = self._staging[at.tokens : at.tokens + bucket.tokens]
        positions = self._staging[at.positions : at.positions + bucket.tokens]
        slots = self._staging[at.slots : at.slots + bucket.tokens]
        outputs = self._staging[at.outputs : at.outputs + bucket.rows]
        index = Index(
            query_starts=self._staging[at.query_starts : at.query_starts + bucket.rows + 1],
            page_starts=self._staging[at.page_starts : at.page_starts + bucket.rows + 1],
            last_page=self._staging[at.last_page : at.last_page + bucket.rows],
            page_ids=self._staging[at.page_ids :],
        )
        torch.index_select(weights.embedding, 0, tokens, out=x)
        for number, layer in enumerate(weights.layers):
            rms_norm(x, layer.attention_norm, shape.norm_eps, h)
            torch.mm(h, layer.qkv.t(), out=qkv)
            norms = (
                (layer.q_norm, layer.k_norm)
                if layer.q_norm is not None and layer.k_norm is not None
                else None
            )
            rotate_append(
                qkv,
                self._table,
                positions,
                slots,
                self._kv.data[number],
                norms,
                heads=shape.heads,
                eps=shape.norm_eps,
            )
            self._attention.attend(
                number, q, attended.view(-1, shape.heads, shape.head_dim), self._plans[bucket], index
            )
            if number == shape.layers - 1:  # from here on only the rows that are read
                attended = torch.index_select(attended, 0, outputs, out=rows["last_attended"])
                x = torch.index_select(x, 0, outputs, out=rows["last_residual"])
                h, gate_up, activated = rows["normed"], rows["gate_up"], rows["activated"]
            torch.addmm(x, attended, layer.o.t(), out=x)
            rms_norm(x, layer.mlp_norm, shape.norm_eps, h)
            torch.mm(h, layer.gate_up.t(), out=gate_up)
            silu_mul(gate_up, activated)
            torch.addmm(x, activated, layer.down.t(), out=x)
        rms_norm(x, weights.final_norm, shape.norm_eps, rows["hidden"])


def fill(
    out: np.ndarray[tuple[int], np.dtype[np.int32]],
    at: Sections,
    rows: Sequence[StepRow],
    bucket: Bucket,
    page_tokens: int,
    scratch_page: int,
) -> int:
    """A step's inputs into `out`, padded to the bucket; returns how much of it is used.

    Padding tokens write to the scratch page and belong to no row; rows beyond the step are empty.
    """
    counts = np.fromiter((len(row.tokens) for row in rows), np.int32, len(rows))
    starts = np.fromiter((row.start for row in rows), np.int32, len(rows))
    ends = starts + counts
    used = -(-ends // page_tokens)
    pages = np.fromiter(
        chain.from_iterable(r.pages[:n] for r, n in zip(rows, used.tolist(), strict=True)), np.int32
    )
    first_token = np.concatenate(([0], np.cumsum(counts)))
    first_page = np.concatenate(([0], np.cumsum(used)))
    total = int(first_token[-1])
    positions = np.arange(total) + np.repeat(starts - first_token[:-1], counts)
    page_of = pages[np.repeat(first_page[:-1], counts) + positions // page_tokens]
    outputs = first_token[1:][np.fromiter((row.output for row in rows), np.bool_, len(rows))] - 1

    def put(start: int, values: np.ndarray[Any, Any], size: int, padding: int) -> None:
        out[start : start + len(values)] = values
        out[start + len(values) : start + size] = padding

    tokens = np.frombuffer(b"".join([row.tokens for row in rows]), np.int32)
    put(at.tokens, tokens, bucket.tokens, 0)
    put(at.positions, positions, bucket.tokens, 0)
    put(at.slots, page_of * page_tokens + positions % page_tokens, bucket.tokens, scratch_page * page_tokens)
    put(at.outputs, outputs, bucket.rows, 0)
    put(at.query_starts, first_token, bucket.rows + 1, total)
    put(at.page_starts, first_page, bucket.rows + 1, len(pages))
    put(at.last_page, (ends - 1) % page_tokens + 1, bucket.rows, 1)
    put(at.lengths, ends, bucket.rows, 0)
    out[at.page_ids : at.page_ids + len(pages)] = pages
    return at.page_ids + len(pages)
