"""The server's accounts before and after a run, and whether they agree with what was sent."""

from __future__ import annotations

import json
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.ladder.answers import Call

Account = dict[str, Any]
"""The object of `/accounting`."""

ENDED = ("answered", "no_match", "failed", "cancelled")
SETTLE_S = 10.0


def read(admin: str) -> Account:
    """Raises OSError where the server does not answer."""
    with urllib.request.urlopen(f"{admin}/accounting", timeout=10.0) as reply:
        account: Account = json.load(reply)
    return account


def settled(admin: str, received: int, *, fetch: Callable[[str], Account] = read) -> Account:
    """The account once nothing is in flight and `received` calls are in it, or the last one before
    `SETTLE_S` ended."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        account = fetch(admin)
        if account["in_flight"] == 0 and account["received"] >= received and account["pages"]["held"] == 0:
            return account
        if time.monotonic() > deadline:
            return account
        time.sleep(0.05)


def imbalance(before: Account, after: Account, calls: Sequence[Call]) -> str:
    """What does not add up, as a sentence; "" where all does. `calls` are all that were sent between the
    two accounts, which were taken with nothing in flight."""
    for account in (before, after):
        ended = sum(account[name] for name in ENDED) + sum(account["refused"].values())
        if account["received"] != ended + account["in_flight"]:
            return f"the server received {account['received']:,} calls and accounts for {ended:,}"
        pages = account["pages"]
        if pages["free"] + pages["held"] + pages["cached"] != pages["total"]:
            return f"of {pages['total']:,} pages {_sum(pages):,} are accounted for"
    if after["in_flight"] or after["pages"]["held"]:
        return f"{after['in_flight']} calls and {after['pages']['held']} pages are held after the last answer"
    return _difference(before, after, calls)


def _sum(pages: dict[str, int]) -> int:
    return pages["free"] + pages["held"] + pages["cached"]


def _difference(before: Account, after: Account, calls: Sequence[Call]) -> str:
    """The server's counts against the clients'. A call without an answer may have ended in any way."""
    lost = sum(call.status == "failed" and not call.code for call in calls)
    seen = Counter(_column(call) for call in calls if call.status != "failed")
    told = {name: after[name] - before[name] for name in ("answered", "no_match")}
    codes = {*before["refused"], *after["refused"]}
    told |= {
        f"refused: {code}": after["refused"].get(code, 0) - before["refused"].get(code, 0) for code in codes
    }
    received = after["received"] - before["received"]
    if not len(calls) - lost <= received <= len(calls):
        return f"{len(calls):,} calls were sent and the server received {received:,}"
    for name in sorted({*told, *seen}):
        if not seen[name] <= told.get(name, 0) <= seen[name] + lost:
            return f"clients saw {seen[name]:,} calls {name} and the server {told.get(name, 0):,}"
    return ""


def _column(call: Call) -> str:
    """The account's column of a call."""
    if call.status == "refused":
        return f"refused: {call.code}"
    return "no_match" if call.status == "no_match" else "answered"
