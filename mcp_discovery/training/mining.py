"""What an adapter's own vectors say of the training tools, while it trains.

For each example: wrong answers that the adapter takes for right; tools so near the right ones that
nobody can say they are wrong; and, of a small catalogue drawn at random that has no right tool, what
comes nearest, as it does where a request is asked that nothing serves.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mcp_discovery.training.corpus import HARD_RANKS, Corpus, Example, Ranks, Source
from mcp_discovery.training.infer import Reader
from mcp_discovery.training.synthesis import made_up_request

OWN, POOLED = 36, 14
# How much nearer than the right tool a tool may be and still count as wrong. Outside a request's own
# labelled set nobody has said which tools serve it, so only clearly worse ones do.
LABELLED_MARGIN, MADE_UP_MARGIN, POOLED_MARGIN = 0.05, -0.01, -0.05
# And to count as certainly wrong.
SURE_LABELLED, SURE_MADE_UP, SURE_POOLED = 0.0, -0.08, -0.15
FOREIGN, FOREIGN_MARGIN, FOREIGN_LIKENESS = 24, -0.15, 0.50
CATALOGUE_TOOLS = (40, 300)  # of a small catalogue
REQUESTS_A_CATALOGUE = 128
Ranked = tuple[NDArray[np.float32], NDArray[np.int64]]


def mine(corpus: Corpus, reader: Reader, seed: int) -> int:
    """Sets `mined`, `near` and `foreign` of every example; returns how many wrong answers were mined."""
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
                example.near = _near(source, example, nearest[line], own, pooled, line)
                found += len(example.mined)
        _draw_foreign(corpus, source, vectors, tools, rng)
    return found


def _best(similarity: Tensor, most: int, first: int) -> Ranked:
    values, columns = similarity.topk(min(most, similarity.shape[1]), dim=1)
    return values.cpu().numpy(), columns.cpu().numpy() + first


def _nearest_right(similarity: Tensor, examples: Sequence[Example]) -> list[float]:
    """The similarity of each example's least similar right tool."""
    lines = [line for line, example in enumerate(examples) for _ in example.positives]
    columns = [at for example in examples for at in example.positives]
    values = similarity[torch.tensor(lines), torch.tensor(columns)].cpu().tolist()
    least: dict[int, float] = {}
    for line, value in zip(lines, values, strict=True):
        least[line] = min(value, least.get(line, value))
    return [least[line] for line in range(len(examples))]


def _wrong(source: Source, example: Example, right: float, own: Ranked, pooled: Ranked, line: int) -> Ranks:
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


def _near(source: Source, example: Example, right: float, own: Ranked, pooled: Ranked, line: int) -> Ranks:
    margin = SURE_LABELLED if source.exhaustive else SURE_MADE_UP
    found = [at for value, at in zip(own[0][line], own[1][line], strict=True) if value >= right + margin]
    found += [
        at
        for value, at in zip(pooled[0][line], pooled[1][line], strict=True)
        if value >= right + SURE_POOLED and not source.first <= at < source.last
    ]
    return np.array(sorted(set(found).difference(example.positives)), dtype=np.int32)


def _draw_foreign(
    corpus: Corpus, source: Source, requests: Tensor, tools: Tensor, rng: random.Random
) -> None:
    """`foreign` of every example of a source: the same small catalogue for some examples in a row."""
    order = rng.sample(range(len(source.examples)), len(source.examples))
    for start in range(0, len(order), REQUESTS_A_CATALOGUE):
        lines = order[start : start + REQUESTS_A_CATALOGUE]
        examples = [source.examples[line] for line in lines]
        catalogue = _small_catalogue(corpus, rng)
        there = torch.tensor(catalogue, device=tools.device)
        first = torch.tensor([example.positives[0] for example in examples], device=tools.device)
        asked = requests[torch.tensor(lines, device=tools.device)]
        right = (asked * tools[first]).sum(1, keepdim=True)
        nearness = asked @ tools[there].T
        fits = (nearness > right + FOREIGN_MARGIN) | (tools[first] @ tools[there].T > FOREIGN_LIKENESS)
        values, columns = nearness.masked_fill(fits, -2.0).topk(min(FOREIGN, len(catalogue)), dim=1)
        for example, row, at in zip(examples, values.tolist(), columns.tolist(), strict=True):
            chosen = [catalogue[column] for value, column in zip(row, at, strict=True) if value > -2.0]
            example.foreign = _strangers(corpus, example, chosen)


def _strangers(corpus: Corpus, example: Example, chosen: Sequence[int]) -> Ranks:
    """Those of `chosen` that are of another server than the right tools and not called like them."""
    home = [corpus.siblings[at] for at in example.positives]
    kept = [
        at
        for at in chosen
        if at not in example.excluded
        and not any(corpus.siblings[at] is server for server in home)
        and not corpus.alike(at, example.positives)
    ]
    return np.array(kept, dtype=np.int32)


def _small_catalogue(corpus: Corpus, rng: random.Random) -> list[int]:
    """Whole servers drawn at random; of a server with more tools than the catalogue needs, some."""
    wanted = rng.randint(*CATALOGUE_TOOLS)
    chosen: dict[int, None] = {}
    for _ in range(wanted):
        members = corpus.siblings[rng.randrange(len(corpus.tools))]
        part = members if len(members) <= 60 else rng.sample(members, 60)
        chosen.update(dict.fromkeys(part))
        if len(chosen) >= wanted:
            break
    return list(chosen)
