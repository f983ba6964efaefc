"""Hundreds of clients at once, a fifth of which hang up and a tenth of which have little time.

Also the same crowd, smaller and patient, while the server is stopped for a while by SIGSTOP.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import uvloop

from benchmarks.ladder import ledger
from benchmarks.ladder.answers import ANSWERS, Call
from benchmarks.ladder.rung import SHOWN, quantiles
from benchmarks.overload.clients import HUNG_UP, Habits, Person, Record, crowd
from benchmarks.overload.known import Known
from benchmarks.overload.site import Running

SIZES = {"short": 0.75, "wide": 0.15, "long": 0.1}
HANG_UP_SHARE, DEADLINE_SHARE = 0.2, 0.1
HANGS_UP_S = (0.002, 20.0)
SHORT_OF_TIME_MS = (20, 5_000)


@dataclass(frozen=True, slots=True)
class Crowd:
    """How many, for how long, and the timeout of those who have time."""

    clients: int
    seconds: float
    timeout_ms: int
    hang_up_share: float = HANG_UP_SHARE
    deadline_share: float = DEADLINE_SHARE
    seed: int = 0


def of_all_kinds(site: Running, known: Known, given: Crowd) -> dict[str, Any]:
    """The crowd and what came of it."""
    return _run(site, known, given, None)


def beside_a_stop(site: Running, known: Known, given: Crowd, stop_s: float) -> dict[str, Any]:
    """The same, and in the middle every process of the server is stopped for `stop_s` seconds."""
    held: dict[str, Any] = {}

    async def stop() -> None:
        await asyncio.sleep(given.seconds / 3)
        held["before"] = ledger.read(site.admin)
        for pid in site.pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(stop_s)
        finally:
            for pid in site.pids:
                os.kill(pid, signal.SIGCONT)

    result = _run(site, known, given, stop)
    return {**result, "stopped_s": stop_s, "in_flight_at_stop": held["before"]["in_flight"]}


def _run(site: Running, known: Known, given: Crowd, meanwhile: Any) -> dict[str, Any]:
    before = ledger.settled(site.admin, 0)
    record = Record()
    context = site.endpoint.context()
    people = [
        Person(
            site.endpoint,
            context,
            known,
            _habits(number, given),
            before["pages"]["total"],
            record,
            random.Random(f"{given.seed} {number}"),
        )
        for number in range(given.clients)
    ]
    site.trace.take()
    uvloop.run(crowd(people, given.seconds, meanwhile))
    hung_up = sum(call.status == HUNG_UP for call in record.calls)
    after = ledger.settled(site.admin, before["received"] + len(record.calls) - hung_up)
    return {
        "clients": given.clients,
        "seconds": given.seconds,
        "timeout_ms": given.timeout_ms,
        **_counts(record),
        "imbalance": _imbalance(before, after, record.calls),
        "account": _difference(before, after),
        "at_rest": site.at_rest(),
        **site.memory(),
    }


def _habits(number: int, given: Crowd) -> Habits:
    """Of the client `number`: the kinds are spread evenly over the numbers."""
    place = (number + 0.5) * 0.6180339887 % 1.0
    time_ms = (given.timeout_ms, given.timeout_ms)
    if place < given.hang_up_share:
        return Habits(SIZES, time_ms, HANGS_UP_S)
    if place < given.hang_up_share + given.deadline_share:
        return Habits(SIZES, SHORT_OF_TIME_MS)
    return Habits(SIZES, time_ms)


def _counts(record: Record) -> dict[str, Any]:
    calls = record.calls
    failures = [call.reason for call in calls if call.status == "failed"] + record.unconnected
    differing = [str(call.differs) for call in calls if call.differs]
    answers = [call for call in calls if call.status in ANSWERS]
    return {
        "calls": len(calls),
        "answered": len(answers),
        "answered_by_size": dict(Counter(call.kind for call in answers)),
        "refused": sum(call.status == "refused" for call in calls),
        "refused_by_code": dict(Counter(call.code for call in calls if call.status == "refused")),
        "hung_up": sum(call.status == HUNG_UP for call in calls),
        "failed": len(failures),
        "failures": list(dict.fromkeys(failures))[:SHOWN],
        "compared": record.compared,
        "contaminated": len(differing),
        "contaminations": list(dict.fromkeys(differing))[:SHOWN],
        "refusals_checked": record.figures_checked,
        "refusals_wrong": len(record.wrong_figures),
        "wrong_refusals": record.wrong_figures[:SHOWN],
        "answer_ms": quantiles(call.latency_ms for call in answers),
        "refusal_ms": quantiles(call.latency_ms for call in calls if call.status == "refused"),
        "after_its_timeout_ms": quantiles(max(0.0, late) for late in record.late_ms),
    }


def _imbalance(before: ledger.Account, after: ledger.Account, calls: Sequence[Call]) -> str:
    """What does not add up; "" where all does. A client that hung up does not know how its call ended."""
    told = [call._replace(status="failed") if call.status == HUNG_UP else call for call in calls]
    found = ledger.imbalance(before, after, told)
    if found:
        return found
    hung_up = sum(call.status == HUNG_UP for call in calls)
    for name, most in (("failed", 0), ("invalid", 0), ("cancelled", hung_up)):
        if after[name] - before[name] > most:
            return f"the server counts {after[name] - before[name]:,} calls {name}, at most {most:,} can be"
    return ""


def _difference(before: ledger.Account, after: ledger.Account) -> dict[str, Any]:
    """The account of the run alone, and the pages at its end."""
    names = ("received", "answered", "no_match", "failed", "cancelled", "in_flight", "invalid")
    codes = {
        code: after["refused"].get(code, 0) - before["refused"].get(code, 0) for code in after["refused"]
    }
    return {**{name: after[name] - before[name] for name in names}, "refused": codes, "pages": after["pages"]}
