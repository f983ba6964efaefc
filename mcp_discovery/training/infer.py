"""Vectors and scores of an adapter outside of training steps: whole lists of rows, without gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from mcp_discovery.discovery.catalogue import Tool
from mcp_discovery.discovery.prompts import Prompts
from mcp_discovery.training.batches import LENGTH_STEP, Layout, Tokens
from mcp_discovery.training.forward import Decoder
from mcp_discovery.training.lora import LayerMatrices


class Reader:
    """Runs rows of any lengths through a decoder with fixed matrices."""

    def __init__(
        self,
        decoder: Decoder,
        matrices: Sequence[LayerMatrices],
        prompts: Prompts,
        prefix: Callable[[Tool], Tokens],
        tokens_at_once: int = 65_536,
    ) -> None:
        """prefix: `prompts.prefix`, or a cache of it."""
        self._prompts = prompts
        self._prefix = prefix
        self._decoder = decoder
        self._matrices = matrices
        self._tokens_at_once = tokens_at_once
        head = decoder.weights.head
        self._direction = (head[prompts.positive].float() - head[prompts.negative].float()).unsqueeze(1)

    @torch.no_grad()
    def last_states(self, rows: Sequence[Tokens]) -> Tensor:
        """float32 [rows, hidden]: the final-normed state of each row's last token, on the device."""
        width = self._decoder.weights.embedding.shape[1]
        states = torch.empty(len(rows), width, device=self._decoder.device)
        for chunk, length in self._chunks(rows):
            tokens = np.zeros((len(chunk), length), dtype=np.int64)
            ends = np.empty(len(chunk), dtype=np.int64)
            for line, at in enumerate(chunk):
                row = rows[at]
                tokens[line, : len(row)] = row
                ends[line] = line * length + len(row) - 1
            layout = Layout.of([(len(chunk), length)])
            place = self._decoder.device
            found = self._decoder.hidden_states(
                torch.from_numpy(tokens.ravel()).to(place),
                layout.positions().to(place),
                layout,
                self._matrices,
                torch.from_numpy(ends).to(place),
            )
            states[torch.tensor(chunk, device=place)] = found.float()
        return states

    def _chunks(self, rows: Sequence[Tokens]) -> Iterator[tuple[list[int], int]]:
        """Row numbers that run together, of similar length, and the length they are padded to."""
        order = sorted(range(len(rows)), key=lambda at: len(rows[at]))
        chunk: list[int] = []
        length = 0
        for at in order:
            needed = -(-len(rows[at]) // LENGTH_STEP) * LENGTH_STEP
            if chunk and (
                needed * (len(chunk) + 1) > self._tokens_at_once or needed > length + 2 * LENGTH_STEP
            ):
                yield chunk, length
                chunk = []
            chunk.append(at)
            length = needed
        if chunk:
            yield chunk, length

    def tool_vectors(self, tools: Sequence[Tool]) -> Tensor:
        """float32 [tools, hidden], unit length."""
        return functional.normalize(self.last_states([self._prefix(tool) for tool in tools]), dim=1)

    def request_vectors(self, texts: Sequence[str]) -> Tensor:
        """float32 [texts, hidden], unit length."""
        prompts = self._prompts
        return functional.normalize(
            self.last_states([prompts.query(prompts.cut(text)) for text in texts]), dim=1
        )

    def scores(
        self, tools: Sequence[Tool], texts: Sequence[str], candidates: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        """For each text the log odds of yes of its candidates (indices into `tools`), float32 on the CPU."""
        prefixes = [self._prefix(tool) for tool in tools]
        rows: list[Tokens] = []
        for text, chosen in zip(texts, candidates, strict=True):
            suffix = self._prompts.suffix(self._prompts.cut(text))
            rows.extend(prefixes[at] + suffix for at in chosen)
        logits = (self.last_states(rows) @ self._direction).squeeze(1).cpu()
        return list(torch.split(logits, [len(chosen) for chosen in candidates]))
