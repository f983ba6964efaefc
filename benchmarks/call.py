"""A warm `discover_tools` call over TLS on the demo catalogue, on a CPU: one client, one call at a time.

    python -m benchmarks.call [--calls 100]

Starts a server of its own, drops the first calls, then times calls with queries that were not asked before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import FOLDER, Target, write
from benchmarks.serving import Connection, Server, serving

WARM_UP_CALLS = 5
MAX_QUERY = 200  # characters: the short request of the targets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), {"ENGINE__DEVICE": "cpu"}) as server:
        warm_s = server.await_warm()
        results = asyncio.run(_measure(server, _queries(arguments.calls + WARM_UP_CALLS)))
        results["warm_after_ready_s"] = round(warm_s, 1)
    targets = [
        Target("cpu.p50_s_first_whole", results["p50_ms"] / 1000, "at most"),
        Target("cpu.p50_s", results["p50_ms"] / 1000, "at most"),
        Target("start.ready_s_cpu", results["ready_s"], "at most"),
    ]
    write("call", results, targets, out=arguments.out)


def _queries(count: int) -> list[str]:
    lines = (FOLDER / "data" / "queries.jsonl").read_text(encoding="utf-8").splitlines()
    short = (query for line in lines if len(query := json.loads(line)["query"]) <= MAX_QUERY)
    return [query for query, _ in zip(dict.fromkeys(short), range(count), strict=False)]


async def _measure(server: Server, queries: list[str]) -> dict[str, Any]:
    connection = await Connection.open(server)
    for query in queries[:WARM_UP_CALLS]:
        await connection.call({"query": query})
    latencies, engine, statuses = [], [], dict[str, int]()
    cpu = server.cpu_s()
    for query in queries[WARM_UP_CALLS:]:
        started = time.perf_counter()
        result = await connection.call({"query": query})
        latencies.append(1000 * (time.perf_counter() - started))
        engine.append(result["timing_ms"]["engine"])
        statuses[result["status"]] = statuses.get(result["status"], 0) + 1
    cpu = server.cpu_s() - cpu
    await connection.close()
    return {
        "server": server.announced,
        "ready_s": round(server.ready_s, 2),
        "calls": len(latencies),
        "statuses": statuses,
        "p50_ms": round(statistics.median(latencies), 1),
        "p99_ms": round(statistics.quantiles(latencies, n=100)[98], 1),
        "engine_p50_ms": round(statistics.median(engine), 1),
        "server_cpu_ms_per_call": round(1000 * cpu / len(latencies), 1),
    }


if __name__ == "__main__":
    main()
