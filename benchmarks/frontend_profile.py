"""Where a front-end's processor time goes: the load of `benchmarks.frontends`, looked at by py-spy.

    python -m benchmarks.frontend_profile [--connections 64] [--rounds 5] [--profile-seconds 20] [--out FILE]

One front-end before the stub of an engine. Its CPU a call is read from /proc in rounds without py-spy, of
which the least counts: that in which others on the machine disturbed it least. The samples of py-spy then
share it out. A sample belongs to the innermost frame that a part of `PARTS` names, so that a part has what
it calls of numpy and of C. What uvloop does where no callback runs, TLS that is read included, is the
event loop's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import sys
import urllib.request
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.frontends import Clients, Part, drive, stubbed_server
from benchmarks.ladder.host import thread_seconds
from benchmarks.ladder.queries import QUERIES, read
from benchmarks.report import write
from benchmarks.serving import Server
from benchmarks.stacks import Frame, Profile, Spy, SpyFailed, Stack
from mcp_discovery import model_store

SHOWN = 30  # functions
PARTS = {  # what begins `file function`; the first that does
    "response: HTTP, TLS, socket": r"mcp_discovery/transport/cork|uvicorn/\S+ RequestResponseCycle\.send$",
    "response: JSON": r"mcp_discovery/transport/direct\.py (_send|send_)",
    "request: HTTP, connection limits": r"uvicorn/|mcp_discovery/transport/limits",
    "request: routing, middleware": r"starlette/",
    "request: envelope, disconnects": r"mcp_discovery/transport/",
    "request: arguments": r"mcp_discovery/arguments",
    "accounting": r"mcp_discovery/observe/",
    "discovery: names": r"mcp_discovery/discovery/names",
    "discovery: BM25": r"mcp_discovery/discovery/lexical",
    "discovery: query's tokens": r"engine/tokenizer|mcp_discovery/discovery/prompts",
    "discovery: vectors": r"mcp_discovery/discovery/vectors",
    "discovery: fusion, twins": r"mcp_discovery/discovery/(candidates|twins)",
    "discovery: scores, decision": r"mcp_discovery/discovery/",
    "result object and text": r"mcp_discovery/tool",
    "engine: wire": r"engine/wire/|mcp_discovery/gate",
    "event loop, TLS reads": r"asyncio/|uvloop/|ssl\.py",
}
OTHER = "other"


def part_of(stack: Stack) -> str:
    """The part of the innermost frame that has one."""
    return next((part for frame in reversed(stack.frames) if (part := _part(frame))), OTHER)


def _part(frame: Frame) -> str | None:
    place = f"{frame.file} {frame.function}"
    return next((part for part, begins in PARTS.items() if re.match(begins, place)), None)


def shared_out(profile: Profile, cpu_us: float) -> dict[str, Any]:
    """`cpu_us` a call shared out by the samples: to parts, and to functions by themselves."""
    every = sum(stack.samples for stack in profile.stacks)
    parts: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    for stack in profile.stacks:
        parts[part_of(stack)] += stack.samples
        last = stack.frames[-1]
        functions[f"{last.function} ({last.file})"] += stack.samples

    def us(counts: Counter[str], most: int | None = None) -> dict[str, float]:
        return {name: round(cpu_us * count / every, 1) for name, count in counts.most_common(most)}

    return {"samples": every, "parts_us": us(parts), "functions_us": us(functions, SHOWN)}


def measure(server: Server, clients: Clients, spy: Spy) -> dict[str, Any]:
    """Raises SpyFailed."""
    server.await_warm()
    with urllib.request.urlopen(f"{server.admin}/status.json", timeout=60) as reply:
        pid = next(
            each["pid"] for each in json.load(reply)["processes"] if each["name"].startswith("front-end")
        )
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=drive, args=(there, server, clients, 0), daemon=True)
    process.start()
    here.recv()  # connected and warm
    try:
        rounds = [_round(here, pid) for _ in range(clients.rounds)]
        # The load goes on between rounds too: only its counting ends.
        profile = spy.running(pid)
    finally:
        here.send("end")
        process.join()
    # Others of its threads only wait, which py-spy takes for running now and then.
    profile = Profile([stack for stack in profile.stacks if stack.tid == pid], profile.moments)
    if not profile.stacks:
        raise SpyFailed("py-spy did not see the thread of the event loop run")
    least = min(rounds)
    return {"cpu_us_per_call": least, "rounds_us": rounds, **shared_out(profile, least)}


def _round(driver: Connection, pid: int) -> float:
    """The front-end's CPU microseconds a call."""
    before = sum(thread_seconds([pid]).values())
    driver.send("go")
    part: Part = driver.recv()
    used = sum(thread_seconds([pid]).values()) - before
    return round(1e6 * used / len(part.latencies), 1)


def table(results: dict[str, Any]) -> list[str]:
    lines = ["| part | us a call | share |", "| --- | --- | --- |"]
    whole = results["cpu_us_per_call"]
    lines += (f"| {part} | {us:.0f} | {us / whole:.0%} |" for part, us in results["parts_us"].items())
    return [*lines, f"| in all | {whole:.0f} | |"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0, help="a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile-seconds", type=float, default=20.0)
    parser.add_argument("--rate", type=int, default=500, help="py-spy's samples a second")
    parser.add_argument("--model", type=Path, help="default: the one that `serve` takes")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    clients = Clients(read(QUERIES)[:512], given.connections, 1, given.seconds, given.rounds)
    try:
        with stubbed_server(1, given.model or model_store.fetch()) as server:
            results = measure(server, clients, Spy(given.profile_seconds, given.rate))
    except SpyFailed as failure:
        print(f"benchmarks.frontend_profile: {failure}", file=sys.stderr)
        return 1
    write("frontend-profile", results, out=given.out)
    print("\n".join(table(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
