"""kill -9 of a front-end, of the engine and of the parent of a server over TLS, under load.

    python -m benchmarks.kills [--rounds 4] [--connections 16] [--set TABLE__KEY=VALUE ...]

Each round loads the server with one call at a time on each connection, out of a process of its own, kills one
process by SIGKILL at some moment, and looks at what became of every call and every connection, who serves
again and when, and whether the server's account agrees with what the clients saw. The engine is the real
one, on the CPU. A front-end or the engine is killed in one server again and again; each kill of a parent
needs a server of its own, and nobody is left to ask for an account.

Exits with 1 and names it where a promise was broken.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from benchmarks.kills.driver import Driver, Load, driving
from benchmarks.kills.judge import Round, summary
from benchmarks.kills.rounds import Stage
from benchmarks.ladder.queries import QUERIES, read
from benchmarks.ladder.wire import Endpoint
from benchmarks.report import FOLDER, Target, write
from benchmarks.serving import Server, serving

CHILDREN: tuple[Literal["front-end", "engine"], ...] = ("front-end", "engine")
KINDS = (*CHILDREN, "parent")
DELAY_S = 1.0  # at most, from when the load is there until the kill
RECOVERY = {  # each kill stands alone: the ones before are forgotten once the next process serves a while
    "RECOVERY__HEALTHY_S": 0.5,
}


def main() -> int:
    given = _arguments()
    rounds: list[dict[str, Any]] = []
    source = random.Random(given.seed)
    for found in _rounds(given, source):
        rounds.append(summary(found))
        print(_line(rounds[-1]), flush=True)
    violations = [
        f"round {number}, {each['victim']}: {sentence}"
        for number, each in enumerate(rounds, start=1)
        for sentence in each["violations"]
    ]
    results = {
        "frontends": given.frontends,
        "connections": given.connections,
        "timeout_ms": given.timeout_ms,
        "settings": given.set,
        "kinds": {kind: of_kind([each for each in rounds if each["kind"] == kind]) for kind in given.kinds},
        "violations": violations,
        "rounds": rounds,
    }
    write("kills", results, targets(rounds), out=given.out)
    for sentence in violations:
        print(f"violation: {sentence}")
    return 1 if violations else 0


def _rounds(given: argparse.Namespace, source: random.Random) -> Iterator[Round]:
    """All kills."""
    children = [kind for kind in CHILDREN if kind in given.kinds for _ in range(given.rounds)]
    if children:
        with _loaded(given) as (server, driver):
            for kind in children:
                yield Stage(server, driver, source.uniform(0.0, DELAY_S)).child(kind)
    if "parent" in given.kinds:
        for _ in range(given.rounds):
            with _loaded(given) as (server, driver):
                yield Stage(server, driver, source.uniform(0.0, DELAY_S)).parent()


@contextmanager
def _loaded(given: argparse.Namespace) -> Iterator[tuple[Server, Driver]]:
    """A server, and a driver that waits for its orders."""
    settings = {"ENGINE__DEVICE": "cpu", "SERVER__FRONTENDS": given.frontends, **RECOVERY}
    settings |= dict(item.split("=", 1) for item in given.set)
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder), settings, environment={"TMPDIR": folder}) as server,
    ):
        endpoint = Endpoint(server.host, server.port, "/mcp", server.ca)
        load = Load(endpoint, read(QUERIES)[: given.queries], given.connections, given.timeout_ms)
        with driving(load) as driver:
            yield server, driver


def of_kind(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All rounds of a kind together; times are the longest of them."""
    ended: Counter[str] = Counter()
    for each in rounds:
        ended.update(each["ended"])
    times = ("last_error_ms", "ready_again_ms", "first_answer_ms", "processes_gone_ms")
    summed = (
        "calls", "in_flight", "connections_of_others", "connections_of_others_lost", "unanswered",
        "processes_left",
    )  # fmt: skip
    return {
        "rounds": len(rounds),
        **{name: sum(each[name] for each in rounds) for name in summed},
        "ended": dict(ended),
        **{name: _longest(each[name] for each in rounds) for name in times},
        "accounts_wrong": sum(bool(each["accounts_wrong"]) for each in rounds),
    }


def _longest(values: Iterator[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def targets(rounds: Sequence[Mapping[str, Any]]) -> list[Target]:
    """Of the kinds that there were."""
    if not rounds:
        return []
    found = [
        Target("kills.unanswered", sum(each["unanswered"] for each in rounds), "at most"),
        Target(
            "kills.connections_of_others_lost",
            sum(each["connections_of_others_lost"] for each in rounds),
            "at most",
        ),
    ]
    kept = [each for each in rounds if each["kind"] != "parent"]
    if kept:
        wrong = sum(bool(each["accounts_wrong"]) for each in kept)
        found.append(Target("kills.accounts_wrong", wrong, "at most"))
        if all(each["ready_again_ms"] is not None for each in kept):
            longest = max(each["ready_again_ms"] for each in kept)
            found.append(Target("kills.ready_again_s", longest / 1000.0, "at most"))
    errors = {
        kind: [each["last_error_ms"] for each in rounds if each["kind"] == kind and each["last_error_ms"]]
        for kind in KINDS
    }
    if errors["engine"]:
        found.append(Target("kills.engine_error_ms", max(errors["engine"]), "at most"))
    if parents := [each["processes_left"] for each in rounds if each["kind"] == "parent"]:
        found.append(Target("kills.processes_left", sum(parents), "at most"))
    return found


def _line(told: Mapping[str, Any]) -> str:
    ended = ", ".join(f"{count} {end}" for end, count in told["ended"].items())
    parts = [
        f"{told['victim']}: {told['in_flight']} in flight: {ended or 'none'}",
        f"last error after {told['last_error_ms']} ms",
        f"ready after {told['ready_again_ms']} ms, first answer after {told['first_answer_ms']} ms"
        if told["kind"] != "parent"
        else f"{told['processes_left']} processes left after {told['processes_gone_ms']} ms",
        f"{told['connections_of_others_lost']} of {told['connections_of_others']} other connections lost",
        "; ".join(told["violations"]) or "no violation",
    ]
    return "; ".join(parts)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kills",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--rounds", type=int, default=4, help="of each kind")
    parser.add_argument("--frontends", type=int, default=2)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--queries", type=int, default=64, help="different ones")
    parser.add_argument("--timeout-ms", type=int, default=30_000, help="of each call")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--set", nargs="+", default=[], metavar="TABLE__KEY=VALUE", help="of every server")
    parser.add_argument("--out", type=Path, default=FOLDER / "results" / "kills.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
