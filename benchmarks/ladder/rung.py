"""One rung: connect, take the accounts, run, take the accounts again, and say all that was seen."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.ladder import host, ledger
from benchmarks.ladder.answers import ANSWERS, Call
from benchmarks.ladder.beside import Neighbour
from benchmarks.ladder.conditions import Rung
from benchmarks.ladder.driver import Connect, Disconnect, Drivers, Ran, Run, begin_soon
from benchmarks.ladder.limits import limiting
from benchmarks.memory_trace import Trace

SHOWN = 3  # sentences of a kind
BUSIEST = 4  # threads


@dataclass(frozen=True, slots=True)
class Site:
    """What a load runs against, and what is watched meanwhile. None: not there, or not to be seen."""

    drivers: Drivers
    admin: str | None = None
    server_pid: int | None = None
    trace: Trace | None = None
    neighbour: Neighbour | None = None


@dataclass(frozen=True, slots=True)
class Window:
    """Readings before a run, to be held against those after it."""

    account: ledger.Account | None
    threads: dict[str, float]
    opened: float = field(default_factory=time.monotonic)

    @classmethod
    def open(cls, site: Site) -> Window:
        """Raises OSError where the server's accounts cannot be read."""
        if site.trace is not None:
            site.trace.take()
        if site.neighbour is not None:
            site.neighbour.report()
        account = ledger.settled(site.admin, 0) if site.admin else None
        return cls(account, _threads(site))

    def close(self, site: Site, calls: Sequence[Call]) -> dict[str, Any]:
        """What was seen from outside; an account that cannot be read does not balance."""
        seconds = time.monotonic() - self.opened
        neighbour = site.neighbour.report() if site.neighbour else None
        peak, busy = site.trace.take() if site.trace else (None, None)
        threads = {
            name: round((total - self.threads.get(name, 0.0)) / seconds, 3)
            for name, total in _threads(site).items()
        }
        busiest = sorted(threads, key=lambda name: -threads[name])[:BUSIEST]
        return {
            "memory_peak_mib": peak if peak is None else round(peak, 1),
            "card_busy_percent": busy if busy is None else round(busy, 1),
            "neighbour": neighbour,
            "imbalance": self._imbalance(site, calls),
            "server": {
                "cores": round(sum(threads.values()), 2),
                "threads": {name: threads[name] for name in busiest},
            }
            if threads
            else None,
        }

    def _imbalance(self, site: Site, calls: Sequence[Call]) -> str | None:
        if site.admin is None or self.account is None:
            return None
        try:
            after = ledger.settled(site.admin, self.account["received"] + len(calls))
        except OSError as error:
            return f"the accounts cannot be read: {error}"
        return ledger.imbalance(self.account, after, calls)


def _threads(site: Site) -> dict[str, float]:
    return host.thread_seconds(host.tree(site.server_pid)) if site.server_pid else {}


@dataclass(frozen=True, slots=True)
class Shape:
    """A load: `rate` of arrivals a second makes it an open loop."""

    clients: int
    seconds: float
    calls: int = 5
    rate: float | None = None
    long_share: float = 0.0
    most_s: float = 300.0

    def orders(self, drivers: Drivers, begin: float) -> list[Run]:
        return [
            Run(
                shape="closed" if self.rate is None else "open",
                begin=begin,
                seconds=self.seconds,
                calls=self.calls,
                rate=(self.rate or 0.0) * share / self.clients,
                long_share=self.long_share,
                most_s=self.most_s,
            )
            for share in drivers.share(self.clients)
        ]


def climb(site: Site, shape: Shape) -> tuple[Rung, list[Call]]:
    """Runs a rung. Raises OSError where the server's accounts cannot be read beforehand."""
    if site.trace is not None:
        long = f", {shape.long_share:.0%} long" if shape.long_share else ""
        site.trace.mark(f"{shape.clients} clients{long}")
    connected = site.drivers.each([Connect(share) for share in site.drivers.share(shape.clients)])
    failures = [sentence for ran in connected for sentence in ran.failures]
    if failures:
        site.drivers.all(Disconnect())
        return _unconnected(shape, failures), []
    window = Window.open(site)
    runs = site.drivers.each(shape.orders(site.drivers, begin_soon()))
    calls = [call for ran in runs for call in ran.calls]
    seen = window.close(site, calls)
    site.drivers.all(Disconnect())
    shakes = [(done - began) * 1e3 for ran in connected for began, done in ran.handshakes]
    rung = summary(shape.clients, runs, calls) | seen | {"handshake_ms": quantiles(shakes)}
    return rung | {"limited_by": limiting(rung)}, calls


def _unconnected(shape: Shape, failures: Sequence[str]) -> Rung:
    """A rung whose clients could not all connect: each that could not counts as a failed call."""
    seen: dict[str, Any] = {
        "memory_peak_mib": None,
        "card_busy_percent": None,
        "neighbour": None,
        "imbalance": None,
    }
    rung = summary(shape.clients, [Ran(began=0.0, stopped=1.0)], [])
    told = list(dict.fromkeys(failures))[:SHOWN]
    seen |= {"server": None, "handshake_ms": None, "limited_by": None}
    return rung | seen | {"failed": len(failures), "failures": told}


def summary(clients: int, runs: Sequence[Ran], calls: Sequence[Call]) -> Rung:
    """The counts, rates and latencies of calls, in milliseconds; all calls are in it. The rate is of the
    answers until the first driver sent nothing new."""
    began, stopped = max(ran.began for ran in runs), min(ran.stopped for ran in runs)
    seconds = max(stopped - began, 1e-9)
    answers = [call for call in calls if call.status in ANSWERS]
    refusals = [call for call in calls if call.status == "refused"]
    failures = [call for call in calls if call.status == "failed"]
    compared = [call for call in calls if call.differs is not None]
    differing = [call for call in compared if call.differs]
    latency = quantiles(call.latency_ms for call in answers)
    offered = sum(ran.offered for ran in runs)
    return {
        "clients": clients,
        "seconds": round(seconds, 2),
        "offered": offered,
        "unsent": offered - len(calls),
        "answered": len(answers),
        "no_match": sum(call.status == "no_match" for call in answers),
        "refused": len(refusals),
        "refused_by_code": dict(Counter(call.code for call in refusals)),
        "failed": len(failures),
        "failures": list(dict.fromkeys(call.reason for call in failures))[:SHOWN],
        "contaminated": len(differing) if compared else None,
        "contaminations": list(dict.fromkeys(str(call.differs) for call in differing))[:SHOWN],
        "compared": len(compared),
        "answers_per_s": round(sum(call.ended <= stopped for call in answers) / seconds, 2),
        "p50_ms": latency["p50"] if latency else None,
        "p99_ms": latency["p99"] if latency else None,
        "max_ms": latency["max"] if latency else None,
        "refusal_ms": quantiles(call.latency_ms for call in refusals),
        "parts_ms": parts(answers),
        "driver": driver_cost(runs, len(calls)),
    }


def parts(calls: Sequence[Call]) -> dict[str, Any]:
    """Where answers spent their time; `outside` is TLS, HTTP, MCP and waiting for the event loop."""
    names = ("queue_ms", "retrieve_ms", "engine_ms", "outside_ms")
    return {name.removesuffix("_ms"): quantiles(getattr(call, name) for call in calls) for name in names}


def driver_cost(runs: Sequence[Ran], calls: int) -> dict[str, Any]:
    """What the load cost its own processes: of the busiest, the share of one core while it ran."""
    return {
        "processes": len(runs),
        "cpu_us_per_call": round(sum(ran.cpu_s for ran in runs) / calls * 1e6, 1) if calls else None,
        "busiest_share": round(max((ran.cpu_s / ran.wall_s for ran in runs if ran.wall_s), default=0.0), 3),
    }


def quantiles(values: Iterable[float]) -> dict[str, float] | None:
    """p50, p99 and highest by nearest rank; None for no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    return {
        "p50": round(ordered[math.ceil(0.5 * len(ordered)) - 1], 2),
        "p99": round(ordered[math.ceil(0.99 * len(ordered)) - 1], 2),
        "max": round(ordered[-1], 2),
    }


def line(rung: Rung) -> str:
    """A rung as a line of the table that a run prints."""
    contaminated = "not compared" if rung["contaminated"] is None else f"{rung['contaminated']} contaminated"
    latency = (
        "no answers" if rung["p50_ms"] is None else f"p50 {rung['p50_ms']:,.1f} p99 {rung['p99_ms']:,.1f} ms"
    )
    memory = "" if rung["memory_peak_mib"] is None else f", {rung['memory_peak_mib']:,.1f} MiB"
    return (
        f"{rung['clients']:>5} clients  {rung['answers_per_s']:>9,.1f} answers/s  {latency}  "
        f"{rung['offered']:,} offered, {rung['answered']:,} answered, {rung['refused']:,} refused, "
        f"{rung['failed']} failed, {contaminated}{memory}"
    )
