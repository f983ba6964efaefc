"""Ten thousand refusals in a row: each answered, and quickly; the memory does not grow."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import uvloop

from benchmarks.ladder import ledger, queries
from benchmarks.ladder.answers import TAIL, code_of, status_of, structured
from benchmarks.ladder.rung import SHOWN, quantiles
from benchmarks.ladder.wire import Client, connect
from benchmarks.overload.clients import exchange
from benchmarks.overload.figures import wrong
from benchmarks.overload.known import Known
from benchmarks.overload.site import Running

SAMPLES = 10  # of the memory, over all refusals
NO_TIME_MS = 50  # in which no call can be answered


@dataclass
class Row:
    """What came back."""

    milliseconds: list[float] = field(default_factory=list)
    codes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    resident_mib: list[float] = field(default_factory=list)


def refusals(site: Running, known: Known, count: int, busy_clients: int) -> dict[str, Any]:
    """`count` calls in a row on one connection, none of which can be answered: too large where the pool is
    too small, else with too little time, beside `busy_clients` whose calls are computed meanwhile."""
    before = ledger.settled(site.admin, 0)
    row, others = Row(), Counter[str]()
    uvloop.run(_ask(site, known, count, busy_clients, row, others, before["pages"]["total"]))
    asked = len(row.milliseconds) + others.total()
    after = ledger.settled(site.admin, before["received"] + asked)
    told = sum(after["refused"].values()) - sum(before["refused"].values())
    return {
        "asked": count,
        "refused": sum(row.codes.values()),
        "by_code": dict(row.codes),
        "refusal_ms": quantiles(row.milliseconds),
        "wrong": len(row.wrong),
        "wrong_refusals": row.wrong[:SHOWN],
        "resident_mib": row.resident_mib,
        "growth_of_the_second_half_mib": round(
            row.resident_mib[-1] - row.resident_mib[(len(row.resident_mib) - 1) // 2], 1
        ),
        "beside": dict(others),
        "received": after["received"] - before["received"],
        "accounted": after["received"] - before["received"] == asked and told >= sum(row.codes.values()),
        "at_rest": site.at_rest(),
    }


async def _ask(
    site: Running, known: Known, count: int, busy_clients: int, row: Row, others: Counter[str], pages: int
) -> None:
    context = site.endpoint.context()
    over = asyncio.Event()

    async def keep_busy(number: int) -> None:
        client = await connect(site.endpoint, context)
        while not over.is_set():
            number += 1
            arguments = known.arguments("short", number % len(known.texts["short"]))
            reply = await exchange(client, site.endpoint.call({**arguments, "timeout_ms": 60_000}))
            others[status_of(reply.body) or "failed"] += 1
        client.close()

    async with asyncio.TaskGroup() as group:
        for number in range(busy_clients):
            group.create_task(keep_busy(number))
        client = await connect(site.endpoint, context)
        try:
            await _in_a_row(site, client, _requests(site, bool(busy_clients)), count, row, pages)
        finally:
            over.set()
        client.close()


def _requests(site: Running, beside_others: bool) -> list[bytes]:
    """Of as many characters as a query may have; of the usual size and in a hurry where others are served."""
    real = queries.read(queries.QUERIES)
    if beside_others:
        return [site.endpoint.call({"query": text, "timeout_ms": NO_TIME_MS}) for text in real[:512]]
    return [
        site.endpoint.call({"query": " ".join(real[at : at + 60])[:4000], "limit": 20}) for at in range(64)
    ]


async def _in_a_row(
    site: Running, client: Client, requests: list[bytes], count: int, row: Row, pages: int
) -> None:
    """Raises ConnectionError or TimeoutError where one is not answered."""
    for number in range(count):
        reply = await exchange(client, requests[number % len(requests)])
        row.milliseconds.append((reply.ended - reply.sent) * 1000.0)
        if status_of(reply.body) != "refused":
            row.wrong.append(f"not refused: {reply.body[:200]!r}")
        else:
            row.codes[code_of(reply.body[-TAIL:])] += 1
            if found := wrong(structured(reply.body)["refusal"], pages):
                row.wrong.append(found)
        if (number + 1) * SAMPLES // count > len(row.resident_mib):
            row.resident_mib.append(site.resident_mib())
