"""The whole server on a CPU beside a FastMCP server with its BM25 search: same machine, run and queries.

    python -m benchmarks.peers [--seconds 10] [--clients 1,8,32] [--data DIR --sets NAME ...] [--out FILE]

FastMCP goes into a venv of its own, made on the first run. Both serve the demo catalogue over TLS and are
asked as their clients would: `discover_tools` and `search_tools`, five tools an answer, whole definitions.
Then the requests of `data/unanswerable.jsonl`, and with --data labelled sets (as `mcp-discovery eval`
takes them), ten tools an answer. The peer names a tool SERVER_NAME, as a mounted server's are.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.ladder import host, queries
from benchmarks.ladder.options import numbers
from benchmarks.ladder.rung import quantiles
from benchmarks.ladder.wire import Client, Endpoint, connect
from benchmarks.report import FOLDER, write
from benchmarks.serving import serving
from mcp_discovery.certificates import Pki, ensure
from mcp_discovery.evaluate import LabelledSet, metrics_of

FASTMCP = "fastmcp==4.2.3"
PACKAGES = (FASTMCP, "uvloop", "httptools")
DEMO = FOLDER.parent / "mcp_discovery" / "data" / "demo"
UNANSWERABLE = FOLDER / "data" / "unanswerable.jsonl"
VENV = Path.home() / ".cache" / "mcp-discovery" / "peers" / FASTMCP
METRICS = ("hit@1", "R@5", "nDCG@10", "C@10")
RANKED = 10  # tools an answer, where rankings are compared
WARM_UP = 3  # calls


@dataclass(frozen=True, slots=True)
class Contender:
    """A running server, how it is asked, and how the tools of its answer are read, best first."""

    name: str
    endpoint: Endpoint
    pid: int
    tool: str
    arguments: Callable[[str, int], dict[str, object]]
    tools_of: Callable[[dict[str, Any]], list[str]]

    def request(self, query: str, limit: int) -> bytes:
        return self.endpoint.call(self.arguments(query, limit), self.tool)

    def cpu_s(self) -> float:
        return sum(host.thread_seconds(host.tree(self.pid)).values())


@contextmanager
def ours(folder: Path, catalogue: Path, limit: int) -> Iterator[Contender]:
    """`limit` is asked for in each call."""
    with serving(folder, {"ENGINE__DEVICE": "cpu", "CATALOG__PATHS": catalogue}) as server:
        server.await_warm()
        endpoint = Endpoint(server.host, server.port, "/mcp", server.ca)
        yield Contender(
            "mcp-discovery", endpoint, server.pid, "discover_tools",
            lambda query, limit: {"query": query, "limit": limit, "timeout_ms": 60_000},
            lambda result: [tool["id"] for tool in result["structuredContent"]["tools"]],
        )  # fmt: skip


@contextmanager
def fastmcp(folder: Path, catalogue: Path, limit: int) -> Iterator[Contender]:
    """Its search takes no limit: the server has it."""
    pki = Pki(folder)
    ensure(pki)
    command = [_python(VENV), FOLDER / "peer_server.py", "--cert", pki.server, "--key", pki.server_key]
    command += ["--max-results", str(limit), catalogue]
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            told = json.loads(process.stdout.readline() or "null")
            if told is None:
                raise SystemExit("the FastMCP server did not start; see its message above")
            endpoint = Endpoint("127.0.0.1", told["port"], "/mcp", pki.ca)
            yield Contender(
                FASTMCP, endpoint, process.pid, "search_tools",
                lambda query, limit: {"query": query},
                lambda result: [told["ids"][tool["name"]] for tool in _searched(result)],
            )  # fmt: skip
        finally:
            process.terminate()


def _searched(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The tools of a `search_tools` result."""
    found: list[dict[str, Any]] = result["structuredContent"]["result"]
    return found


CONTENDERS = (ours, fastmcp)


def ensure_venv(folder: Path) -> None:
    """FastMCP in a venv, installed once."""
    if not (folder / ".installed").exists():
        print(f"installing {FASTMCP} into {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = (str(_python(folder)), "-m", "pip", "install", "-q", "--disable-pip-version-check")
        subprocess.run([*pip, *PACKAGES], check=True)
        (folder / ".installed").touch()


def _python(venv: Path) -> Path:
    return venv / "bin" / "python"


class Asking:
    """Owns clients for a closed loop: each asks the next request once it is answered, until `until`."""

    def __init__(self, requests: Iterator[bytes], until: float) -> None:
        self._requests, self._until = requests, until
        self._open = 0
        self.over = asyncio.Event()
        self.bodies: list[bytes] = []
        self.latencies: list[float] = []

    def ask(self, client: Client) -> None:
        request = next(self._requests, None)
        if request is None or (time.monotonic() >= self._until and self.latencies):
            if not self._open:
                self.over.set()
            return
        client.owner = self
        self._open += 1
        client.ask(request)

    def answered(self, client: Client, ok: bool, body: bytes) -> None:
        if not ok:
            raise SystemExit(f"a server answered {body[:200]!r}")
        self.latencies.append((time.monotonic() - client.sent) * 1e3)
        self.bodies.append(body)
        self._open -= 1
        self.ask(client)

    def lost(self, client: Client, reason: str) -> None:
        raise SystemExit(f"a server hung up: {reason}")


async def ask_all(
    contender: Contender, requests: Sequence[bytes], clients: int, seconds: float = float("inf")
) -> Asking:
    """Asks the requests over `clients` connections until they are used up or the time is over."""
    context = contender.endpoint.context()
    opened = [await connect(contender.endpoint, context) for _ in range(clients)]
    asking = Asking(iter(requests), time.monotonic() + seconds)
    for client in opened:
        asking.ask(client)
    await asking.over.wait()
    for client in opened:
        client.close()
    return asking


def load(contender: Contender, clients: int, seconds: float) -> dict[str, Any]:
    """A closed loop of `clients`, each on a connection of its own."""
    texts = queries.read(queries.QUERIES)
    requests = [contender.request(text, 5) for text in texts]
    cpu, began = contender.cpu_s(), time.monotonic()
    asked = asyncio.run(ask_all(contender, requests, clients, seconds))
    wall = time.monotonic() - began
    empty = sum(not contender.tools_of(json.loads(body)["result"]) for body in asked.bodies)
    return {
        "clients": clients,
        "calls": len(asked.bodies),
        "without_tools": empty,
        "calls_per_s": round(len(asked.bodies) / wall, 2),
        "latency_ms": quantiles(asked.latencies),
        "server_cpu_ms_per_call": round(1e3 * (contender.cpu_s() - cpu) / len(asked.bodies), 3),
        "bytes_per_answer": round(statistics.mean(map(len, asked.bodies))),
    }


def rankings(contender: Contender, texts: Sequence[str]) -> list[list[str]]:
    """The ids of each query's answer, asked one after the other."""
    requests = [contender.request(text, RANKED) for text in texts]
    asked = asyncio.run(ask_all(contender, requests, 1))
    return [contender.tools_of(json.loads(body)["result"]) for body in asked.bodies]


def quality(contender: Contender, labelled: LabelledSet) -> dict[str, float]:
    """Mean metrics of the served rankings; an answer without tools is an empty one."""
    orders = rankings(contender, [query.text for query in labelled.queries])
    each = [metrics_of(q.labels, order) for q, order in zip(labelled.queries, orders, strict=True)]
    return {metric: round(statistics.mean(m[metric] for m in each), 4) for metric in METRICS}


def unanswerable() -> list[str]:
    entries = [json.loads(line) for line in UNANSWERABLE.read_text(encoding="utf-8").splitlines()]
    return [entry["query"] for entry in entries if "demo" in entry["catalogues"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--clients", type=numbers(int), default=[1, 8, 32])
    parser.add_argument("--data", type=Path, help="a folder of labelled sets")
    parser.add_argument("--sets", nargs="+", default=["arcade", "mcpproxy_golden", "vendor_mcp"])
    parser.add_argument("--queries", type=int, default=50, help="of each set, a seeded sample")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    ensure_venv(VENV)
    results: dict[str, Any] = {"load": {}, "unanswerable": {}, "quality": {}}
    _on_demo(given, results)
    for name in given.sets if given.data else ():
        labelled = LabelledSet.load(given.data / name, given.queries)
        found = _each(given.data / name / "catalogue.jsonl", RANKED, partial(quality, labelled=labelled))
        results["quality"][name] = {"queries": len(labelled.queries), "tools": len(labelled.tools), **found}
        print(f"{name}: {found}", flush=True)
    write("peers", results, out=given.out)


def _on_demo(given: argparse.Namespace, results: dict[str, Any]) -> None:
    texts = unanswerable()

    def measure(contender: Contender) -> dict[str, Any]:
        rankings(contender, queries.read(queries.QUERIES)[-WARM_UP:])
        told = [load(contender, clients, given.seconds) for clients in given.clients]
        for each in told:
            print(f"{contender.name}: {each}", flush=True)
        offered = sum(bool(order) for order in rankings(contender, texts))
        print(f"{contender.name}: offered a tool for {offered} of {len(texts)} that none serves", flush=True)
        return {"load": told, "unanswerable": {"asked": len(texts), "offered": offered}}

    for name, found in _each(DEMO, 5, measure).items():
        results["load"][name], results["unanswerable"][name] = found["load"], found["unanswerable"]


def _each(catalogue: Path, limit: int, measure: Callable[[Contender], Any]) -> Mapping[str, Any]:
    """What `measure` finds for each contender, which run one after the other."""
    found = {}
    for contender in CONTENDERS:
        with tempfile.TemporaryDirectory() as folder, contender(Path(folder), catalogue, limit) as running:
            found[running.name] = measure(running)
    return found


if __name__ == "__main__":
    main()
