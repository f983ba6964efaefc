"""How well an adapter finds tools in labelled sets: used to steer training, not to report quality.

For each request 32 candidates come from BM25 and the adapter's vectors, fused by reciprocal rank, and are
scored. Measures (ranks from 0; a label's rank is the best of itself and its `alt`):

    nDCG@10   sum over labels with rank r < 10 of 1 / log2(r + 2), over the best such sum
    hit@1     1 where some label has rank 0
    R@k       share of labels with rank < k
    C@10      1 where every label has rank < 10

Abstention is judged as in serving: a request is doubted where no candidate has
`max(logit, floor) + weight * cosine` above a bound. The bound is one for all sets: the lowest at which
at most 5.5 of 60 requests that nothing serves are offered a tool.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from mcp_discovery.discovery.calibration import COSINE_WEIGHT
from mcp_discovery.discovery.candidates import fuse
from mcp_discovery.discovery.lexical import LexicalIndex
from mcp_discovery.training.data import Query, ToolSet
from mcp_discovery.training.infer import Reader

CANDIDATES = 32
MEASURES = ("ndcg10", "hit1", "r5", "r32", "c10")
SERVED = "scored+cos"  # the order that serving publishes
REPEATED = "pooled_real"  # repeats queries of other sets, so it is left out of means
OFFERED = 5.5 / 60
DOUBT_FLOOR = -9.0
DOUBT_WEIGHTS = (0.0, 5.0, 10.0, 20.0, 30.0, 50.0)
T = TypeVar("T")
Figures = dict[str, dict[str, float]]
"""Method -> measure -> mean over requests."""


class Case:
    """A set's tools, the requests asked of them, and requests that none of them serves."""

    def __init__(self, each: ToolSet, most: int, idle: Sequence[str] = ()) -> None:
        """At most `most` requests of each kind, drawn with a fixed seed."""
        self.name = each.name
        self.tools = each.tools
        self.queries: Sequence[Query] = _sampled(each.queries, most)
        self.idle = _sampled(idle, most)
        self.texts = [*(query.text for query in self.queries), *self.idle]
        index = LexicalIndex.of(each.tools)
        mask = np.ones(len(each.tools), dtype=np.bool_)
        self.lexical = [index.order(text, mask, 100) for text in self.texts]


def _sampled(items: Sequence[T], most: int) -> list[T]:
    return random.Random(13).sample(list(items), most) if len(items) > most else list(items)


@dataclass(frozen=True, slots=True)
class Reading:
    """What an adapter makes of a case, by request: its own order, the candidates, and of each of them
    the log odds of yes and the cosine, float32 on the CPU."""

    case: Case
    dense: Sequence[Sequence[int]]
    candidates: Sequence[Sequence[int]]
    logits: Sequence[Tensor]
    cosines: Sequence[Tensor]

    def served(self) -> list[list[int]]:
        """The published order of each request's candidates."""
        return [
            _ordered(chosen, logits + COSINE_WEIGHT * cosines)
            for chosen, logits, cosines in zip(self.candidates, self.logits, self.cosines, strict=True)
        ]

    def assurance(self, weight: float) -> Tensor:
        """float32 [requests]: what doubt looks at, of the best candidate."""
        best = [
            float((logits.clamp(min=DOUBT_FLOOR) + weight * cosines).max())
            for logits, cosines in zip(self.logits, self.cosines, strict=True)
        ]
        return torch.tensor(best)


def read(reader: Reader, case: Case) -> Reading:
    similarity = (reader.request_vectors(case.texts) @ reader.tool_vectors(case.tools).T).cpu()
    dense = similarity.argsort(dim=1, descending=True, stable=True)[:, :100].tolist()
    candidates = [fuse(orders)[:CANDIDATES] for orders in zip(case.lexical, dense, strict=True)]
    logits = reader.scores(case.tools, case.texts, candidates)
    cosines = [similarity[line, chosen] for line, chosen in enumerate(candidates)]
    return Reading(case, dense, candidates, logits, cosines)


def figures_of(reading: Reading) -> Figures:
    """Figures of the labelled requests by method."""
    case = reading.case
    scored = [
        _ordered(chosen, logits) for chosen, logits in zip(reading.candidates, reading.logits, strict=True)
    ]
    rankings: dict[str, Sequence[Sequence[int]]] = {
        "bm25": case.lexical,
        "dense": reading.dense,
        "rrf": reading.candidates,
        "scored": scored,
        SERVED: reading.served(),
    }
    figures: Figures = {}
    for name, ranking in rankings.items():
        rows = measured(case, ranking)
        figures[name] = {measure: float(np.mean([row[measure] for row in rows])) for measure in MEASURES}
    return figures


def measured(case: Case, ranking: Sequence[Sequence[int]]) -> list[dict[str, float]]:
    """Each labelled request's measures; the ranking may go on over those without labels."""
    keys = [tool.id for tool in case.tools]
    return [
        _measure(query, [keys[at] for at in order])
        for query, order in zip(case.queries, ranking, strict=False)
    ]


def _ordered(chosen: Sequence[int], values: Tensor) -> list[int]:
    return [chosen[at] for at in values.argsort(descending=True, stable=True).tolist()]


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


@dataclass(frozen=True, slots=True)
class Abstention:
    """What it costs to doubt. `offered`: of 60 requests that nothing serves, by set; `lost`: share of
    R@5 by set, zero where no request was doubted in vain; `kept`: nDCG@10 by set, zero where doubted."""

    weight: float
    bound: float
    offered: Mapping[str, float]
    lost: Mapping[str, float]
    kept: Mapping[str, float]

    @property
    def mean_lost(self) -> float:
        return _mean(self.lost)

    @property
    def mean_kept(self) -> float:
        return _mean(self.kept)

    def __str__(self) -> str:
        offered = ", ".join(f"{name} {value:.1f}" for name, value in self.offered.items())
        lost = ", ".join(f"{name} {100 * value:.1f}" for name, value in self.lost.items())
        return (
            f"doubt below {self.bound:.2f} with weight {self.weight:g}: R@5 lost {100 * self.mean_lost:.2f} "
            f"points ({lost}); nDCG@10 kept {self.mean_kept:.4f}; offered of 60: {offered}"
        )


def abstention(readings: Sequence[Reading]) -> Abstention | None:
    """At the weight of the cosine that keeps most; None without requests that nothing serves."""
    if not any(reading.case.idle for reading in readings):
        return None
    return max((_abstention(readings, weight) for weight in DOUBT_WEIGHTS), key=lambda each: each.mean_kept)


def _abstention(readings: Sequence[Reading], weight: float) -> Abstention:
    asked = {reading.case.name: reading.assurance(weight) for reading in readings}
    idle = {
        each.case.name: asked[each.case.name][len(each.case.queries) :] for each in readings if each.case.idle
    }
    bound = float(torch.quantile(torch.cat(list(idle.values())), 1 - OFFERED, interpolation="higher")) + 1e-4
    lost, kept = {}, {}
    for reading in readings:
        rows = measured(reading.case, reading.served())
        if rows:
            doubted = (asked[reading.case.name][: len(rows)] < bound).tolist()
            lost[reading.case.name] = float(
                np.mean([row["r5"] if doubt else 0.0 for row, doubt in zip(rows, doubted, strict=True)])
            )
            kept[reading.case.name] = float(
                np.mean([0.0 if doubt else row["ndcg10"] for row, doubt in zip(rows, doubted, strict=True)])
            )
    offered = {name: 60 * float((values >= bound).float().mean()) for name, values in idle.items()}
    return Abstention(weight, bound, offered, lost, kept)


def _mean(values: Mapping[str, float]) -> float:
    counted = [value for name, value in values.items() if name != REPEATED]
    return float(np.mean(counted)) if counted else math.nan


def table(figures: Mapping[str, Figures]) -> str:
    """nDCG@10 and hit@1 of every set and method, and the means over sets but `pooled_real`."""
    methods = list(next(iter(figures.values())))
    lines = [f"{'nDCG@10 / hit@1':18}" + "".join(f"{method:>14}" for method in methods) + "   R@32   C@10"]

    def cells(values: Sequence[dict[str, float]]) -> str:
        return "".join(f"{value['ndcg10']:8.3f}/{value['hit1']:.3f}" for value in values)

    for name, by_method in figures.items():
        numbers = (by_method["rrf"]["r32"], by_method[SERVED]["c10"])
        lines.append(f"{name:18}{cells(list(by_method.values()))}  " + "  ".join(f"{n:.3f}" for n in numbers))
    counted = [by_method for name, by_method in figures.items() if name != REPEATED]
    means = [
        {key: float(np.mean([each[method][key] for each in counted])) for key in ("ndcg10", "hit1")}
        for method in methods
    ]
    lines.append(f"{'mean':18}{cells(means)}")
    return "\n".join(lines)
