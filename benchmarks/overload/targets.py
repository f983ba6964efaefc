"""What the findings of the parts say about the targets.

A target is stated where the part that it is about came to its end and measured it. Failures, wrong refusals
and accounts are counted over all parts that did.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.mixed import targets as mixed_targets
from benchmarks.report import Target

TENFOLD = 10.0


def targets(results: Mapping[str, Any]) -> list[Target]:
    """Of `results` by part, which has no part that broke off."""
    found: list[Target] = []
    if "crowd" in results:
        found += _crowd(results)
    if "goodput" in results:
        found += _goodput(results["goodput"])
    if "stop" in results:
        stop = results["stop"]
        lost = stop["failed"] + stop["contaminated"] + unbalanced(stop)
        found.append(Target("overload.stop_s", stop["stopped_s"], "at least"))
        found.append(Target("overload.lost_by_a_stop", lost, "at most"))
    if "refusals" in results:
        found += _refusals(results["refusals"])
    if "mixed" in results:
        found += mixed_targets(results["mixed"], on_card=False)
    return found


def unbalanced(found: Mapping[str, Any]) -> int:
    """Whether something does not add up, or is still held."""
    return int(bool(found["imbalance"]) or any(found["at_rest"].values()))


def _crowd(results: Mapping[str, Any]) -> Iterator[Target]:
    crowds = results["crowd"]
    yield Target("overload.clients", min(each["clients"] for each in crowds), "at least")
    yield Target("overload.failed", sum(_failures(results)), "at most")
    if all(each["compared"] for each in crowds):  # else nothing could have been found
        yield Target("overload.contaminated", sum(each["contaminated"] for each in crowds), "at most")
    if all(each["refusals_checked"] for each in crowds):
        yield Target("overload.refusals_wrong", sum(_wrong_refusals(results)), "at most")
    yield Target("overload.accounts_wrong", sum(_wrong_accounts(results)), "at most")


def _failures(results: Mapping[str, Any]) -> Iterator[int]:
    yield from (each["failed"] for each in results["crowd"])
    if "goodput" in results:
        yield results["goodput"]["failed"]
    yield from (each["beside"].get("failed", 0) for each in results.get("refusals", {}).values())
    yield from (run["failed"] for run in results.get("mixed", {}).get("runs", ()))


def _wrong_refusals(results: Mapping[str, Any]) -> Iterator[int]:
    yield from (each["refusals_wrong"] for each in results["crowd"])
    yield from (each["wrong"] for each in results.get("refusals", {}).values())


def _wrong_accounts(results: Mapping[str, Any]) -> Iterator[int]:
    yield from map(unbalanced, results["crowd"])
    if "goodput" in results:
        yield len(results["goodput"]["imbalances"])
    for each in results.get("refusals", {}).values():
        yield int(not each["accounted"] or any(each["at_rest"].values()))
    yield from (int(bool(run["imbalance"])) for run in results.get("mixed", {}).get("runs", ()))


def _goodput(found: Mapping[str, Any]) -> Iterator[Target]:
    """A run that a failure ended early says nothing of a whole one."""
    whole = {run["factor"] for run in found["open"] if not run["failed"]}
    share = found["of_the_peak"].get(f"{TENFOLD:g}")
    if TENFOLD in whole and share is not None:
        yield Target("overload.goodput_at_10x", share, "at least")


def _refusals(found: Mapping[str, Any]) -> Iterator[Target]:
    rows = found.values()
    yield Target("overload.refusals_in_a_row", min(each["refused"] for each in rows), "at least")
    if all(each["refusal_ms"] for each in rows):
        yield Target("overload.refusal_p99_ms", max(each["refusal_ms"]["p99"] for each in rows), "at most")
        yield Target("overload.refusal_max_ms", max(each["refusal_ms"]["max"] for each in rows), "at most")
