"""Mixed traffic: Poisson arrivals of which a share is long, and what the short ones pay for it.

A long request has 4,000 characters and asks for 20 tools, so that 64 candidates are scored with 256 tokens
of query: about 14 times the work of a short one. The run without long requests comes first: its p99 is
that of short requests alone, at the same offered rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.ladder.answers import ANSWERS, Call
from benchmarks.ladder.conditions import Abort, Bounds, first_abort
from benchmarks.ladder.rung import Shape, Site, climb, line, parts, quantiles
from benchmarks.report import Target

LONG_WORK = 14.0  # of one long request, in short ones
LONG_WORK_ON_CPU = 17.0  # 32 rows of 265 tokens and a query of 256, to 16 of 30 and one of 30
HEADROOM = 0.8  # of what the ladder reached
MEASURED_SHARE = 0.1  # what the targets are about
CAUSES = {
    "queue": "waiting for admission",
    "retrieve": "finding candidates",
    "engine": "running in the engine",
    "outside": "TLS, HTTP, MCP and waiting for the event loop",
}


@dataclass(frozen=True, slots=True)
class Traffic:
    """What to offer: `rate` arrivals a second in each run."""

    clients: int
    rate: float
    shares: Sequence[float]
    seconds: float
    long_seconds: float = 0.0  # one more run of this length with `MEASURED_SHARE`; 0: none

    def runs(self) -> list[tuple[float, float]]:
        """(share, seconds), without long ones first."""
        shares = sorted({0.0, *self.shares})
        return [
            *((share, self.seconds) for share in shares),
            *([(MEASURED_SHARE, self.long_seconds)] if self.long_seconds else []),
        ]


def sustained_rate(best_answers_per_s: float, long_work: float = LONG_WORK) -> float:
    """What is offered where nobody says: the ladder's best rate, less headroom, less what 10% of long
    requests cost more than short ones."""
    return HEADROOM * best_answers_per_s / (1.0 + MEASURED_SHARE * (long_work - 1.0))


def mixed(site: Site, traffic: Traffic, bounds: Bounds) -> tuple[dict[str, Any], Abort | None]:
    """All runs, or those until the first that a condition stopped."""
    runs: list[dict[str, Any]] = []
    abort = None
    for share, seconds in traffic.runs():
        shape = Shape(traffic.clients, seconds, rate=traffic.rate, long_share=share, most_s=seconds + 60.0)
        rung, calls = climb(site, shape)
        run = {"long_share": share, "offered_per_s": traffic.rate, **rung, **by_kind(calls)}
        run["verdict"] = verdict(run, runs[0]) if runs else None
        runs.append(run)
        print(f"{share:.0%} long: {line(rung)}", flush=True)
        print(f"    {run['verdict'] or 'alone: what the others are held against'}", flush=True)
        abort = first_abort(rung, bounds)
        if abort is not None:
            break
    return {"rate": traffic.rate, "clients": traffic.clients, "runs": runs}, abort


def by_kind(calls: Sequence[Call]) -> dict[str, Any]:
    """Short and long requests apart."""
    found = {}
    for kind in ("short", "long"):
        mine = [call for call in calls if call.kind == kind]
        answers = [call for call in mine if call.status in ANSWERS]
        found[kind] = {
            "sent": len(mine),
            "answered": len(answers),
            "refused": sum(call.status == "refused" for call in mine),
            "failed": sum(call.status == "failed" for call in mine),
            "latency_ms": quantiles(call.latency_ms for call in answers),
            "parts_ms": parts(answers),
        }
    return found


def verdict(run: dict[str, Any], alone: dict[str, Any]) -> dict[str, Any] | None:
    """The short ones' p99 against the same alone, and which part of their way grew most; None where
    either has no answers."""
    here, there = run["short"]["latency_ms"], alone["short"]["latency_ms"]
    if here is None or there is None:
        return None
    growth = {
        part: round(run["short"]["parts_ms"][part]["p99"] - alone["short"]["parts_ms"][part]["p99"], 2)
        for part in CAUSES
    }
    most = max(growth, key=lambda part: growth[part])
    return {
        "short_p99_ratio": round(here["p99"] / max(there["p99"], 1e-9), 3),
        "p99_growth_ms": growth,
        "cause": CAUSES[most] if growth[most] > 0 else "nothing grew",
    }


def targets(result: dict[str, Any], on_card: bool) -> list[Target]:
    """Where a run with the measured share is there; the longest such run counts."""
    runs = [run for run in result["runs"] if run["long_share"] == MEASURED_SHARE and run["verdict"]]
    if not runs:
        return []
    run = max(runs, key=lambda each: each["seconds"])
    ratio = run["verdict"]["short_p99_ratio"]
    if not on_card:
        return [Target("mixed.cpu_short_p99_ratio", ratio, "at most")]
    return [
        Target("mixed.answers_per_s", run["answers_per_s"], "at least"),
        Target("mixed.short_p99_ratio", ratio, "at most"),
    ]
