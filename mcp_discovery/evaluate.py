"""Retrieval quality on a labelled set, beside BM25 on the same queries.

A set is a folder with `catalogue.jsonl` (one tool a line: server, name, description, inputSchema) and
`queries.jsonl` (one query a line: id, query, relevant ["server/name", ...], optional alt). Our
rankings come through `Discovery.rank`, the path of `discover_tools`, engine admission included.

Ranks are 0-based, that of a tool that is not returned is infinite. For a query with n labels, where a
label's rank is the least among it and its alternatives:

    hit@1   1 if some label has rank 0
    R@k     labels with rank < k, over n
    nDCG@k  sum over labels with rank r < k of 1 / log2(r + 2), over the same sum for ranks 0 .. min(n, k) - 1
    C@k     1 if every label has rank < k

The baseline is BM25 (Lucene's, k1 1.5, b 0.75) over server, name, description and parameter names,
split at case and separators, tokens being runs of a-z and 0-9 or single other letters, without stop
words; queries are cut at 2,000 characters; equal scores keep the order of the catalogue's file.
"""

from __future__ import annotations

import json
import math
import random
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import ConfigError, Refusal
from engine.request import Failed
from mcp_discovery.discovery.call import Ranking
from mcp_discovery.discovery.candidates import fuse
from mcp_discovery.discovery.catalogue import Catalogue, Tool
from mcp_discovery.discovery.lexical import STOP_WORDS, LexicalIndex, document, split_words
from mcp_discovery.discovery.select import Discovery
from mcp_discovery.discovery.sources.files import load
from mcp_discovery.transport.identity import Caller

MAX_QUERIES = 1000
SAMPLE_SEED = 13
BASELINE_QUERY = 2000  # characters
METRICS = ("hit@1", "R@1", "R@5", "R@10", "R@32", "nDCG@5", "nDCG@10", "C@5", "C@10")
RANKERS = ("discover_tools", "score alone", "vectors alone", "bm25 alone", "BM25 baseline")
CALLER = Caller(id="eval")

_BASELINE_TOKENS = re.compile(r"[a-z0-9]+|[^\W\d_a-z]")


@dataclass(frozen=True, slots=True)
class Query:
    id: str
    text: str
    labels: tuple[tuple[str, ...], ...]  # each with its alternatives


@dataclass(frozen=True, slots=True)
class LabelledSet:
    """`tools` in file order, which the baseline's ties follow."""

    name: str
    tools: tuple[Tool, ...]
    queries: tuple[Query, ...]
    left_out: tuple[str, ...]  # sentences on catalogue entries that are not served

    @classmethod
    def load(cls, folder: Path, most: int | None = None) -> LabelledSet:
        """Raises ConfigError where the folder is not a labelled set. `most` queries, at most 1,000."""
        for file in ("catalogue.jsonl", "queries.jsonl"):
            if not (folder / file).is_file():
                raise ConfigError(f"{folder} is no labelled set: it has no {file}.")
        loaded = load([folder / "catalogue.jsonl"])
        try:
            lines = (folder / "queries.jsonl").read_text(encoding="utf-8").split("\n")
            queries = [_query(json.loads(line)) for line in lines if line.strip()]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{folder / 'queries.jsonl'} is no list of labelled queries: {error!r}."
            ) from None
        if not loaded.tools or not queries:
            raise ConfigError(f"{folder} holds no {'queries' if loaded.tools else 'tools'} that can be used.")
        wanted = min(MAX_QUERIES, most or MAX_QUERIES)
        if len(queries) > wanted:
            queries = random.Random(SAMPLE_SEED).sample(queries, wanted)
        left_out = tuple(str(problem) for problem in loaded.problems if not problem.kept)
        return cls(folder.resolve().name, loaded.tools, tuple(queries), left_out)


@dataclass(frozen=True, slots=True)
class Report:
    """Mean metrics of each ranker over the same queries. `latency_ms` is (p50, p99) of a call."""

    name: str
    tools: int
    queries: int
    model: str
    candidates: int
    means: Mapping[str, Mapping[str, float]]
    unanswered: Mapping[str, int]  # refusals and failures by code; such a query has an empty ranking
    left_out: tuple[str, ...]
    latency_ms: tuple[float, float]

    def as_json(self) -> dict[str, Any]:
        return {
            "set": self.name,
            "tools": self.tools,
            "queries": self.queries,
            "model": self.model,
            "candidates": self.candidates,
            "metrics": {
                ranker: {metric: round(value, 3) for metric, value in means.items()}
                for ranker, means in self.means.items()
            },
            "unanswered": dict(self.unanswered),
            "left_out": list(self.left_out),
            "latency_ms": {"p50": round(self.latency_ms[0], 1), "p99": round(self.latency_ms[1], 1)},
        }

    def as_text(self) -> str:
        """A table for people."""
        lines = [
            f"{self.name}: {self.tools:,} tools, {self.queries:,} queries",
            f"{self.candidates} candidates scored by {self.model}; a call took "
            f"{self.latency_ms[0]:.0f} ms (p50), {self.latency_ms[1]:.0f} ms (p99)",
            f"{'':15}" + "".join(f"{metric:>9}" for metric in METRICS),
        ]
        lines += (
            f"{ranker:15}" + "".join(f"{means[metric]:9.3f}" for metric in METRICS)
            for ranker, means in self.means.items()
        )
        lines += (f"{count} queries were not answered: {code}" for code, count in self.unanswered.items())
        lines += (f"not served: {sentence}" for sentence in self.left_out)
        return "\n".join(lines)


async def evaluate(
    folder: Path,
    discovery_of: Callable[[Catalogue], Discovery],
    limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    warming: Callable[[int, int], None] | None = None,
) -> Report:
    """Ranks the queries of the set in `folder`, one after the other.

    `discovery_of` makes the system under test for the set's catalogue; `limit` bounds the queries, a
    seeded sample where there are more; `progress` gets (done, total) of them, and `warming` of the
    tools whose vectors are computed before. Raises ConfigError where the folder holds no labelled set.
    """
    labelled = LabelledSet.load(folder, limit)
    catalogue = Catalogue.of(labelled.tools)
    discovery = discovery_of(catalogue)
    if discovery.is_trained:
        await discovery.warm(warming)
    baseline = Baseline(labelled.tools)
    sums = {ranker: dict.fromkeys(METRICS, 0.0) for ranker in RANKERS}
    unanswered: dict[str, int] = {}
    latencies: list[float] = []
    for done, query in enumerate(labelled.queries, start=1):
        started = time.monotonic()
        ranking = await discovery.rank(query.text, CALLER)
        latencies.append((time.monotonic() - started) * 1000.0)
        if isinstance(ranking.outcome, Refusal | Failed):
            code = str(ranking.outcome.code)
            unanswered[code] = unanswered.get(code, 0) + 1
        orders = {ranker: ids_of(order, catalogue) for ranker, order in orders_of(ranking).items()}
        orders["BM25 baseline"] = baseline.order(query.text)
        for ranker, order in orders.items():
            for metric, value in metrics_of(query.labels, order).items():
                sums[ranker][metric] += value
        if progress is not None:
            progress(done, len(labelled.queries))
    count = len(labelled.queries)
    return Report(
        name=labelled.name,
        tools=len(labelled.tools),
        queries=count,
        model=discovery.model,
        candidates=discovery.settings.candidates,
        means={ranker: {key: value / count for key, value in sums[ranker].items()} for ranker in RANKERS},
        unanswered=unanswered,
        left_out=labelled.left_out,
        latency_ms=(float(np.percentile(latencies, 50)), float(np.percentile(latencies, 99))),
    )


def orders_of(ranking: Ranking) -> dict[str, list[int]]:
    """Whole orders of one query: as `discover_tools` ranks, by score alone, by BM25 alone.

    What was not scored follows in the order of retrieval. An unanswered query has empty orders, except
    BM25's.
    """
    lexical = list(ranking.lexical)
    if isinstance(ranking.outcome, Refusal | Failed):
        return {"discover_tools": [], "score alone": [], "vectors alone": [], "bm25 alone": lexical}
    retrieved = fuse([ranking.lexical, ranking.dense])
    by_score = sorted(ranking.probabilities, key=lambda position: -ranking.probabilities[position])
    return {
        "discover_tools": list(dict.fromkeys([*ranking.named, *ranking.scored, *retrieved])),
        "score alone": list(dict.fromkeys([*by_score, *retrieved])),
        "vectors alone": list(ranking.dense),
        "bm25 alone": lexical,
    }


def ids_of(order: Iterable[int], catalogue: Catalogue) -> list[str]:
    return [catalogue.tools[position].id for position in order]


class Baseline:
    """BM25 as the module's docstring defines it, over tools in file order."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._ids = [tool.id for tool in tools]
        self._index = LexicalIndex([baseline_terms(document(tool)) for tool in tools])

    def order(self, query: str) -> list[str]:
        """Every tool's id, best first."""
        scores = self._index.scores(baseline_terms(query[:BASELINE_QUERY]))
        return [self._ids[index] for index in np.argsort(-scores, kind="stable")]

    def matching(self, query: str) -> list[str]:
        """The ids of tools that share a term with the query, best first."""
        scores = self._index.scores(baseline_terms(query[:BASELINE_QUERY]))
        order = np.argsort(-scores, kind="stable")
        return [self._ids[index] for index in order[: int((scores > 0).sum())]]


def baseline_terms(text: str) -> list[str]:
    return [term for term in _BASELINE_TOKENS.findall(split_words(text).lower()) if term not in STOP_WORDS]


def metrics_of(labels: Sequence[Sequence[str]], order: Sequence[str]) -> dict[str, float]:
    """The metrics of one ranking."""
    rank_of = {id: rank for rank, id in reversed(list(enumerate(order)))}
    ranks = [min(rank_of.get(id, math.inf) for id in label) for label in labels]
    values = {"hit@1": float(0 in ranks)}
    for k in (1, 5, 10, 32):
        values[f"R@{k}"] = sum(rank < k for rank in ranks) / len(ranks)
    for k in (5, 10):
        ideal = sum(1 / math.log2(rank + 2) for rank in range(min(len(ranks), k)))
        values[f"nDCG@{k}"] = sum(1 / math.log2(rank + 2) for rank in ranks if rank < k) / ideal
        values[f"C@{k}"] = float(all(rank < k for rank in ranks))
    return values


def _query(entry: Any) -> Query:
    if not isinstance(entry, dict):
        raise TypeError(f"a query must be an object, not {entry!r:.40}")
    alternatives = entry.get("alt") or {}
    labels = tuple((label, *alternatives.get(label, ())) for label in entry["relevant"])
    if not isinstance(entry["query"], str) or not labels:
        raise ValueError(f"query {entry.get('id')!r} has no text or no labels")
    return Query(str(entry["id"]), entry["query"], labels)
