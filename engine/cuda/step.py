"""A step on the card as few Python calls: one copy in, one plan, one captured graph.

Launched kernel by kernel a step is some 270 Python calls, each of which gives the interpreter lock
away; beside a busy thread that takes longer than the kernels. So the whole decoder is captured at a
few sizes (`Bucket`), over buffers that never move, and a step pads itself to the smallest that fits.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.attention.flashinfer import FlashInferAttention, Index
from engine.batch import KVCache, Part, StepRow
from engine.config import ModelShape
from engine.cuda.kernels import rms_norm, rotate_append, silu_mul
from engine.cuda.sizes import Bucket
from engine.cuda.staging import FlatStep, Sections, fill
from engine.weights import Weights

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

DTYPES = (torch.float16, torch.bfloat16)
RESIDUAL_SCALE = 2.0**-4
"""The residual stream is kept at this share of its size, so that float16, which ends at 65,504, holds what
models put there (SmolLM2-135M: up to 26,000 at its first token). A power of two: nothing is rounded by
it, and a norm takes it out again."""


def scale_residual(weights: Weights) -> None:
    """Scales what is added to the residual stream, in place, once: `CapturedSteps` wants it so."""
    for layer in weights.layers:
        layer.o.mul_(RESIDUAL_SCALE)
        layer.down.mul_(RESIDUAL_SCALE)


class CapturedSteps:
    """The decoder over fixed buffers, captured once a bucket. One stream, one thread.

    `weights` have been through `scale_residual`.
    """

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
        empty = FlatStep.of([self.empty_row], self._kv.page_tokens)
        with torch.cuda.stream(self._stream), torch.inference_mode():
            for bucket in self._sizes:
                self._plans[bucket] = self._prepare(empty, bucket, turn=0)
                self._forward(bucket)
                self._stream.synchronize()

    def capture(self, pool: _POOL_HANDLE) -> None:
        """Captures each bucket. After `warm_up`: what a capture loads for the first time would fail it."""
        with torch.cuda.stream(self._stream), torch.inference_mode():
            for bucket in reversed(self._sizes):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=self._stream):
                    self._forward(bucket)
                self._graphs[bucket] = graph
            self._stream.synchronize()

    def launch(self, parts: Iterable[Part], turn: int) -> Tensor:
        """Queues a step; returns the final-normed hidden states [outputs, hidden] in row order, a view that
        the next launch overwrites. `turn` alternates 0, 1: step n - 2 must have ended."""
        step = FlatStep.of(parts, self._kv.page_tokens)
        bucket = self._bucket(step)
        with torch.cuda.stream(self._stream):
            plan = self._prepare(step, bucket, turn)
            if plan != self._plans[bucket]:
                raise AssertionError("a plan left the layout that its graph was captured with")
            self._graphs[bucket].replay()
        return self._buffers["hidden"][: len(step.outputs)]

    def _bucket(self, step: FlatStep) -> Bucket:
        """The smallest size that the step fits; of two, the one with fewer tiles."""
        lengths, group = step.counts, self._group
        tokens, rows = len(step.tokens), len(lengths)
        for bucket in self._sizes:
            if tokens <= bucket.tokens and rows < bucket.rows:
                needed = int((-(-lengths * group // bucket.tile(group))).sum())
                if needed <= bucket.tiles(group):
                    return bucket
        raise AssertionError(f"a step of {tokens} tokens in {rows} rows is larger than any captured")

    def _prepare(self, step: FlatStep, bucket: Bucket, turn: int) -> list[int]:
        """Fills the staging array, sends it on its way and plans the attention."""
        at = self._sections
        used = fill(self._host[turn], at, step, bucket, self._kv.page_tokens, self._kv.pages)
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
        torch.index_select(weights.embedding, 0, tokens, out=x).mul_(RESIDUAL_SCALE)
        eps = shape.norm_eps * RESIDUAL_SCALE**2  # x / sqrt(mean(x^2) + eps) is then what it was
        for number, layer in enumerate(weights.layers):
            rms_norm(x, layer.attention_norm, eps, h)
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
            rms_norm(x, layer.mlp_norm, eps, h)
            torch.mm(h, layer.gate_up.t(), out=gate_up)
            silu_mul(gate_up, activated)
            torch.addmm(x, activated, layer.down.t(), out=x)
        rms_norm(x, weights.final_norm, eps, rows["hidden"])
