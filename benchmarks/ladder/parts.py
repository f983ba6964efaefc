"""The parts of a run: each makes the results, targets and abort of one file."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.ladder import queries
from benchmarks.ladder.burst import burst
from benchmarks.ladder.conditions import Abort, Bounds, Rung, first_abort, without_gain
from benchmarks.ladder.driver import Drivers, Settings
from benchmarks.ladder.rung import Shape, Site, climb, line
from benchmarks.ladder.stub import one_answer, stub
from benchmarks.mixed import Traffic, mixed, sustained_rate
from benchmarks.mixed import targets as mixed_targets
from benchmarks.report import Target


@dataclass(frozen=True, slots=True)
class Part:
    """What one part found; `rungs` are all its runs, in order."""

    name: str
    rungs: list[Rung]
    results: dict[str, Any]
    targets: list[Target] = field(default_factory=list)
    abort: Abort | None = None


@dataclass
class Run:
    """The parts of one command, which look at each other's findings."""

    given: argparse.Namespace
    site: Site
    settings: Settings
    on_card: bool
    ready_s: float | None = None  # of the server's start, where this command started it
    best_answers_per_s: float = 0.0
    idle_burst: float | None = None  # answers/s beside the idle neighbour

    def ladder(self, mode: str, alone_p99_ms: float | None) -> Part:
        """Rung by rung until one is stopped."""
        bounds = self._bounds(alone_p99_ms)
        given = self.given
        rungs, abort = _climb_all(self.site, self._shapes(given.rungs, given.seconds, given.calls), bounds)
        notes = without_gain(rungs)
        for note in notes:
            print(f"no gain: {note}", flush=True)
        best = max((rung["answers_per_s"] for rung in rungs), default=0.0)
        self.best_answers_per_s = max(self.best_answers_per_s, best)
        results = {"without_gain": notes, "best_answers_per_s": best}
        return Part(_named("ladder", mode), rungs, results, self._ladder_targets(rungs), abort)

    def burst(self, mode: str, alone_p99_ms: float | None) -> Part:
        given = self.given
        result = burst(self.site, given.burst_clients, given.burst_rounds)
        rungs = [result["cold"], *result["warm"]]
        for rung in rungs:
            print(f"burst {line(rung)}", flush=True)
        bounds = replace(self._bounds(alone_p99_ms), p99_ms=float("inf"))
        abort = next((found for rung in rungs if (found := first_abort(rung, bounds))), None)
        return Part(_named("burst", mode), rungs, result, self._burst_targets(mode, result, rungs), abort)

    def mixed(self, mode: str) -> Part:
        given = self.given
        rate = given.mixed_rate or sustained_rate(self.best_answers_per_s)
        if not rate:
            raise ValueError("mixed traffic needs --mixed-rate, or a ladder before it that finds one")
        traffic = Traffic(
            given.mixed_clients, rate, given.mixed_shares, given.mixed_seconds, given.mixed_long_seconds
        )
        bounds = replace(self._bounds(None), p99_ms=float("inf"))
        result, abort = mixed(self.site, traffic, bounds)
        runs = result.pop("runs")
        return Part(_named("mixed", mode), runs, result, mixed_targets({"runs": runs}, self.on_card), abort)

    def stub(self) -> Part:
        """The same rungs against a server that costs nothing: what the drivers could have reached."""
        given = self.given
        query = queries.read(self.settings.queries)[0]
        body = asyncio.run(one_answer(self.settings.endpoint, query))
        with (
            tempfile.TemporaryDirectory() as folder,
            stub(Path(folder), body, given.drivers) as endpoint,
            Drivers(
                replace(self.settings, endpoint=endpoint, references=None), self.given.drivers
            ) as drivers,
        ):
            shapes = self._shapes(given.stub_rungs or given.rungs, given.stub_seconds, 1)
            rungs, abort = _climb_all(Site(drivers), shapes, Bounds())
        best = max((rung["answers_per_s"] for rung in rungs), default=0.0)
        return Part("stub", rungs, {"best_answers_per_s": best, "answer_bytes": len(body)}, abort=abort)

    def _shapes(self, rungs: list[int], seconds: float, calls: int) -> list[Shape]:
        most = max(self.given.most_seconds, seconds)
        return [Shape(clients, seconds, calls, rate=self.given.rate, most_s=most) for clients in rungs]

    def _bounds(self, alone_p99_ms: float | None) -> Bounds:
        given = self.given
        return Bounds(given.p99_ms, given.allowance_mib, given.neighbour_p99_ratio, alone_p99_ms)

    def _ladder_targets(self, rungs: list[Rung]) -> list[Target]:
        """Those about a card."""
        if not self.on_card:
            return []
        peaks = [rung["memory_peak_mib"] for rung in rungs if rung["memory_peak_mib"] is not None]
        found = [Target("memory.allowance_mib", max(peaks), "at most")] if peaks else []
        if self.ready_s is not None:
            found.append(Target("start.ready_s_gpu", self.ready_s, "at most"))
        return found

    def _burst_targets(self, mode: str, result: dict[str, Any], rungs: list[Rung]) -> list[Target]:
        """Of the slowest round; on a card, as the targets are about nothing else."""
        rate = result["lowest_answers_per_s"]
        if not self.on_card or rate is None:
            return []
        found = [
            Target("burst.failed", sum(rung["failed"] for rung in rungs), "at most"),
            Target("burst.refused", sum(rung["refused"] for rung in rungs), "at most"),
        ]
        if all(rung["contaminated"] is not None for rung in rungs):
            found.append(Target("burst.contaminated", sum(r["contaminated"] for r in rungs), "at most"))
        if mode == "idle":
            self.idle_burst = rate
            found.append(Target("burst.idle_neighbour_answers_per_s", rate, "at least"))
        elif mode == "busy" and self.idle_burst:
            slowest = min(result["warm"], key=lambda rung: float(rung["answers_per_s"]))
            share = result["our_card_share"] = round(1.0 - slowest["neighbour"]["card_share"], 3)
            ratio = rate / (share * self.idle_burst)
            found.append(Target("burst.busy_neighbour_share_of_idle_rate", ratio, "at least"))
        return found


def _named(part: str, mode: str) -> str:
    return f"{part}-{mode}" if mode else part


def _climb_all(site: Site, shapes: list[Shape], bounds: Bounds) -> tuple[list[Rung], Abort | None]:
    """Rungs until the first that breaks a condition; that one is among them."""
    rungs: list[Rung] = []
    for shape in shapes:
        try:
            rung, _ = climb(site, shape)
        except OSError as error:
            return rungs, Abort("accounting", shape.clients, f"the accounts cannot be read: {error}")
        rungs.append(rung)
        print(line(rung), flush=True)
        abort = first_abort(rung, bounds)
        if abort is not None:
            return rungs, abort
    return rungs, None
