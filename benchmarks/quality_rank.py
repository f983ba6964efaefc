"""What discovery answers to every query of a set, recorded whole, so that it can be looked at in many ways.

A record is everything that `Discovery.rank` considered: candidates, the model's log odds and
cosines. Fewer candidates, another threshold or another scale of scores follow from it without
asking the model again.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.errors import Refusal
from engine.request import Failed
from mcp_discovery.discovery.calibration import Calibration, evidence, logit
from mcp_discovery.discovery.call import Ranking
from mcp_discovery.discovery.select import Discovery
from mcp_discovery.transport.identity import Caller

AT_ONCE_CARD, AT_ONCE_CPU = 128, 1
CALLER = Caller(id="quality")
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Asked:
    """A query's ranking by positions in the catalogue sorted by server and name; milliseconds of the call."""

    id: str
    named: list[int]
    lexical: list[int]
    dense: list[int]
    candidates: list[int]
    scored: list[int]
    logits: list[float]  # of `candidates`, as are the cosines
    cosines: list[float | None]
    failure: str
    ms: float

    def scores(self, calibration: Calibration | None) -> dict[int, float]:
        """The published score of each candidate; None: as the model without an adapter has it."""
        logits = dict(zip(self.candidates, self.logits, strict=True))
        if calibration is None:
            return {position: 1.0 / (1.0 + math.exp(-value)) for position, value in logits.items()}
        return {position: calibration.probability(value) for position, value in self.evidence().items()}

    def evidence(self) -> dict[int, float]:
        """What order and score of a trained model follow from, of each candidate."""
        return evidence(*self.readings())

    def by_words(self) -> list[int]:
        """BM25's order of the tools that the query does not name."""
        return [position for position in self.lexical if position not in self.named]

    def readings(self) -> tuple[dict[int, float], dict[int, float]]:
        """Log odds, and cosines as far as there are vectors, by position."""
        cosines = zip(self.candidates, self.cosines, strict=True)
        known = {position: value for position, value in cosines if value is not None}
        return dict(zip(self.candidates, self.logits, strict=True)), known


@dataclass(frozen=True, slots=True)
class Recorded:
    """The queries of one set under one configuration, and requests that none of its tools serves."""

    name: str
    configuration: dict[str, Any]
    queries: list[Asked]
    unanswerable: list[Asked]

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        with gzip.open(part, "wt", encoding="utf-8") as file:
            json.dump(asdict(self), file, separators=(",", ":"))
        part.replace(path)

    @classmethod
    def read(cls, path: Path) -> Recorded:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            values = json.load(file)
        for part in ("queries", "unanswerable"):
            values[part] = [Asked(**entry) for entry in values[part]]
        return cls(**values)


async def ask_all(
    discovery: Discovery, queries: Sequence[tuple[str, str]], at_once: int, progress: Progress
) -> list[Asked]:
    """The record of each (id, text), `at_once` under way at a time."""
    gate = asyncio.Semaphore(at_once)
    done = 0

    async def ask(id: str, text: str) -> Asked:
        nonlocal done
        async with gate:
            started = time.monotonic()
            ranking = await discovery.rank(text, CALLER)
            asked = _asked(id, ranking, (time.monotonic() - started) * 1000.0)
        done += 1
        progress(done, len(queries))
        return asked

    return list(await asyncio.gather(*(ask(id, text) for id, text in queries)))


def _asked(id: str, ranking: Ranking, ms: float) -> Asked:
    candidates = list(ranking.candidates)
    cosines = [ranking.cosines.get(position) for position in candidates]
    failed = isinstance(ranking.outcome, Refusal | Failed)
    return Asked(
        id=id,
        named=list(ranking.named),
        lexical=list(ranking.lexical),
        dense=list(ranking.dense),
        candidates=candidates,
        scored=list(ranking.scored),
        logits=[round(logit(ranking.probabilities[position]), 5) for position in candidates],
        cosines=[None if value is None else round(value, 6) for value in cosines],
        failure=str(ranking.outcome.code) if failed else "",
        ms=round(ms, 2),
    )
