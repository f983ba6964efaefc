"""More load than a CPU server over TLS can carry. The command starts what it loads.

    python -m benchmarks.overload [--only PART ...] [--references FILE]

    crowd      500 clients of mixed sizes, 20% hang up, 10% have little time; in two pools
    goodput    answers in time a second, up to 10 x the rate that can be sustained
    fairness   1 greedy and 50 modest callers
    stop       every process of the server is stopped by SIGSTOP for 10 s
    refusals   10,000 in a row, of calls too large and of calls in a hurry beside others
    mixed      short calls alone, and with 10% long ones at the same offered rate

Answers of `crowd` and `stop` are compared with those that each query gets alone, which are computed first.
The file is written after each part. Parts that it has from before stay where it is of the same commit, so
that one part can be run again. One that breaks off is told there with what it had found, and the others
go on.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.ladder.conditions import Bounds
from benchmarks.ladder.driver import Drivers, Settings
from benchmarks.ladder.rung import Shape, Site, climb
from benchmarks.mixed import LONG_WORK_ON_CPU, Traffic, mixed, sustained_rate
from benchmarks.overload.crowd import Crowd, beside_a_stop, of_all_kinds
from benchmarks.overload.fairness import Callers, fairness
from benchmarks.overload.goodput import Rates, goodput
from benchmarks.overload.known import Known, known
from benchmarks.overload.refusals import refusals
from benchmarks.overload.site import Running, running
from benchmarks.overload.targets import targets
from benchmarks.report import CHANGED, FOLDER, UNKNOWN, command_line, commit, write

TOO_SMALL = 8  # pages, which no query fits
MIXED_TIMEOUT_MS = 60_000
FIND_RATE_CLIENTS, FIND_RATE_S = 4, 20.0


@dataclass
class Run:
    """The parts, which look at each other's findings. `so_far` is what the present one has found already."""

    given: argparse.Namespace
    results: dict[str, Any] = field(default_factory=dict)
    broken: dict[str, Any] = field(default_factory=dict)
    conditions: dict[str, Any] = field(default_factory=dict)
    so_far: Any = None
    _known: Known | None = None

    def part(self, name: str) -> None:
        """Runs a part, to its end or until it breaks off."""
        self.so_far, began = None, time.monotonic()
        loads = [round(load, 2) for load in os.getloadavg()]
        try:
            self.results[name] = PARTS[name](self)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the other parts are of use without it
            traceback.print_exc()
            self.results.pop(name, None)
            self.broken[name] = {"reason": _sentence(error), "found": self.so_far}
        else:
            self.broken.pop(name, None)
        seconds = round(time.monotonic() - began, 1)
        told = {"seconds": seconds, "load_average_before": loads, "command": command_line("overload")}
        self.conditions[name] = told

    def take_up(self, file: Path) -> None:
        """Goes on with what the parts have found before, where `file` tells of the very same commit."""
        if not file.exists():
            return
        told: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if told["commit"] == commit() and not told["commit"].endswith((CHANGED, UNKNOWN)):
            self.results, self.broken = told["results"], told["broken"]
            self.conditions = told["conditions"]

    @property
    def known(self) -> Known:
        if self._known is None:
            given = self.given
            self._known = known(given.queries, given.long_queries, given.references, given.threads)
        return self._known

    def _running(self, settings: Mapping[str, object] | None = None) -> AbstractContextManager[Running]:
        """A server with the settings of a part, over which those of the command line go."""
        return running({**(settings or {}), **dict(item.split("=", 1) for item in self.given.set)})

    def crowd(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        given, self.so_far = self.given, found
        asked = Crowd(given.clients, given.seconds, given.timeout_ms)
        for pages in given.pools:
            known = self.known  # before the server starts, beside which it would be computed
            with self._running({"ENGINE__MAX_PAGES": pages} if pages else {}) as site:
                found.append({"max_pages": pages or None, **of_all_kinds(site, known, asked)})
            print(f"    {_told(found[-1])}", flush=True)
        return found

    def goodput(self) -> dict[str, Any]:
        given = self.given
        rates = Rates(given.rungs, given.factors, given.goodput_seconds, given.goodput_clients)
        with self._running() as site:
            return goodput(site, rates)

    def fairness(self) -> dict[str, Any]:
        given = self.given
        found = fairness(
            Callers(given.modest, given.modest_calls, given.greedy_calls, given.fairness_seconds),
            given.threads,
        )
        print(f"    Jain's index {found['jain']}, without turns {found['jain_without_turns']}", flush=True)
        return found

    def stop(self) -> dict[str, Any]:
        given, known = self.given, self.known
        patient = Crowd(given.stop_clients, given.stop_seconds * 4, given.timeout_ms, 0.0, 0.0)
        with self._running() as site:
            found = beside_a_stop(site, known, patient, given.stop_seconds)
        print(f"    {_told(found)}", flush=True)
        return found

    def refusals(self) -> dict[str, Any]:
        given, known = self.given, self.known
        found: dict[str, Any] = {}
        self.so_far = found
        for name, settings, busy in (
            ("too_large", {"ENGINE__MAX_PAGES": TOO_SMALL}, 0),
            ("in_a_hurry", {}, given.busy_clients),
        ):
            with self._running(settings) as site:
                found[name] = refusals(site, known, given.refusals, busy)
            print(
                f"    {name}: {found[name]['refusal_ms']} ms, {found[name]['resident_mib']} MiB",
                flush=True,
            )
        return found

    def mixed(self) -> dict[str, Any]:
        given = self.given
        with (
            self._running() as site,
            Drivers(Settings(site.endpoint, timeout_ms=MIXED_TIMEOUT_MS), 1) as drivers,
        ):
            place = Site(drivers, site.admin, site.server.pid, site.trace)
            best = self.results.get("goodput", {}).get("sustainable_per_s")
            if given.mixed_rate is None and best is None:
                best = climb(place, Shape(FIND_RATE_CLIENTS, FIND_RATE_S, calls=1))[0]["answers_per_s"]
            rate = given.mixed_rate or sustained_rate(best, LONG_WORK_ON_CPU)
            traffic = Traffic(given.mixed_clients, rate, (0.0, 0.1), given.mixed_seconds)
            found, abort = mixed(place, traffic, Bounds(p99_ms=float("inf")))
        return {**found, "abort": abort.as_json() if abort else None}


def _sentence(error: BaseException) -> str:
    """The first of those in a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def _told(found: dict[str, Any]) -> str:
    return (
        f"{found['calls']:,} calls: {found['answered']:,} answered, {found['refused']:,} refused, "
        f"{found['hung_up']:,} hung up, {found['failed']:,} failed, {found['contaminated']:,} contaminated "
        f"of {found['compared']:,} compared; {found['imbalance'] or 'the accounts are exact'}"
    )


PARTS: dict[str, Callable[[Run], Any]] = {
    "crowd": Run.crowd,
    "goodput": Run.goodput,
    "fairness": Run.fairness,
    "stop": Run.stop,
    "refusals": Run.refusals,
    "mixed": Run.mixed,
}


def _numbers(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def parse(text: str) -> list[Any]:
        return [kind(item) for item in text.split(",")]

    parse.__name__ = "list of numbers"
    return parse


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.overload",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART")
    made.add_argument("--out", type=Path, default=FOLDER / "results" / "overload-cpu.json")
    made.add_argument("--set", nargs="+", default=[], metavar="TABLE__KEY=VALUE", help="of every server")
    made.add_argument("--queries", type=int, default=32, help="different short ones")
    made.add_argument("--long-queries", type=int, default=6, help="different long ones")
    made.add_argument(
        "--references", type=Path, default=Path("overload-references.json"), help="their answers"
    )
    made.add_argument("--threads", type=int, default=2, help="of torch, where no server is asked")
    made.add_argument("--clients", type=int, default=500)
    made.add_argument("--seconds", type=float, default=45.0, help="of a crowd")
    made.add_argument("--timeout-ms", type=int, default=60_000, help="of those that have time")
    made.add_argument(
        "--pools", type=_numbers(int), default=[0, 400], help="pages; 0: what the allowance gives"
    )
    made.add_argument("--rungs", type=_numbers(int), default=[4, 16, 64], help="clients that find the peak")
    made.add_argument("--factors", type=_numbers(float), default=[1.0, 10.0])
    made.add_argument("--goodput-seconds", type=float, default=40.0, help="of each run")
    made.add_argument("--goodput-clients", type=int, default=512)
    made.add_argument("--modest", type=int, default=50)
    made.add_argument("--modest-calls", type=int, default=4, help="open, of each modest caller")
    made.add_argument("--greedy-calls", type=int, default=1000)
    made.add_argument("--fairness-seconds", type=float, default=30.0)
    made.add_argument("--stop-clients", type=int, default=64)
    made.add_argument("--stop-seconds", type=float, default=10.0)
    made.add_argument("--refusals", type=int, default=10_000)
    made.add_argument("--busy-clients", type=int, default=4, help="beside the refusals in a hurry")
    made.add_argument("--mixed-seconds", type=float, default=210.0, help="of each run")
    made.add_argument("--mixed-clients", type=int, default=128)
    made.add_argument(
        "--mixed-rate", type=float, help="arrivals a second; by default from what was sustained"
    )
    return made


def main() -> int:
    run = Run(parser().parse_args())
    run.take_up(run.given.out)
    for name in PARTS:
        if name not in run.given.only:
            continue
        print(f"{name}:", flush=True)
        run.part(name)
        about = {"broken": run.broken, "conditions": run.conditions}
        write("overload", run.results, targets(run.results), out=run.given.out, top=about)
    for name, told in run.broken.items():
        print(f"{name} broke off: {told['reason']}")
    return 1 if run.broken else 0


if __name__ == "__main__":
    sys.exit(main())
