"""What the benchmark of overload holds against the numbers it is given."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.ladder.answers import Call
from benchmarks.overload.clients import HUNG_UP
from benchmarks.overload.crowd import _imbalance
from benchmarks.overload.fairness import jain
from benchmarks.overload.figures import wrong

SHORT: dict[str, Any] = {
    "code": "pages_short",
    "message": "The request needs 1,025 pages, 1,000 free of 2,000: 25 short, and they do not come in time.",
    "pages_needed": 1025,
    "pages_free": 1000,
    "pages_total": 2000,
    "page_deficit": 25,
    "page_tokens": 16,
    "queue_depth": 3,
    "retry_after_ms": 40,
}
TOO_LARGE = SHORT | {
    "code": "request_too_large",
    "pages_needed": 2007,
    "page_deficit": 7,
    "retry_after_ms": None,
    "message": "The request needs 2,007 pages and the engine has 2,000: 7 short; it can never run here.",
}


@pytest.mark.parametrize("right", [SHORT, TOO_LARGE, SHORT | {"code": "not_ready", "pages_total": 0}])
def test_numbers_that_agree_are_left_alone(right: dict[str, Any]) -> None:
    assert wrong(right, 2000) == ""


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"page_deficit": 24}, "a deficit that is not"),
        ({"page_deficit": -25}, "a deficit that is not"),
        ({"pages_total": 1999}, "another pool"),
        ({"pages_free": 2001, "page_deficit": 0}, "more free pages"),
        ({"pages_free": 1025, "page_deficit": 0}, "pages short without a deficit"),
        ({"queue_depth": -1}, "a queue of negative length"),
        ({"retry_after_ms": 0}, "a time to retry"),
        ({"message": "The request does not fit."}, "a message without"),
        ({"code": "busy"}, "an unknown code"),
    ],
)
def test_a_number_that_cannot_be_is_named(change: dict[str, Any], sentence: str) -> None:
    assert wrong(SHORT | change, 2000).startswith(sentence)


def test_what_can_never_run_is_not_to_be_tried_again() -> None:
    assert wrong(TOO_LARGE | {"retry_after_ms": 5}, 2000).startswith("a time to retry what can never run")


def test_jains_index() -> None:
    assert jain([3, 3, 3]) == 1.0
    assert jain([9, 0, 0]) == pytest.approx(1 / 3)
    assert jain([0, 0]) == 1.0


def account(**counts: int) -> dict[str, Any]:
    zero = dict.fromkeys(
        ("received", "answered", "no_match", "failed", "cancelled", "in_flight", "invalid"), 0
    )
    return {**zero, "refused": {}, "pages": {"free": 5, "held": 0, "cached": 1, "total": 6}, **counts}


def call(status: str) -> Call:
    return Call("short", 0, 0.0, 0.0, 1.0, status, "", "", 0.0, 0.0, 0.0, 0.0, None)


def test_a_client_that_hung_up_does_not_know_how_its_call_ended() -> None:
    calls = [call("matched"), call(HUNG_UP)]
    assert _imbalance(account(), account(received=2, answered=2), calls) == ""
    assert _imbalance(account(), account(received=2, answered=1, cancelled=1), calls) == ""
    assert _imbalance(account(), account(received=1, answered=1), calls) == ""


@pytest.mark.parametrize(
    ("after", "sentence"),
    [
        (account(received=2, answered=1), "accounts for 1"),
        (account(received=2, answered=0, cancelled=2), "answered"),
        (account(received=2, answered=1, failed=1), "1 calls failed"),
        (account(received=3, answered=2, cancelled=1), "the server received 3"),
    ],
)
def test_accounts_that_do_not_agree_are_found(after: dict[str, Any], sentence: str) -> None:
    assert sentence in _imbalance(account(), after, [call("matched"), call(HUNG_UP)])
