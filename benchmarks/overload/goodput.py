"""Goodput, answers in time a second, from the peak to ten times the rate that can be sustained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.ladder.driver import Drivers, Settings
from benchmarks.ladder.rung import Shape, Site, climb, line
from benchmarks.overload.site import Running


@dataclass(frozen=True, slots=True)
class Rates:
    """`rungs` are closed loops, which find the peak; `factors` are multiples of it that arrive then, by
    Poisson, on at most `clients` connections."""

    rungs: Sequence[int]
    factors: Sequence[float]
    seconds: float
    clients: int


def goodput(site: Running, given: Rates) -> dict[str, Any]:
    """Every run; the peak is the best of them all, and the sustainable rate that of the closed loops."""
    with Drivers(Settings(site.endpoint), 1) as drivers:
        place = Site(drivers, site.admin, site.server.pid, site.trace)
        closed = [_rung(place, Shape(clients, given.seconds, calls=1)) for clients in given.rungs]
        sustainable = max(run["answers_per_s"] for run in closed)
        opened = [
            {"factor": factor, **_rung(place, Shape(given.clients, given.seconds, rate=factor * sustainable))}
            for factor in given.factors
        ]
    peak = max(run["answers_per_s"] for run in (*closed, *opened))
    return {
        "sustainable_per_s": sustainable,
        "peak_per_s": peak,
        "closed": closed,
        "open": opened,
        "of_the_peak": {f"{run['factor']:g}": round(run["answers_per_s"] / peak, 4) for run in opened}
        if peak
        else {},
        "failed": sum(run["failed"] for run in (*closed, *opened)),
        "imbalances": [run["imbalance"] for run in (*closed, *opened) if run["imbalance"]],
    }


def _rung(place: Site, shape: Shape) -> dict[str, Any]:
    rung, _ = climb(place, shape)
    offered = f"{shape.rate:,.1f}/s offered, " if shape.rate else ""
    print(f"    {offered}{line(rung)}", flush=True)
    return rung
