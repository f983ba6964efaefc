"""From records of what was asked to figures: metrics, intervals, calibration, abstention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.quality_rank import Asked, Recorded
from benchmarks.quality_sets import catalogue_size, sampled
from mcp_discovery.discovery.calibration import Calibration
from mcp_discovery.discovery.candidates import fuse
from mcp_discovery.discovery.catalogue import Catalogue
from mcp_discovery.evaluate import METRICS, Baseline, LabelledSet, Query, metrics_of

OURS, BASELINES = "discover_tools", ("BM25", "MiniLM", "RRF")
COMPARED = ("nDCG@10", "hit@1", "C@10")
RRF_CONSTANT = 60.0
RESAMPLES, SEED = 10_000, 13
BINS = 10
ABSTENTION_QUERIES = 60

Values = dict[str, dict[str, list[float]]]
"""Ranker -> metric -> one value a query."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over queries and its 95% interval of a bootstrap."""

    mean: float
    low: float
    high: float
    against: str = ""

    def as_json(self) -> dict[str, Any]:
        shown = {"mean": round(self.mean, 4), "low": round(self.low, 4), "high": round(self.high, 4)}
        return {**shown, "against": self.against} if self.against else shown


@dataclass(frozen=True, slots=True)
class Calibrated:
    """`bins`: (queries' scores in it, mean score, share that is right). `ece`: their weighted distance."""

    ece: float
    bins: tuple[tuple[int, float, float], ...]


@dataclass(frozen=True, slots=True)
class Reported:
    """One set. `offered` of `idle` requests that nothing serves got some tool; `recall_lost` is what that
    costs of R@5; `margins` are ours less the best baseline's, by metric."""

    name: str
    tools: int
    queries: int
    means: Mapping[str, Mapping[str, Interval]] = field(default_factory=dict)
    margins: Mapping[str, Interval] = field(default_factory=dict)
    calibration: Calibrated | None = None
    offered: int = 0
    idle: int = 0
    recall_lost: float = 0.0
    unanswered: int = 0
    ms: tuple[float, float] = (0.0, 0.0)

    @property
    def offered_of_60(self) -> float | None:
        return None if not self.idle else ABSTENTION_QUERIES * self.offered / self.idle

    def as_json(self) -> dict[str, Any]:
        return {
            "set": self.name,
            "tools": self.tools,
            "queries": self.queries,
            "unanswered": self.unanswered,
            "metrics": {
                ranker: {metric: value.as_json() for metric, value in values.items()}
                for ranker, values in self.means.items()
            },
            "margins": {metric: value.as_json() for metric, value in self.margins.items()},
            "calibration": None
            if self.calibration is None
            else {"ece": round(self.calibration.ece, 4), "bins": self.calibration.bins},
            "abstention": {
                "offered": self.offered,
                "of": self.idle,
                "recall_lost": round(self.recall_lost, 4),
            },
            "call_ms": {"p50": self.ms[0], "p99": self.ms[1]},
        }


def report(
    recorded: Recorded, folder: Path | None, minilm: Path | None, calibration: Calibration | None
) -> Reported:
    """The figures of one record; without its labelled set only those on requests that nothing serves."""
    tools = catalogue_size(recorded.name, folder)
    offered = sum(offers(asked, calibration, tools) for asked in recorded.unanswerable)
    idle = len(recorded.unanswerable)
    if folder is None or not recorded.queries:
        return Reported(recorded.name, tools, 0, offered=offered, idle=idle)
    labelled = sampled(folder, recorded.configuration["queries"])
    catalogue = Catalogue.of(labelled.tools)
    orders = orders_of(labelled, catalogue, recorded, minilm)
    values: Values = {ranker: _values(labelled.queries, found) for ranker, found in orders.items()}
    bootstrap = Bootstrap(len(labelled.queries))
    times = [asked.ms for asked in recorded.queries]
    return Reported(
        name=recorded.name,
        tools=len(labelled.tools),
        queries=len(labelled.queries),
        means={
            ranker: {metric: bootstrap.interval(by_metric[metric]) for metric in METRICS}
            for ranker, by_metric in values.items()
        },
        margins=_margins(values, bootstrap),
        calibration=calibrated(*scored_pairs(labelled, catalogue, recorded.queries, calibration)),
        offered=offered,
        idle=idle,
        recall_lost=recall_lost(labelled, catalogue, recorded.queries, calibration),
        unanswered=sum(bool(asked.failure) for asked in recorded.queries),
        ms=(round(float(np.percentile(times, 50)), 1), round(float(np.percentile(times, 99)), 1)),
    )


def orders_of(
    labelled: LabelledSet, catalogue: Catalogue, recorded: Recorded, minilm: Path | None
) -> dict[str, list[list[str]]]:
    """Ranker -> an order of tool ids for each query."""
    ids = [tool.id for tool in catalogue.tools]
    baseline = Baseline(labelled.tools)
    orders = {"BM25": [baseline.order(query.text) for query in labelled.queries]}
    encoded = _minilm_orders(labelled, minilm)
    if encoded is not None:
        orders["MiniLM"] = encoded
        orders["RRF"] = [
            _fused_ids([baseline.matching(query.text), order])
            for query, order in zip(labelled.queries, encoded, strict=True)
        ]
    asked = recorded.queries
    orders["vectors"] = [[ids[at] for at in each.dense] for each in asked]
    orders["retrieval"] = [[ids[at] for at in fuse([each.lexical, each.dense])] for each in asked]
    orders["score"] = [[ids[at] for at in _by_score(each)] for each in asked]
    orders[OURS] = [[ids[at] for at in final_order(each)] for each in asked]
    return orders if recorded.configuration["adapter_sha256"] else _untrained(orders)


def _untrained(orders: dict[str, list[list[str]]]) -> dict[str, list[list[str]]]:
    """Without an adapter there are no vectors."""
    return {name: order for name, order in orders.items() if name not in ("vectors", "retrieval")}


def final_order(asked: Asked) -> list[int]:
    """As `discover_tools` ranks; what was not scored follows in the order of retrieval."""
    if asked.failure:
        return []
    return list(dict.fromkeys([*asked.named, *asked.scored, *fuse([asked.lexical, asked.dense])]))


def _by_score(asked: Asked) -> list[int]:
    logits = dict(zip(asked.candidates, asked.logits, strict=True))
    by_score = sorted(logits, key=lambda position: -logits[position])
    return list(dict.fromkeys([*by_score, *fuse([asked.lexical, asked.dense])]))


def _minilm_orders(labelled: LabelledSet, minilm: Path | None) -> list[list[str]] | None:
    path = None if minilm is None else minilm / f"{labelled.name}.npz"
    if path is None or not path.is_file():
        return None
    with np.load(path) as file:
        rows = dict(zip(file["ids"].tolist(), file["order"], strict=True))
    ids = [tool.id for tool in labelled.tools]
    return [[ids[at] for at in rows[query.id]] for query in labelled.queries]


def _fused_ids(orders: Sequence[Sequence[str]]) -> list[str]:
    votes: dict[str, float] = {}
    for order in orders:
        for rank, id in enumerate(order, start=1):
            votes[id] = votes.get(id, 0.0) + 1.0 / (RRF_CONSTANT + rank)
    return sorted(votes, key=lambda id: -votes[id])


def _values(queries: Sequence[Query], orders: Sequence[Sequence[str]]) -> dict[str, list[float]]:
    found = [metrics_of(query.labels, order) for query, order in zip(queries, orders, strict=True)]
    return {metric: [each[metric] for each in found] for metric in METRICS}


class Bootstrap:
    """Percentile bootstrap over the queries of a set; the same resamples for all values."""

    def __init__(self, queries: int) -> None:
        drawn = np.random.default_rng(SEED).integers(0, queries, (RESAMPLES, queries))
        offsets = np.arange(RESAMPLES)[:, None] * queries
        counts = np.bincount((drawn + offsets).ravel(), minlength=RESAMPLES * queries)
        self._weights = counts.reshape(RESAMPLES, queries).astype(np.float32) / queries

    def interval(self, values: Sequence[float], against: str = "") -> Interval:
        """Of the mean of `values`, one a query."""
        low, high = np.percentile(self._weights @ np.asarray(values, dtype=np.float32), (2.5, 97.5))
        return Interval(float(np.mean(values)), float(low), float(high), against)


def _margins(values: Values, bootstrap: Bootstrap) -> dict[str, Interval]:
    """Ours less the best baseline's, paired by query; none where a baseline is missing."""
    if any(name not in values for name in BASELINES):
        return {}
    margins = {}
    for metric in COMPARED:
        best = max(BASELINES, key=lambda name: float(np.mean(values[name][metric])))
        pairs = zip(values[OURS][metric], values[best][metric], strict=True)
        margins[metric] = bootstrap.interval([ours - theirs for ours, theirs in pairs], best)
    return margins


def scored_pairs(
    labelled: LabelledSet, catalogue: Catalogue, asked: Sequence[Asked], calibration: Calibration | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Every published score of the set's queries, and 1 where the tool is one that the query wants."""
    scores: list[float] = []
    right: list[float] = []
    for query, each in zip(labelled.queries, asked, strict=True):
        wanted = {id for label in query.labels for id in label}
        for position, score in each.scores(calibration).items():
            scores.append(score)
            right.append(float(catalogue.tools[position].id in wanted))
    return np.array(scores), np.array(right)


def calibrated(scores: NDArray[np.float64], right: NDArray[np.float64]) -> Calibrated:
    """Expected calibration error: the mean distance of score and share right, weighted by bin."""
    number = np.minimum((scores * BINS).astype(int), BINS - 1)
    bins = []
    for at in range(BINS):
        inside = number == at
        if inside.any():
            means = (round(float(each[inside].mean()), 4) for each in (scores, right))
            bins.append((int(inside.sum()), *means))
        else:
            bins.append((0, 0.0, 0.0))
    ece = sum(count * abs(mean - share) for count, mean, share in bins) / max(1, len(scores))
    return Calibrated(float(ece), tuple(bins))


def recall_lost(
    labelled: LabelledSet, catalogue: Catalogue, asked: Sequence[Asked], calibration: Calibration | None
) -> float:
    """R@5 of all that was scored less R@5 of what is offered."""
    lost = 0.0
    for query, each in zip(labelled.queries, asked, strict=True):
        if not offers(each, calibration, len(catalogue.tools)):
            lost += metrics_of(query.labels, [catalogue.tools[at].id for at in each.scored])["R@5"]
    return lost / len(labelled.queries)


def offers(asked: Asked, calibration: Calibration | None, tools: int) -> bool:
    """Whether a caller is offered any of so many tools."""
    if calibration is None or asked.named:
        return True
    return not calibration.doubts(*asked.readings(), asked.by_words(), tools)


def table(reported: Sequence[Reported]) -> str:
    """nDCG@10 and hit@1 of every set and ranker, and the mean over sets but `pooled_real`."""
    labelled = [each for each in reported if each.queries]
    rankers = list(dict.fromkeys(ranker for each in labelled for ranker in each.means))
    lines = [f"{'nDCG@10 / hit@1':17}" + "".join(f"{ranker:>15}" for ranker in rankers) + "    ECE offered"]
    for each in labelled:
        cells = [_cell(each, ranker) for ranker in rankers]
        ece = 0.0 if each.calibration is None else each.calibration.ece
        lines.append(f"{each.name:17}{''.join(cells)}  {ece:.3f} {each.offered}/{each.idle}")
    counted = [each for each in labelled if each.name != "pooled_real"]
    means = (
        f"{_mean(counted, each, 'nDCG@10'):9.3f}/{_mean(counted, each, 'hit@1'):.3f}" for each in rankers
    )
    lines.append(f"{'mean':17}{''.join(means)}")
    lines += (f"{each.name}: {each.offered}/{each.idle} offered" for each in reported if not each.queries)
    return "\n".join(lines)


def _mean(sets: Sequence[Reported], ranker: str, metric: str) -> float:
    return float(np.mean([each.means[ranker][metric].mean for each in sets if ranker in each.means]))


def _cell(each: Reported, ranker: str) -> str:
    if ranker not in each.means:
        return f"{'-':>15}"
    means = each.means[ranker]
    return f"{means['nDCG@10'].mean:9.3f}/{means['hit@1'].mean:.3f}"
