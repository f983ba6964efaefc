"""Reference answers: what each query gets alone, in float32 by the CPU's code, through the path of a call.

    python -m benchmarks.references --queries benchmarks/data/queries.jsonl --out FILE [--processes N]

Queries are asked one at a time, so that nothing is beside them. The file has a line a query and is added
to as answers come: a run that broke off goes on where it was, and queries in the file are not asked again.
`benchmarks.contamination` says how an answer is held against its reference.

A CPU takes seconds a query. `--device cuda` runs the same code on a card, in float32 too, and
`--against FILE`, a file of some of the queries that a CPU made, says how far both are apart.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import multiprocessing
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.contamination import Reference
from engine import Embed, Embedded, Engine, EngineConfig
from engine.attention.torch import TorchAttention
from engine.batch import KVCache
from engine.core import Core, CoreLimits
from engine.errors import Refusal
from engine.local import LocalClient
from engine.model import Model
from engine.model_files import read_shape
from engine.pages import PagePool
from engine.request import Failed
from engine.runner import TorchRunner
from engine.schedule import StepLimits
from engine.tokenizer import Tokenizer
from engine.weights import load_weights, read_adapter
from mcp_discovery.assemble import DiscoveryModel
from mcp_discovery.discovery.calibration import BY_WORDS, Calibration, logit
from mcp_discovery.discovery.call import DiscoverRequest, Ranking
from mcp_discovery.discovery.candidates import RANK_CONSTANT
from mcp_discovery.discovery.catalogue import Catalogue
from mcp_discovery.discovery.prompts import Prompts
from mcp_discovery.discovery.scope import Scope
from mcp_discovery.discovery.select import ORDER_LENGTH, Discovery, DiscoverySettings, Trained
from mcp_discovery.discovery.sources import files
from mcp_discovery.discovery.vectors import VectorCache
from mcp_discovery.transport.identity import Caller

HERE = Path(__file__).resolve().parent
DEMO = HERE.parent / "mcp_discovery" / "data" / "demo"
CANDIDATES, LIMIT = 32, 10
SPARE = 2  # times as many are scored, so that those which noise makes candidates have a score too
COSINE_NOISE = 0.015  # most that other arithmetic makes of a difference of two cosines; bfloat16: 0.0138
ALLOWANCE_MIB, PAGE_TOKENS = 3072, 16
PAGES = 4096  # of a plain engine: the demo catalogue's prefixes and a query's rows
CALLER = Caller(id="reference")


@dataclass(frozen=True, slots=True)
class Size:
    """What a call is sized by: the candidates that are scored for it, and the most tools it returns."""

    candidates: int = CANDIDATES
    limit: int = LIMIT


@dataclass(frozen=True, slots=True)
class Query:
    id: str
    text: str

    @property
    def key(self) -> str:
        """By its words: a reference is that of a text, in whatever file it stands."""
        return key_of(self.text)


def key_of(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def read_queries(path: Path) -> list[Query]:
    """Of a JSON Lines file with `id` and `query`."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found = (json.loads(line) for line in lines if line.strip())
    return [Query(str(each["id"]), str(each["query"])) for each in found]


# The file.


@dataclass(frozen=True, slots=True)
class References:
    """A file of references. `header` says what they were computed with."""

    header: Mapping[str, Any]
    by_key: Mapping[str, Reference]

    @classmethod
    def read(cls, path: Path) -> References:
        """Raises ValueError where the file is no file of references."""
        lines = path.read_text(encoding="utf-8").splitlines()
        header = json.loads(lines[0]) if lines else None
        if not isinstance(header, dict) or "tools" not in header:
            raise ValueError(f"{path} is no file of reference answers; benchmarks.references writes one")
        found = dict(_entry(line, header) for line in lines[1:])
        return cls(header, found)

    def of(self, text: str) -> Reference | None:
        """That of the query `text`."""
        return self.by_key.get(key_of(text))


def _entry(line: str, header: Mapping[str, Any]) -> tuple[str, Reference]:
    _, key, places, scores, uncertain, named, assurance = json.loads(line)
    tools = tuple(header["tools"][place] for place in places)
    maybe = frozenset(header["tools"][place] for place in uncertain)
    return key, Reference(tools, tuple(scores), header["limit"], maybe, assurance, named)


def _line(query: Query, reference: Reference, places: Mapping[str, int]) -> str:
    """[id, key, tools, scores, uncertain tools, named, assurance], tools by their place in the header."""
    tools = [places[tool] for tool in reference.tools]
    uncertain = sorted(places[tool] for tool in reference.uncertain)
    scores = [round(score, 6) for score in reference.scores]
    assurance = None if reference.assurance is None else round(reference.assurance, 4)
    fields = [query.id, query.key, tools, scores, uncertain, reference.named, assurance]
    return json.dumps(fields, separators=(",", ":")) + "\n"


# What a ranking says about the answers that are right.


def reference_of(
    ranking: Ranking,
    tools: Sequence[str],
    dense: Mapping[int, float],
    calibration: Calibration,
    *,
    wanted: int = CANDIDATES,
    limit: int = LIMIT,
    noise: float = COSINE_NOISE,
) -> Reference | None:
    """`ranking` scored more than the `wanted` candidates of a call; `dense` are the cosines of every tool
    that could be one. None where a tool that may be a candidate was not scored."""
    lexical = [position for position in ranking.lexical if position in dense]
    certain, possible = candidates_within(lexical, dense, wanted, noise)
    if ranking.candidates and not possible <= set(ranking.candidates):
        return None
    found = [(tools[position], 1.0) for position in ranking.named]
    uncertain: set[str] = set()
    for position in ranking.scored:
        if len(found) - len(uncertain) >= limit:
            break
        if position in possible:
            found.append((tools[position], ranking.scores[position]))
            if position not in certain:
                uncertain.add(tools[position])
    told = frozenset([position for position in ranking.lexical if position not in ranking.named][:BY_WORDS])
    readings = [
        calibration.assurance(
            logit(ranking.probabilities[position]), ranking.cosines[position], position in told
        )
        for position in certain
        if position in ranking.probabilities
    ]
    return Reference(
        tools=tuple(tool for tool, _ in found),
        scores=tuple(score for _, score in found),
        limit=limit,
        uncertain=frozenset(uncertain),
        assurance=max(readings) - calibration.bound(len(tools)) if readings else None,
        named=len(ranking.named),
    )


def candidates_within(
    lexical: Sequence[int], cosines: Mapping[int, float], wanted: int, noise: float
) -> tuple[set[int], set[int]]:
    """The tools that are candidates whatever noise does, and those that may be.

    `noise` bounds the change of a difference of two cosines, so it bounds a tool's rank by them, and with the
    rank its weight in the fusion of both orders (`candidates.fuse`). Words have no noise.
    """
    positions = list(cosines)
    values = np.array([cosines[position] for position in positions])
    by_words = {position: 1.0 / (RANK_CONSTANT + rank) for rank, position in enumerate(lexical, start=1)}
    words = np.array([by_words.get(position, 0.0) for position in positions])
    ascending = np.sort(values)
    best = len(values) - np.searchsorted(ascending, values + noise, side="right")
    worst = len(values) - np.searchsorted(ascending, values - noise, side="left") - 1
    low, high = words + _weights(worst), words + _weights(best)
    may_be_above = len(high) - np.searchsorted(np.sort(high), low, side="left") - 1  # less the tool itself
    surely_above = len(low) - np.searchsorted(np.sort(low), high, side="right")
    certain = {positions[place] for place in np.flatnonzero(may_be_above < wanted)}
    possible = {positions[place] for place in np.flatnonzero(surely_above < wanted)}
    return certain, possible


def _weights(ranks: NDArray[np.int64]) -> NDArray[np.float64]:
    """In the order by vectors, ranks from 0; only its first tools count."""
    return np.where(ranks < ORDER_LENGTH, 1.0 / (RANK_CONSTANT + ranks + 1), 0.0)


# Asking.


class Asker:
    """Discovery over a catalogue by an engine that nobody else asks. Vectors are kept in `vectors`, apart
    from those of servers, which may come from a card."""

    def __init__(self, engine: Engine, model: DiscoveryModel, catalogue: Catalogue, vectors: Path) -> None:
        if model.adapter is None:
            raise SystemExit("references need a model with an adapter: without one, order is not by score")
        self._client = LocalClient(engine)
        read = Tokenizer.from_folder if model.path.is_dir() else Tokenizer.from_gguf
        self._prompts = Prompts(read(model.path), PAGE_TOKENS)
        self._calibration = model.adapter.calibration
        self._discovery = Discovery(
            self._client,
            self._prompts,
            catalogue,
            DiscoverySettings(candidates=SPARE * CANDIDATES),
            model=model.name,
            trained=Trained(self._calibration, VectorCache(vectors)),
        )
        self._ids = [tool.id for tool in catalogue.tools]

    async def warm(self) -> None:
        await self._discovery.warm()

    async def ask(self, text: str) -> Reference | None:
        """As `ask_sizes`, of the usual size."""
        (found,) = await self.ask_sizes(text, (Size(),))
        return found

    async def ask_sizes(self, text: str, sizes: Sequence[Size]) -> list[Reference | None]:
        """A reference for each size, which has at most `CANDIDATES`. Raises RuntimeError where the engine
        refuses or fails."""
        ranking = await self._discovery.rank(text, CALLER)
        if isinstance(ranking.outcome, Refusal | Failed):
            raise RuntimeError(f"a query was not answered: {ranking.outcome.message}")
        vector = await self._client.run(Embed(self._prompts.query(self._prompts.cut(text))))
        if not isinstance(vector, Embedded):
            raise RuntimeError(f"a query was not embedded: {vector}")
        dense = self._discovery.snapshot.vectors.cosines(vector.vector, self._reach(text, ranking))
        return [
            reference_of(
                ranking,
                self._ids,
                dense,
                self._calibration,
                wanted=size.candidates,
                limit=size.limit,
            )
            for size in sizes
        ]

    def _reach(self, text: str, ranking: Ranking) -> list[int]:
        """Tools that may be candidates: each once, without those that the query names."""
        snapshot = self._discovery.snapshot
        scope = Scope.of(snapshot, DiscoverRequest(text), CALLER)
        rest = snapshot.twins.firsts(scope.mask).copy()
        for position in ranking.named:
            rest[snapshot.twins.of(position)] = False
        return [int(position) for position in rest.nonzero()[0]]


def plain_engine(config: EngineConfig, model: DiscoveryModel, device: str) -> Engine:
    """The CPU's code, plain torch in float32, run by another device: quicker and nothing else. No kernel
    of ours is in it, and products are not rounded to TF32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_num_threads(config.threads or 1)  # several processes load and stage side by side
    shape, place = read_shape(model.path), torch.device(device)
    adapter = None if model.adapter_path is None else read_adapter(model.adapter_path, model.sha256)
    _, weights = load_weights(model.path, torch.float32, place, adapter=adapter)
    cells = (shape.layers, PAGES + 1, 2, config.page_tokens, shape.kv_heads, shape.head_dim)
    kv = KVCache(torch.zeros(cells, dtype=torch.float32, device=place))
    limits = CoreLimits(
        step=StepLimits(tokens=2048, rows=SPARE * CANDIDATES),
        depth=1,
        max_queue=config.max_queue,
        max_queued_tokens=config.max_queued_tokens,
        vocabulary=shape.vocabulary,
        context=shape.context,
    )
    runner = TorchRunner(Model(shape, weights), TorchAttention(kv, shape), kv)
    engine = Engine(Core(PagePool(PAGES, config.page_tokens), limits), runner)
    engine.start()
    engine.mark_ready()
    return engine


@cache
def _asker(model: str | None, threads: int, vectors: Path, device: str) -> Asker:
    """One a process."""
    found = DiscoveryModel.of(model)
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        kv_dtype="float32",
        page_tokens=PAGE_TOKENS,
        allowance_mib=ALLOWANCE_MIB,
        threads=threads,
    )
    if device == "cpu":
        engine = Engine.create(config, found.path, found.adapter_path)
    else:
        engine = plain_engine(config, found, device)
    return Asker(engine, found, Catalogue.of(files.load([DEMO]).tools), vectors)


def ask_some(
    model: str | None, threads: int, vectors: Path, device: str, queries: Sequence[Query]
) -> list[tuple[Query, Reference | None]]:
    """In a process of its own, which keeps its engine."""
    return asyncio.run(_ask_all(_asker(model, threads, vectors, device), queries))


def ask_in_sizes(
    model: str | None, threads: int, vectors: Path, texts: Sequence[str], sizes: Sequence[Size]
) -> list[list[Reference | None]]:
    """For each text its references, on the CPU; in a process of its own, as `ask_some`."""

    async def ask_all() -> list[list[Reference | None]]:
        asker = _asker(model, threads, vectors, "cpu")
        await asker.warm()
        return [await asker.ask_sizes(text, sizes) for text in texts]

    return asyncio.run(ask_all())


async def _ask_all(asker: Asker, queries: Sequence[Query]) -> list[tuple[Query, Reference | None]]:
    await asker.warm()
    return [(query, await asker.ask(query.text)) for query in queries]


# The run.


def _header(model: DiscoveryModel, catalogue: Catalogue) -> dict[str, Any]:
    return {
        "model_sha256": model.sha256,
        "adapter_sha256": model.adapter.sha256 if model.adapter else "",
        "candidates": CANDIDATES,
        "limit": LIMIT,
        "cosine_noise": COSINE_NOISE,
        "tools": [tool.id for tool in catalogue.tools],
    }


def _opened(path: Path, header: Mapping[str, Any]) -> tuple[TextIO, set[str]]:
    """The file to add to, and the keys that are in it. Raises SystemExit where it was computed otherwise."""
    known: set[str] = set()
    if path.exists() and path.stat().st_size:
        content = path.read_text(encoding="utf-8")
        if not content.endswith("\n"):  # a line that broke off
            content = content[: content.rfind("\n") + 1]
            path.write_text(content, encoding="utf-8")
        references = References.read(path)
        if dict(references.header) != dict(header):
            raise SystemExit(f"{path} was computed with another model, catalogue or setting; choose another")
        known = set(references.by_key)
    file = path.open("a", encoding="utf-8")
    if not path.stat().st_size:
        file.write(json.dumps(header) + "\n")
    return file, known


@dataclass(frozen=True, slots=True)
class Difference:
    """Of two files, over the queries that are in both."""

    queries: int
    largest_log_odds: float  # of the scores of one tool
    other_orders: int  # queries whose certain tools stand in another order

    def __str__(self) -> str:
        apart = f"scores differ by {self.largest_log_odds:.5f} in log odds at most"
        return f"{self.queries} queries in both files: {apart}, {self.other_orders} in another order"


def difference(one: References, other: References) -> Difference:
    """Tools that only one of them lists are left out: noise decides at the end of a list."""
    largest, orders = 0.0, 0
    common = one.by_key.keys() & other.by_key.keys()
    for key in common:
        left, right = one.by_key[key], other.by_key[key]
        scores = dict(zip(right.tools, right.scores, strict=True))
        for tool, score in zip(left.tools, left.scores, strict=True):
            largest = max(largest, abs(logit(score) - logit(scores[tool])) if tool in scores else 0.0)
        sure = set(left.tools) & set(right.tools) - left.uncertain - right.uncertain
        orders += [t for t in left.tools if t in sure] != [t for t in right.tools if t in sure]
    return Difference(len(common), largest, orders)


def _batches(queries: Sequence[Query], size: int = 8) -> Iterator[Sequence[Query]]:
    for at in range(0, len(queries), size):
        yield queries[at : at + size]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--queries", type=Path, default=HERE / "data" / "queries.jsonl")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", help="a GGUF file or a safetensors folder")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each process")
    parser.add_argument("--limit", type=int, help="at most so many queries")
    parser.add_argument("--device", default="cpu", help="cuda: the same code there, in float32 too")
    parser.add_argument("--against", type=Path, help="a file to compare the references with")
    given = parser.parse_args()
    model = DiscoveryModel.of(given.model)
    file, known = _opened(given.out, _header(model, Catalogue.of(files.load([DEMO]).tools)))
    places = {tool: place for place, tool in enumerate(References.read(given.out).header["tools"])}
    queries = [query for query in read_queries(given.queries)[: given.limit] if query.key not in known]
    vectors = given.out.with_suffix(".vectors")
    done = doubtful = 0
    apart = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    with file, ProcessPoolExecutor(given.processes, apart) as pool:
        waiting = [
            pool.submit(ask_some, given.model, given.threads, vectors, given.device, some)
            for some in _batches(queries)
        ]
        for each in waiting:
            for query, reference in each.result():
                done += 1
                doubtful += reference is None
                if reference is not None:
                    file.write(_line(query, reference, places))
            file.flush()
            print(f"\r{done} of {len(queries)} queries", end="", file=sys.stderr, flush=True)
    print(f"\n{done} queries, {doubtful} left out because too many tools may be candidates", file=sys.stderr)
    if given.against is not None:
        print(difference(References.read(given.out), References.read(given.against)))


if __name__ == "__main__":
    main()
