"""The ledger: every call ends once, in one place, and the identity holds after each event."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_discovery.observe.accounting import Accounting
from mcp_discovery.observe.counts import Counts
from mcp_discovery.observe.ledger import BYTES, Ledger

STATUSES = ("matched", "partial", "no_match", "failed", "refused", "invalid", "cancelled")


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from(STATUSES), st.sampled_from(["queue_full", "deadline"]))
    )
)
def test_the_identity_holds_after_every_event(events: list[tuple[int, str, str]]) -> None:
    """Calls open and end in any order; the counts equal those of a plain list after each event, for the
    process itself and for whoever reads its memory."""
    memory = bytearray(BYTES)
    ledger = Accounting(ledger=Ledger(memory))
    open_calls: dict[int, Any] = {}
    ended: list[tuple[str, str]] = []
    for slot, status, code in events:
        if slot in open_calls:
            context, call, outcome = open_calls.pop(slot)
            call.end(*outcome)
            context.__exit__(None, None, None)
            ended.append(outcome)
        else:
            context = ledger.call()
            call = context.__enter__()
            open_calls[slot] = context, call, (status, code)
            if status != "invalid":
                call.begin()
        counts = ledger.counts()
        assert counts.surplus == 0
        assert Ledger(memory).counts() == counts
        tally = Counter(status for status, _ in ended)
        valid = sum(outcome[0] != "invalid" for _, _, outcome in open_calls.values())
        assert counts == Counts(
            received=len(ended) - tally["invalid"] + valid,
            answered=tally["matched"] + tally["partial"],
            no_match=tally["no_match"],
            refused=dict(Counter(code for status, code in ended if status == "refused")),
            failed=tally["failed"],
            cancelled=tally["cancelled"],
            in_flight=valid,
            invalid=tally["invalid"],
        )


def test_an_invalid_call_is_at_no_moment_among_those_received() -> None:
    memory = bytearray(BYTES)
    ledger = Accounting(ledger=Ledger(memory))
    with ledger.call() as call:
        assert Ledger(memory).counts() == Counts()
        call.end("invalid")
    assert Ledger(memory).counts() == Counts(invalid=1)


def test_a_call_that_began_and_is_called_invalid_is_a_fault(caplog: pytest.LogCaptureFixture) -> None:
    ledger = Accounting()
    with ledger.call() as call:
        call.begin()
        call.end("invalid")
    assert ledger.counts() == Counts(received=1, failed=1)
    assert "invalid after it had begun" in caplog.text


@pytest.mark.parametrize(
    ("error", "count"),
    [(asyncio.CancelledError, "cancelled"), (RuntimeError, "failed"), (KeyboardInterrupt, "failed")],
)
@pytest.mark.parametrize("has_begun", [False, True])
def test_what_raises_inside_ends_the_call(error: type[BaseException], count: str, has_begun: bool) -> None:
    ledger = Accounting()

    def fail() -> None:
        with ledger.call() as call:
            if has_begun:
                call.begin()
            raise error

    with pytest.raises(error):
        fail()
    counts = ledger.counts()
    assert (counts.received, getattr(counts, count), counts.in_flight) == (1, 1, 0)


def test_an_answer_that_ended_stays_answered_when_its_writing_is_cancelled() -> None:
    ledger = Accounting()

    def write_and_be_cancelled() -> None:
        with ledger.call() as call:
            call.end("matched")
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        write_and_be_cancelled()
    assert (ledger.counts().answered, ledger.counts().cancelled) == (1, 0)


def test_a_second_end_changes_nothing_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    ledger = Accounting()
    with ledger.call() as call:
        call.end("matched")
        call.end("failed")
    assert (ledger.counts().answered, ledger.counts().failed) == (1, 0)
    assert "ended twice" in caplog.text


def test_a_violation_is_logged_as_an_error(caplog: pytest.LogCaptureFixture) -> None:
    ledger = Accounting()
    ledger.ledger.begin()  # as if two calls were lost
    ledger.ledger.begin()
    with caplog.at_level(logging.ERROR):
        assert ledger.counts().surplus == 2
    assert "2 calls are unaccounted for" in caplog.text


def test_each_end_is_observed_with_its_duration() -> None:
    seen: list[tuple[str, str, float]] = []
    ledger = Accounting(observe=lambda *event: seen.append(event))
    with ledger.call() as call:
        call.end("refused", "queue_full")
    assert [(status, code) for status, code, _ in seen] == [("refused", "queue_full")]
    assert seen[0][2] >= 0


counts_strategy = st.builds(
    Counts,
    received=st.integers(0, 9),
    answered=st.integers(0, 9),
    refused=st.dictionaries(st.sampled_from("abc"), st.integers(0, 9)),
    in_flight=st.integers(0, 9),
)


@given(counts_strategy, counts_strategy)
def test_counts_of_processes_add_up(one: Counts, other: Counts) -> None:
    total = one + other
    assert total.surplus == one.surplus + other.surplus
    assert total.received == one.received + other.received
    assert sum(total.refused.values()) == sum(one.refused.values()) + sum(other.refused.values())
