"""What stops a ladder, and when the accounts balance."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.ladder import ledger
from benchmarks.ladder.answers import Call
from benchmarks.ladder.conditions import Bounds, first_abort, without_gain
from benchmarks.ladder.driver import Ran
from benchmarks.ladder.rung import quantiles, summary
from benchmarks.mixed import sustained_rate, verdict

GOOD: dict[str, Any] = {
    "clients": 4, "failed": 0, "failures": [], "contaminated": 0, "contaminations": [], "imbalance": "",
    "memory_peak_mib": 2700.0, "p99_ms": 900.0, "neighbour": {"step_p99_ms": 40.0}, "answered": 9,
    "refused": 0,
}  # fmt: skip
BOUNDS = Bounds(p99_ms=1000.0, allowance_mib=2740.0, neighbour_p99_ratio=2.0, neighbour_alone_p99_ms=25.0)


def call(status: str = "matched", code: str = "", **more: Any) -> Call:
    fields: dict[str, Any] = {
        "kind": "short", "query": 0, "due": 0.0, "sent": 0.0, "ended": 1.0, "status": status, "code": code,
        "reason": "it broke" if status == "failed" else "", "queue_ms": 0.0, "retrieve_ms": 0.0,
        "engine_ms": 0.0, "total_ms": 0.0, "differs": None,
    }  # fmt: skip
    return Call(**fields | more)


def test_a_rung_that_holds_stops_nothing() -> None:
    assert first_abort(GOOD, BOUNDS) is None
    unseen = GOOD | {"contaminated": None, "memory_peak_mib": None, "neighbour": None, "imbalance": None}
    assert first_abort(unseen, BOUNDS) is None


@pytest.mark.parametrize(
    ("condition", "broken", "said"),
    [
        ("failed", {"failed": 1, "failures": ["it broke"]}, "it broke"),
        ("contaminated", {"contaminated": 2, "contaminations": ["b in place of a"]}, "b in place of a"),
        ("accounting", {"imbalance": "one is missing"}, "one is missing"),
        ("footprint", {"memory_peak_mib": 2740.5}, "2,740.5 MiB"),
        ("p99", {"p99_ms": 1000.1}, "bound of 1,000 ms"),
        ("neighbour", {"neighbour": {"step_p99_ms": 51.0}}, "bound of 50.0 ms"),
        ("answers", {"answered": 0}, "nothing was answered"),
    ],
)
def test_each_condition_stops_and_says_why(condition: str, broken: dict[str, Any], said: str) -> None:
    abort = first_abort(GOOD | broken, BOUNDS)
    assert abort is not None
    assert (abort.condition, abort.clients) == (condition, 4)
    assert said in abort.sentence


def test_the_first_condition_is_the_one_that_is_named() -> None:
    abort = first_abort(GOOD | {"failed": 1, "imbalance": "one is missing", "p99_ms": 1e6}, BOUNDS)
    assert abort is not None
    assert abort.condition == "failed"


def test_two_rungs_without_gain_are_told() -> None:
    rungs = [{"clients": 2**i, "answers_per_s": rate} for i, rate in enumerate((10.0, 20.0, 21.0, 20.2))]
    (told,) = without_gain(rungs)
    assert told.startswith("8 clients gained nothing over 2")


ENDINGS = st.sampled_from(
    [("matched", ""), ("partial", ""), ("no_match", ""), ("refused", "deadline"), ("refused", "queue_full")]
)


def account(calls: list[Call], base: int = 0) -> ledger.Account:
    refused: dict[str, int] = {}
    for each in calls:
        if each.status == "refused":
            refused[each.code] = refused.get(each.code, 0) + 1
    answered = sum(each.status in ("matched", "partial") for each in calls)
    return {
        "received": len(calls) + base,
        "answered": answered + base,
        "no_match": sum(each.status == "no_match" for each in calls),
        "refused": refused, "failed": 0, "cancelled": 0, "in_flight": 0, "invalid": 0,
        "pages": {"free": 6, "held": 0, "cached": 4, "total": 10},
    }  # fmt: skip


@given(st.lists(ENDINGS, max_size=30), st.integers(0, 99))
def test_accounts_of_what_was_sent_balance(endings: list[tuple[str, str]], earlier: int) -> None:
    calls = [call(*ending) for ending in endings]
    assert ledger.imbalance(account([], earlier), account(calls, earlier), calls) == ""


@given(st.lists(ENDINGS, min_size=1, max_size=30), st.data())
def test_one_call_in_the_wrong_place_is_found(endings: list[tuple[str, str]], data: st.DataObject) -> None:
    calls = [call(*ending) for ending in endings]
    after = account(calls)
    moved = data.draw(
        st.sampled_from(["received", "answered", "no_match", "failed", "cancelled", "in_flight"])
    )
    after[moved] += data.draw(st.sampled_from([-1, 1]))
    assert ledger.imbalance(account([]), after, calls)


def test_a_call_counted_as_another_is_found() -> None:
    """The identity holds, but the server tells another story than the clients."""
    calls = [call(), call("no_match")]
    assert "clients saw 1 calls" in ledger.imbalance(account([]), account([call(), call()]), calls)
    assert "3" in ledger.imbalance(account([]), account([*calls, call()]), calls)


@pytest.mark.parametrize("pages", [{"free": 5}, {"held": 1}, {"held": 1, "free": 5}])
def test_a_page_that_is_lost_or_kept_is_found(pages: dict[str, int]) -> None:
    after = account([])
    after["pages"] |= pages
    assert "pages" in ledger.imbalance(account([]), after, [])


def test_a_call_without_an_answer_may_have_ended_in_any_way() -> None:
    lost = call("failed")
    for ending in (call(), call("no_match"), call("refused", "deadline")):
        assert ledger.imbalance(account([]), account([ending]), [lost]) == ""
    assert ledger.imbalance(account([]), account([]), [lost]) == ""
    assert ledger.imbalance(account([]), account([call(), call()]), [lost])


def test_settled_waits_until_nothing_is_in_flight() -> None:
    busy = account([call()]) | {"in_flight": 1}
    told = iter([busy, account([]), account([call()])])
    assert ledger.settled("", 1, fetch=lambda admin: next(told)) == account([call()])


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300))
def test_quantiles_are_values_with_the_right_share_below(values: list[float]) -> None:
    found = quantiles(values)
    assert found is not None
    for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
        rounded = [round(value, 2) for value in values]
        assert found[name] in rounded
        assert sum(value <= found[name] for value in rounded) >= math.floor(share * len(values))
    assert quantiles([]) is None
    assert quantiles(range(1000, 0, -1)) == {"p50": 500, "p99": 990, "max": 1000}


def test_a_summary_counts_every_call_and_rates_only_its_window() -> None:
    calls = [
        call(ended=0.5), call("no_match", ended=1.0), call(ended=3.0), call("refused", "deadline", ended=0.1),
        call("failed", ended=0.2), call(differs="", ended=0.6), call(differs="b in place of a", ended=0.7),
    ]  # fmt: skip
    rung = summary(2, [Ran(calls, offered=8, began=0.0, stopped=2.0)], calls)
    assert (rung["offered"], rung["unsent"], rung["answered"], rung["no_match"]) == (8, 1, 5, 1)
    assert (rung["refused"], rung["refused_by_code"], rung["failed"]) == (1, {"deadline": 1}, 1)
    assert (rung["compared"], rung["contaminated"]) == (2, 1)
    assert rung["answers_per_s"] == 2.0  # four answers in two seconds; the fifth came later
    assert (rung["p50_ms"], rung["p99_ms"]) == (700.0, 3000.0)


def test_a_verdict_names_what_grew_most() -> None:
    def short(**p99: float) -> dict[str, Any]:
        parts = {name: {"p99": p99.get(name, 1.0)} for name in ("queue", "retrieve", "engine", "outside")}
        return {"short": {"latency_ms": {"p99": sum(p99.values())}, "parts_ms": parts}}

    found = verdict(short(queue=30.0, engine=20.0), short(queue=5.0, engine=15.0))
    assert found is not None
    assert found["short_p99_ratio"] == 2.5
    assert found["cause"] == "waiting for admission"


def test_the_offered_rate_leaves_room_for_the_long_ones() -> None:
    assert sustained_rate(230.0) == pytest.approx(80.0)
