"""The requests of a load: short ones from a file of queries, long ones made of many of them."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.ladder.load import Prepared
from benchmarks.ladder.wire import Endpoint

QUERIES = Path(__file__).resolve().parent.parent / "data" / "queries.jsonl"
LONG_CHARACTERS, LONG_LIMIT = 4000, 20
LONG_REQUESTS = 256  # different ones a driver


def read(path: Path) -> list[str]:
    """Queries of a JSON Lines file; raises ValueError where there is none."""
    lines = path.read_text(encoding="utf-8").splitlines()
    queries = [str(json.loads(line)["query"]) for line in lines if line.strip()]
    if not queries:
        raise ValueError(f"{path} holds no query")
    return queries


class Requests:
    """One driver's share of the queries, over and over: no two drivers ever ask the same one, and within a
    driver one is asked again only when all others were."""

    def __init__(
        self, endpoint: Endpoint, queries: Sequence[str], driver: int, drivers: int, timeout_ms: int | None
    ) -> None:
        more = {} if timeout_ms is None else {"timeout_ms": timeout_ms}
        mine = range(driver, len(queries), drivers)
        if not mine:
            raise ValueError(f"{len(queries)} queries are too few for {drivers} drivers")
        self._random = random.Random(driver)
        self._short = itertools.cycle(
            [Prepared("short", at, endpoint.call({"query": queries[at], **more})) for at in mine]
        )
        texts = [long_query(queries, self._random) for _ in range(LONG_REQUESTS)]
        self._long = itertools.cycle(
            [Prepared("long", -1, endpoint.call({"query": t, "limit": LONG_LIMIT, **more})) for t in texts]
        )

    def short(self) -> Iterator[Prepared]:
        return self._short

    def mixed(self, long_share: float) -> Iterator[Prepared]:
        """Each is a long one with the probability `long_share`."""
        while True:
            yield next(self._long if self._random.random() < long_share else self._short)


def long_query(queries: Sequence[str], source: random.Random) -> str:
    """A query of as many characters as one may have."""
    parts: list[str] = []
    while sum(map(len, parts)) + len(parts) <= LONG_CHARACTERS:
        parts.append(source.choice(queries))
    return " ".join(parts)[:LONG_CHARACTERS]
