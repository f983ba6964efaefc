"""How well an adapter finds tools in labelled sets: used to steer training, not to report quality.

For each request 32 candidates come from BM25 and the adapter's vectors, fused by reciprocal rank, and are
scored. Measures (ranks from 0; a label's rank is the best of itself and its `alt`):

    nDCG@10   sum over labels with rank r < 10 of 1 / log2(r + 2), over the best such sum
    hit@1     1 where some label has rank 0
    R@k       share of labels with rank < k
    C@10      1 where every label has rank < 10
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from mcp_discovery.discovery.candidates import fuse
from mcp_discovery.discovery.lexical import LexicalIndex
from mcp_discovery.training.data import Query, ToolSet
from mcp_discovery.training.infer import Reader

CANDIDATES = 32
MEASURES = ("ndcg10", "hit1", "r5", "r32", "c10")
Figures = dict[str, dict[str, float]]
"""Method -> measure -> mean over requests."""


def evaluate(reader: Reader, each: ToolSet, most: int = 400) -> Figures:
    """Figures of one set by method, over at most `most` of its requests."""
    queries = list(each.queries)
    if len(queries) > most:
        queries = random.Random(13).sample(queries, most)
    texts = [query.text for query in queries]
    similarity = (reader.request_vectors(texts) @ reader.tool_vectors(each.tools).T).cpu()
    dense = similarity.argsort(dim=1, descending=True, stable=True)[:, :100].tolist()
    index = LexicalIndex.of(each.tools)
    mask = np.ones(len(each.tools), dtype=np.bool_)
    lexical = [index.order(text, mask, 100) for text in texts]
    candidates = [fuse(orders)[:CANDIDATES] for orders in zip(lexical, dense, strict=True)]
    scores = reader.scores(each.tools, texts, candidates)
    scored = [_ordered(chosen, logits) for chosen, logits in zip(candidates, scores, strict=True)]
    rankings: dict[str, Sequence[Sequence[int]]] = {
        "bm25": lexical,
        "dense": dense,
        "rrf": candidates,
        "scored": scored,
        "scored+rrf": [fuse(pair, (2.0, 1.0)) for pair in zip(scored, candidates, strict=True)],
        "scored+cos": [
            _ordered(chosen, logits + 10.0 * similarity[line, chosen])
            for line, (chosen, logits) in enumerate(zip(candidates, scores, strict=True))
        ],
    }
    keys = [tool.id for tool in each.tools]
    figures = {name: _figures(queries, keys, ranking) for name, ranking in rankings.items()}
    figures["scored"] |= _calibration(queries, keys, candidates, scores)
    figures["rrf"]["r32"] = float(
        np.mean([_measure(q, [keys[i] for i in c])["r32"] for q, c in zip(queries, candidates, strict=True)])
    )
    return figures


def _ordered(chosen: Sequence[int], logits: torch.Tensor) -> list[int]:
    return [chosen[at] for at in logits.argsort(descending=True, stable=True).tolist()]


def _figures(
    queries: Sequence[Query], keys: Sequence[str], ranking: Sequence[Sequence[int]]
) -> dict[str, float]:
    rows = [
        _measure(query, [keys[at] for at in order]) for query, order in zip(queries, ranking, strict=True)
    ]
    return {name: float(np.mean([row[name] for row in rows])) for name in MEASURES}


def _measure(query: Query, order: Sequence[str]) -> dict[str, float]:
    rank = {key: at for at, key in enumerate(order)}
    ranks = [
        min(rank.get(key, math.inf) for key in (label, *query.alt.get(label, ()))) for label in query.relevant
    ]
    ideal = sum(1 / math.log2(at + 2) for at in range(min(len(ranks), 10)))
    return {
        "ndcg10": sum(1 / math.log2(at + 2) for at in ranks if at < 10) / ideal,
        "hit1": float(min(ranks) == 0),
        "r5": sum(at < 5 for at in ranks) / len(ranks),
        "r32": sum(at < 32 for at in ranks) / len(ranks),
        "c10": float(all(at < 10 for at in ranks)),
    }


def _calibration(
    queries: Sequence[Query],
    keys: Sequence[str],
    candidates: Sequence[Sequence[int]],
    scores: Sequence[torch.Tensor],
) -> dict[str, float]:
    """ece: expected calibration error of all scores, ten bins of equal width. abstain_auc: the chance
    that the best score with the right tools there is above the best without them."""
    probabilities, right = [], []
    best_with, best_without = [], []
    for query, chosen, logits in zip(queries, candidates, scores, strict=True):
        acceptable = query.acceptable
        truth = [keys[at] in acceptable for at in chosen]
        probabilities += torch.sigmoid(logits).tolist()
        right += truth
        others = [value for value, true in zip(logits.tolist(), truth, strict=True) if not true]
        if any(truth) and others:
            best_with.append(float(logits.max()))
            best_without.append(max(others))
    p, y = np.array(probabilities), np.array(right, dtype=np.float64)
    bins = np.minimum((p * 10).astype(int), 9)
    ece = sum(
        abs(p[bins == b].mean() - y[bins == b].mean()) * (bins == b).mean()
        for b in range(10)
        if (bins == b).any()
    )
    with_, without = np.array(best_with)[:, None], np.array(best_without)[None, :]
    auc = float(((with_ > without) + 0.5 * (with_ == without)).mean()) if best_with else math.nan
    return {"ece": float(ece), "abstain_auc": auc}


def table(figures: Mapping[str, Figures]) -> str:
    """nDCG@10 and hit@1 of every set and method, and the means over sets but `pooled_real`."""
    methods = list(next(iter(figures.values())))
    lines = [f"{'nDCG@10 / hit@1':18}" + "".join(f"{method:>14}" for method in methods) + "   R@32  ECE  AUC"]

    def cells(values: Sequence[dict[str, float]]) -> str:
        return "".join(f"{value['ndcg10']:8.3f}/{value['hit1']:.3f}" for value in values)

    for name, by_method in figures.items():
        extra = by_method["scored"]
        numbers = (by_method["rrf"]["r32"], extra["ece"], extra["abstain_auc"])
        lines.append(f"{name:18}{cells(list(by_method.values()))}  " + " ".join(f"{n:.3f}" for n in numbers))
    counted = [by_method for name, by_method in figures.items() if name != "pooled_real"]
    means = [
        {key: float(np.mean([each[method][key] for each in counted])) for key in ("ndcg10", "hit1")}
        for method in methods
    ]
    lines.append(f"{'mean':18}{cells(means)}")
    return "\n".join(lines)
