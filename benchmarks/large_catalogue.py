"""What a catalogue of 15,000 tools costs: until it can be searched, in memory, and by call.

    python -m benchmarks.large_catalogue --data DIR --device cuda|cpu --model FILE [--cache FOLDER] --out FILE

The tools of all sets of DIR are pooled (`benchmarks.pooled`), read, indexed and searched as `serve` does, in
this process and without a transport: Discovery over an engine behind a gate. Before the vectors are there a
call is answered by words and says that it is `degraded`. Vectors are computed into a cache that is empty;
`--index-seconds` ends that early, and what all of them would have taken is then extrapolated by tokens.
`--cache FOLDER` is where an earlier run has left its vectors: those that are missing are taken from there,
and those of this run left.

A cold call is the first of a query whose candidates' pages are not in the pool, a warm one the same again.
Both are asked one at a time, and by `--at-once` callers (32 on a card): there the cold queries are asked once
each, and the warm ones are few enough for their tools' pages to stay.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import resource
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.large_calls import Asker, TimedClient, figures, repeated
from benchmarks.pooled import catalogue_files, drawn_queries, write_pool
from benchmarks.report import Target, write
from engine.config import EngineConfig
from engine.engine import Engine
from engine.local import LocalClient
from mcp_discovery.assemble import Choices, DiscoveryModel, vector_cache
from mcp_discovery.discovery.call import DiscoverRequest
from mcp_discovery.discovery.catalogue import Catalogue
from mcp_discovery.discovery.prompts import MAX_PREFIX_TOKENS
from mcp_discovery.discovery.select import Discovery
from mcp_discovery.discovery.sources import files
from mcp_discovery.discovery.vectors import VectorCache, key_of
from mcp_discovery.gate import Gate
from mcp_discovery.transport.identity import Caller
from mcp_discovery.tuning import tune_interpreter

MIB = 2**20
CALLS = {"cuda": 100, "cpu": 30}
AT_ONCE = {"cuda": 32, "cpu": 0}
CALLS_EACH = 8  # of each caller where several ask at once
SPARE = 4  # queries drawn for each cold call that is wanted: some name a tool, some find pages in the pool
FIRST = "create an issue in a repository"


@dataclass
class Large:
    """The pooled catalogue and what searches it, and what has been measured of them so far."""

    told: dict[str, Any]
    config: EngineConfig
    gate: Gate
    client: TimedClient
    discovery: Discovery
    cache: VectorCache

    @classmethod
    def build(cls, pool: Path, model: DiscoveryModel, config: EngineConfig, folder: Path) -> Large:
        """Reads and indexes the tool list at `pool`; vectors are kept in `folder`."""
        started, before = time.perf_counter(), rss_mib()
        loaded = files.load([pool])
        catalogue = Catalogue.of(loaded.tools)
        read, held = time.perf_counter(), rss_mib()
        gate = Gate("the model is being loaded", config.page_tokens)
        client = TimedClient(gate)
        discovery = model.discovery(
            client,
            catalogue,
            Choices(),
            device=config.device,
            page_tokens=config.page_tokens,
            vectors=folder,
        )
        told = {
            "model": model.name,
            "candidates": discovery.settings.candidates,
            "pool": {
                "tools": len(catalogue),
                "definitions": len({tool.form for tool in catalogue.tools}),
                "servers": len(catalogue.servers),
                "left_out": len(loaded.problems),
            },
            "words": {"read_s": round(read - started, 2), "index_s": round(time.perf_counter() - read, 2)},
            "memory_mib": {
                "catalogue": round(held - before, 1),
                "index": round(rss_mib() - held, 1),
            },
        }
        return cls(told, config, gate, client, discovery, cache_of(model, folder))

    async def open(self, engine: Engine, ready_s: float) -> None:
        """Lets calls through to the engine; the first one has to do with words."""
        self.gate.open(LocalClient(engine))
        started = time.perf_counter()
        result = await self.discovery.discover(DiscoverRequest(FIRST), Caller("first"))
        first_s = time.perf_counter() - started
        words = self.told["words"]
        words["engine_ready_s"] = round(ready_s, 2)
        words["first_call_ms"] = round(first_s * 1000.0, 1)
        words["first_call"] = {"status": result.status, "degraded": result.degraded}
        words["answers_after_s"] = round(words["read_s"] + words["index_s"] + ready_s + first_s, 2)

    async def index(self, engine: Engine, limit_s: float | None) -> None:
        """Computes the vectors that are missing, for `limit_s` at most."""
        present, before = self.discovery.snapshot.vectors.present, rss_mib()
        complete: list[float] = []
        started = time.perf_counter()

        def progress(done: int, total: int) -> None:
            if not complete and present.all():
                complete.append(time.perf_counter())

        working = asyncio.create_task(self.discovery.warm(progress))
        await asyncio.wait([working], timeout=limit_s)
        if not working.done():
            self.gate.close("the time to index is over")  # a refusal ends it, with what there is stored
            await working
            self.gate.open(LocalClient(engine))
        await working
        seconds = (complete[0] if complete else time.perf_counter()) - started
        sizes = [len(self.discovery.snapshot.prefix(position)) for position in range(len(present))]
        self.told["vectors"] = indexed(sizes, present.tolist(), seconds)
        self.told["memory_mib"]["growth_while_indexing"] = round(rss_mib() - before, 1)

    async def exchange(self, kept: VectorCache) -> None:
        """Takes the vectors that are still missing from `kept`, and leaves all there."""
        missing = set(self.discovery.snapshot.without_vector().values())
        self.cache.write(kept.read(missing))
        await self.discovery.recall()
        kept.write(self.cache.read(self._keys()))

    def finish(self) -> None:
        """What the vectors take, once there will be no more."""
        present = self.discovery.snapshot.vectors.present
        self.told["vectors"] |= {
            "missing": int((~present).sum()),
            "cache_mib": round(self.cache.path.stat().st_size / MIB, 1) if self.cache.path.exists() else 0.0,
        }
        self.told["memory_mib"] |= {
            "vectors": round(present.size * self.width * 4 / MIB, 1),
            "process_peak": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        }

    def _keys(self) -> set[bytes]:
        snapshot = self.discovery.snapshot
        return {key_of(snapshot.prefix(position)) for position in range(len(snapshot.catalogue))}

    @property
    def width(self) -> int:
        """Numbers of a vector; 0 where there is none."""
        vectors = self.discovery.snapshot.vectors
        known = (vectors.get(position) for position in vectors.present.nonzero()[0].tolist())
        first = next(known, None)
        return 0 if first is None else len(first)

    async def ask(self, queries: Sequence[str], calls: int, callers: int) -> None:
        asker = Asker(self.discovery, self.client, self.config.page_tokens)
        several = callers * CALLS_EACH
        alone, together = queries[several:], queries[:several]
        cold, warm, left_out = await asker.cold_and_warm(alone, calls)
        if not cold:
            raise SystemExit("no call was cold: too few tools have a vector, or too few queries were drawn")
        self.told["one_at_a_time"] = {
            "cold": figures(cold),
            "warm": figures(warm),
            "not_cold_and_left_out": left_out,
        }
        if not callers:
            return
        row_pages = MAX_PREFIX_TOKENS // self.config.page_tokens
        found = {"callers": callers, "cold": figures(*await asker.at_once(together, callers))}
        kept = await asker.resident(together, self.discovery.settings.candidates, row_pages)
        again = repeated(kept, several)
        found["warm"] = figures(*await asker.at_once(again, callers)) | {"queries": len(kept)}
        self.told["at_once"] = found


def indexed(sizes: Sequence[int], computed: Sequence[bool], seconds: float) -> dict[str, Any]:
    """What computing vectors took, of tools with prefixes of `sizes` tokens; `all_s` is what all would take
    at the same tokens a second, None where none was computed."""
    tokens = sum(size for size, done in zip(sizes, computed, strict=True) if done)
    return {
        "tools": len(sizes),
        "tokens": sum(sizes),
        "computed": sum(computed),
        "seconds": round(seconds, 1),
        "tools_per_s": round(sum(computed) / seconds, 1),
        "tokens_per_s": round(tokens / seconds),
        "all_s": round(sum(sizes) / tokens * seconds, 1) if tokens else None,
    }


def cache_of(model: DiscoveryModel, folder: Path) -> VectorCache:
    """The model's file of vectors in `folder`."""
    if model.adapter is None:
        raise SystemExit("there are no vectors without an adapter: name one with --adapter")
    return vector_cache(model.sha256, model.adapter.sha256, folder)


def rss_mib() -> float:
    """Resident memory of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


async def measure(given: argparse.Namespace, folder: Path, queries: Sequence[str]) -> dict[str, Any]:
    model = DiscoveryModel.of(given.model, given.adapter)
    pool = folder / "pool.jsonl"
    write_pool(catalogue_files(given.data), pool)
    config = EngineConfig(device=given.device)
    large = Large.build(pool, model, config, folder)
    print(f"{large.told['pool']}, words {large.told['words']}", flush=True)
    started = time.perf_counter()
    engine = await asyncio.to_thread(Engine.create, config, model.path, model.adapter_path)
    try:
        tune_interpreter()  # as the server does
        await large.open(engine, time.perf_counter() - started)
        await large.index(engine, given.index_seconds)
        if given.cache is not None:
            await large.exchange(cache_of(model, given.cache))
        print(f"vectors {large.told['vectors']}", flush=True)
        await large.ask(queries, given.calls, given.at_once)
        status = engine.status()
    finally:
        await asyncio.to_thread(engine.close)
    large.finish()
    return large.told | {"kernels": status.kernels, "pages": status.pages.total}


def table(told: dict[str, Any]) -> str:
    """The calls' figures, for people."""
    kinds = [(f"alone {kind}", told["one_at_a_time"][kind]) for kind in ("cold", "warm")]
    if at_once := told.get("at_once"):
        kinds += [(f"{at_once['callers']} at once {kind}", at_once[kind]) for kind in ("cold", "warm")]
    lines = [
        f"{'':18}{'calls':>6}{'p50 ms':>10}{'p99 ms':>10}{'words':>8}{'vectors':>9}{'engine':>10}{'/s':>8}"
    ]
    for name, each in kinds:
        words, vectors, engine = (each["stages"][key]["p50_ms"] for key in ("words", "vectors", "engine"))
        lines.append(
            f"{name:18}{each['calls']:6}{each['p50_ms']:10.1f}{each['p99_ms']:10.1f}{words:8.1f}{vectors:9.1f}"
            f"{engine:10.1f}{each.get('calls_per_s', ''):>8}"
        )
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of sets, at any depth")
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--model", help="a GGUF file or a safetensors folder")
    parser.add_argument("--adapter", default="auto", help="auto or a file")
    parser.add_argument("--cache", type=Path, help="folder of vectors from an earlier run, for those missing")
    parser.add_argument("--index-seconds", type=float, help="at most, for the vectors")
    parser.add_argument("--calls", type=int, help="of each kind, one at a time (cuda 100, cpu 30)")
    parser.add_argument("--at-once", type=int, help="callers, 0 for none (cuda 32, cpu 0)")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    given.calls = given.calls or CALLS[given.device]
    given.at_once = AT_ONCE[given.device] if given.at_once is None else given.at_once
    return given


def main() -> None:
    given = _arguments()
    queries = drawn_queries(given.data, SPARE * given.calls + CALLS_EACH * given.at_once)
    with tempfile.TemporaryDirectory() as folder:
        told = asyncio.run(measure(given, Path(folder), queries))
    print(json.dumps({key: told[key] for key in ("words", "vectors", "memory_mib")}))
    print(table(told))
    ready = Target("catalogue.ready_lexically_s", told["words"]["answers_after_s"], "at most")
    write("large_catalogue", told, [ready], out=given.out)


if __name__ == "__main__":
    main()
