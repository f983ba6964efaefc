"""Wrong answers that the adapter itself takes for right: mined by its own vectors, while it trains."""

from __future__ import annotations

import random

import numpy as np
import torch
from numpy.typing import NDArray

from mcp_discovery.training.corpus import HARD_RANKS, Corpus, Example, Source
from mcp_discovery.training.infer import Reader
from mcp_discovery.training.synthesis import made_up_request

OWN, POOLED = 36, 14
# How much nearer than the right tool a tool may be and still count as wrong. Outside a request's own
# labelled set nobody has said which tools serve it, so only clearly worse ones do.
LABELLED_MARGIN, MADE_UP_MARGIN, POOLED_MARGIN = 0.05, -0.01, -0.05


def mine(corpus: Corpus, reader: Reader, seed: int) -> int:
    """Sets `mined` of every example; returns how many wrong answers were found in all."""
    tools = reader.tool_vectors(corpus.tools)
    found = 0
    for number, source in enumerate(corpus.sources):
        rng = random.Random(f"{seed}/{number}")
        texts = [
            made_up_request(corpus.tools[example.positives[0]], rng) if example.text is None else example.text
            for example in source.examples
        ]
        vectors = reader.request_vectors(texts)
        for start in range(0, len(texts), 2048):
            part = vectors[start : start + 2048] @ tools.T
            own = _best(part[:, source.first : source.last], OWN + 8, source.first)
            pooled = _best(part, POOLED + 8, 0)
            examples = source.examples[start : start + 2048]
            nearest = _nearest_right(part, examples)
            for line, example in enumerate(examples):
                example.mined = _wrong(source, example, nearest[line], own, pooled, line)
                found += len(example.mined)
    return found


Ranked = tuple[NDArray[np.float32], NDArray[np.int64]]


def _best(similarity: torch.Tensor, most: int, first: int) -> Ranked:
    values, columns = similarity.topk(min(most, similarity.shape[1]), dim=1)
    return values.cpu().numpy(), columns.cpu().numpy() + first


def _nearest_right(similarity: torch.Tensor, examples: tuple[Example, ...]) -> list[float]:
    """The similarity of each example's least similar right tool."""
    lines = [line for line, example in enumerate(examples) for _ in example.positives]
    columns = [at for example in examples for at in example.positives]
    values = similarity[torch.tensor(lines), torch.tensor(columns)].cpu().tolist()
    least: dict[int, float] = {}
    for line, value in zip(lines, values, strict=True):
        least[line] = min(value, least.get(line, value))
    return [least[line] for line in range(len(examples))]


def _wrong(
    source: Source, example: Example, right: float, own: Ranked, pooled: Ranked, line: int
) -> NDArray[np.int32]:
    margin = LABELLED_MARGIN if source.exhaustive else MADE_UP_MARGIN
    kept: dict[int, float] = {}
    for value, at in zip(own[0][line].tolist(), own[1][line].tolist(), strict=True):
        if value < right + margin and at not in example.excluded and len(kept) < OWN:
            kept[at] = value
    room = len(kept) + POOLED
    for value, at in zip(pooled[0][line].tolist(), pooled[1][line].tolist(), strict=True):
        outside = not source.first <= at < source.last
        if outside and value < right + POOLED_MARGIN and at not in example.excluded and len(kept) < room:
            kept[at] = value
    best = sorted(kept, key=lambda at: -kept[at])[:HARD_RANKS]
    return np.array(best, dtype=np.int32)
