"""Full logits and the likeliest token of rows of a step, captured like the steps, in buffers of the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.cuda.sizes import column_slices
from engine.memory import LOGIT_ROWS

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

FEW_ROWS = 8  # a second, smaller size: a lone continuation need not pay for LOGIT_ROWS


class CapturedHead:
    """Of up to LOGIT_ROWS states at once.

    Captured for one reason more: the matrix library keeps a workspace of 32 MiB for each thread that
    calls it, and the thread that steps is not the one that loads. A graph brings its own.
    """

    def __init__(self, head: Tensor, buffers: Mapping[str, Tensor], stream: torch.cuda.Stream) -> None:
        """head [vocabulary, hidden]; `buffers` are those of `head_buffers`."""
        self.logits = buffers["logits"]
        self._head, self._states, self._rows = head, buffers["head states"], buffers["head rows"]
        self._best, self._token = buffers["best logits"], buffers["best tokens"]
        self._best_of, self._token_of = buffers["slice logits"], buffers["slice tokens"]
        self._slice = buffers["best slices"]
        self._slices = column_slices(head.shape[0])
        self._stream = stream
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def capture(self, pool: _POOL_HANDLE) -> None:
        with torch.cuda.stream(self._stream), torch.inference_mode():
            for rows in (LOGIT_ROWS, FEW_ROWS):
                self._run(rows)
                self._stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=self._stream):
                    self._run(rows)
                self._graphs[rows] = graph

    def _run(self, rows: int) -> None:
        torch.mm(self._states[:rows], self._head.t(), out_dtype=torch.float32, out=self.logits[:rows])
        self._choose(rows)

    def _choose(self, rows: int) -> None:
        """The likeliest tokens of the logits; of several that are equal the first, as everywhere."""
        logits = self.logits[:rows]
        if len(self._slices) == 1:
            torch.max(logits, dim=-1, out=(self._best[:rows], self._token[:rows]))
            return
        best, token, place = self._best_of[:, :rows], self._token_of[:, :rows], self._slice[:, :rows]
        for at, (start, stop) in enumerate(self._slices):
            torch.max(logits[:, start:stop], dim=-1, out=(best[at], token[at]))
            token[at].add_(start)
        torch.max(best, dim=0, keepdim=True, out=(self._best[None, :rows], place))
        torch.gather(token, 0, place, out=self._token[None, :rows])

    def pick(self, hidden: Tensor, places: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(logit, token) of the likeliest token of the rows `places` of `hidden`, at most LOGIT_ROWS of
        them, in buffers that the next call overwrites; `logits` then holds all of theirs."""
        count = len(places)
        if count == hidden.shape[0]:
            self._states[:count].copy_(hidden)
        else:
            rows = self._rows[:count]
            rows.copy_(torch.tensor(places, dtype=torch.int32))
            torch.index_select(hidden, 0, rows, out=self._states[:count])
        self._graphs[FEW_ROWS if count <= FEW_ROWS else LOGIT_ROWS].replay()
        return self._best[:count], self._token[:count]
