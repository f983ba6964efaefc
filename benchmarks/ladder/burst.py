"""The burst: all clients connect at one moment and ask at once, then ask again on the open connections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.ladder.answers import Call
from benchmarks.ladder.conditions import Rung
from benchmarks.ladder.driver import ConnectAndAsk, Disconnect, Ran, Run, begin_soon
from benchmarks.ladder.rung import Site, Window, quantiles, summary

POINTS = 100  # of a time line


def burst(site: Site, clients: int, rounds: int) -> dict[str, Any]:
    """One burst from nothing, then `rounds` on connections that are open, handshakes apart. Each round is
    a rung of the result; `lowest_answers_per_s` is of the slowest of those on open connections."""
    cold = _cold(site, clients)
    warm = [_warm(site, clients, number) for number in range(rounds)]
    site.drivers.all(Disconnect())
    return {
        "cold": cold,
        "warm": warm,
        "lowest_answers_per_s": min((rung["answers_per_s"] for rung in warm), default=None),
    }


def _cold(site: Site, clients: int) -> Rung:
    if site.trace is not None:
        site.trace.mark(f"burst of {clients}")
    window = Window.open(site)
    begin = begin_soon()
    runs = site.drivers.each([ConnectAndAsk(begin, share) for share in site.drivers.share(clients)])
    calls = [call for ran in runs for call in ran.calls]
    rung = _to_the_last(clients, runs, calls) | window.close(site, calls)
    failures = [sentence for ran in runs for sentence in ran.failures]
    shakes = [(began - begin, done - begin) for ran in runs for began, done in ran.handshakes]
    return rung | {
        "failed": rung["failed"] + len(failures),
        "failures": rung["failures"] + list(dict.fromkeys(failures)),
        "handshake_ms": quantiles((done - began) * 1e3 for began, done in shakes),
        "last_handshake_s": round(max((done for _, done in shakes), default=0.0), 3),
        "time_line": {
            "handshakes": _cumulative([done for _, done in shakes]),
            "answers": _cumulative([call.ended - begin for call in calls]),
        },
    }


def _warm(site: Site, clients: int, number: int) -> Rung:
    if site.trace is not None:
        site.trace.mark(f"burst of {clients}, again {number + 1}")
    window = Window.open(site)
    begin = begin_soon()
    runs = site.drivers.all(Run("burst", begin))
    calls = [call for ran in runs for call in ran.calls]
    line = {"time_line": {"answers": _cumulative([call.ended - begin for call in calls])}}
    return _to_the_last(clients, runs, calls) | window.close(site, calls) | line


def _to_the_last(clients: int, runs: Sequence[Ran], calls: Sequence[Call]) -> Rung:
    """A summary whose rate counts all answers, from the common beginning to the last."""
    last = max((call.ended for call in calls), default=max(ran.began for ran in runs) + 1.0)
    ended = [Ran(ran.calls, [], [], ran.offered, ran.began, last, ran.cpu_s, ran.wall_s) for ran in runs]
    return summary(clients, ended, calls)


def _cumulative(moments: Sequence[float]) -> list[tuple[float, int]]:
    """(seconds, how many by then), in at most `POINTS` points."""
    ordered = sorted(moments)
    step = max(1, len(ordered) // POINTS)
    counts = [*range(step, len(ordered), step), len(ordered)] if ordered else []
    return [(round(ordered[count - 1], 3), count) for count in counts]
