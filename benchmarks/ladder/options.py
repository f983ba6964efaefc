"""The command line of the ladder."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.ladder import queries

PARTS = ("ladder", "burst", "mixed", "stub")
MODES = ("idle", "busy")
DESCRIPTION = """\
A load ladder of TLS clients against a server, until a condition stops it.

    python -m benchmarks.ladder --url URL --ca FILE --rungs 1,2,4 --out FILE
    python -m benchmarks.ladder --start --neighbour --parts ladder burst mixed --out-dir DIR

With --start the command starts the server itself, on its shipped defaults, with --neighbour beside a
process that fills the card but for the allowance; the parts then run beside it idle, then busy.
Exit code: 0 when every rung held, 1 when one was stopped, 2 for a wrong command line."""


def numbers(kind: Callable[[str], float]) -> Callable[[str], list[float]]:
    def parse(text: str) -> list[float]:
        values = [kind(item) for item in text.split(",") if item.strip()]
        if not values or min(values) < 0:
            raise ValueError
        return values

    parse.__name__ = "list of numbers"
    return parse


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.ladder",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _server(made)
    _load(made)
    _bounds(made)
    made.add_argument("--out", type=Path, help="the result file, of one part")
    made.add_argument("--out-dir", type=Path, help="a folder for one result file of each part")
    return made


def _server(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("the server")
    group.add_argument("--url", help="such as https://127.0.0.1:8443/mcp")
    group.add_argument("--ca", type=Path, help="the authority of its certificate")
    group.add_argument(
        "--admin", help="its admin listener, such as http://127.0.0.1:9464, for the accounting"
    )
    group.add_argument("--server-pid", type=int, help="its process, for CPU and, without a card, memory")
    group.add_argument("--start", action="store_true", help="start one instead")
    group.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    group.add_argument(
        "--set", nargs="+", default=[], metavar="TABLE__KEY=VALUE", help="settings of the started server"
    )
    group.add_argument("--neighbour", action="store_true", help="start a neighbour on the card first")
    group.add_argument("--margin-mib", type=int, default=64, help="free beside the allowance")
    group.add_argument("--duty", type=float, default=0.6, help="of the busy neighbour, alone")
    group.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="of the neighbour")


def _load(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("the load")
    group.add_argument("--parts", nargs="+", choices=PARTS, default=["ladder"])
    group.add_argument("--rungs", type=numbers(int), default=[2**i for i in range(12)], help="clients: 1,2,4")
    group.add_argument("--seconds", type=float, default=10.0, help="a rung, at least")
    group.add_argument("--most-seconds", type=float, default=300.0, help="a rung, at the longest")
    group.add_argument("--calls", type=int, default=5, help="a client, at least")
    group.add_argument("--rate", type=float, help="open loop: arrivals a second, on each rung")
    group.add_argument("--drivers", type=int, default=max(1, min(4, (os.cpu_count() or 2) // 2)))
    group.add_argument("--queries", type=Path, default=queries.QUERIES)
    group.add_argument("--references", type=Path, help="a file of benchmarks.references; none: not compared")
    group.add_argument("--timeout-ms", type=int, help="of each call; left to the server by default")
    group.add_argument("--burst-clients", type=int, default=2048)
    group.add_argument("--burst-rounds", type=int, default=3, help="on open connections")
    group.add_argument("--mixed-shares", type=numbers(float), default=[0.0, 0.1, 0.3])
    group.add_argument("--mixed-seconds", type=float, default=60.0)
    group.add_argument("--mixed-long-seconds", type=float, default=0.0, help="one more run, 10%% long")
    group.add_argument("--mixed-clients", type=int, default=2048)
    group.add_argument("--mixed-rate", type=float, help="arrivals a second; by default from the ladder")
    group.add_argument("--mixed-modes", nargs="+", choices=MODES, default=["busy"])
    group.add_argument("--stub-rungs", type=numbers(int), help="by default the same")
    group.add_argument("--stub-seconds", type=float, default=2.0, help="a rung against the stub")


def _bounds(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("what stops it, besides failures, contamination and accounts")
    group.add_argument("--p99-ms", type=float, default=10_000.0)
    group.add_argument("--allowance-mib", type=int, default=2740)
    group.add_argument(
        "--neighbour-p99-ratio", type=float, default=5.0, help="of its step, to the same while we idle"
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    made = parser()
    given = made.parse_args(arguments)
    if given.start == bool(given.url):
        made.error("give --url and --ca of a running server, or --start")
    if given.url and not given.ca:
        made.error("--url needs --ca, the authority of the server's certificate")
    if given.neighbour and not given.start:
        made.error("--neighbour needs --start, as it has to be there before the server")
    if given.out and len(given.parts) * (len(given.modes) if given.neighbour else 1) > 1:
        made.error("--out holds one part: use --out-dir")
    if any("=" not in item for item in given.set):
        made.error("--set takes TABLE__KEY=VALUE")
    if min(given.rungs) < 1 or given.drivers < 1 or given.seconds <= 0:
        made.error("--rungs and --drivers begin at 1, and --seconds above 0")
    return given
