"""Whether the benchmark of kills finds what is wrong with a round, and says what it found."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import kills_page
from benchmarks.kills.__main__ import of_kind, targets
from benchmarks.kills.driver import CLOSED, UNANSWERED, Conversation, Ended, Held, Seen, end_of
from benchmarks.kills.judge import LOST, NOT_READY, Books, Kind, Round, summary, unbalanced, violations
from benchmarks.ladder.wire import Client
from benchmarks.marked import replaced

KILLED, READY = 10.0, 15.0
NAMES = ("answered", "no_match", "failed", "cancelled", "in_flight", "invalid")
PAGES = {"free": 90, "held": 0, "cached": 10, "total": 100}
ENDS = ("matched", "partial", "no_match", LOST, NOT_READY, "refused: deadline")


def account(columns: Counter[str], **more: Any) -> dict[str, Any]:
    """That holds exactly these calls by their column."""
    refused = {
        name.removeprefix("refused: "): count for name, count in columns.items() if name.startswith("ref")
    }
    told = {name: columns[name] for name in NAMES}
    return {"received": columns.total(), **told, "refused": refused, "pages": PAGES} | more


def column(end: str) -> str:
    return {"matched": "answered", "partial": "answered", LOST: "failed"}.get(end, end)


def books(calls: list[Ended], closed_as: str = "cancelled", **more: Any) -> Books:
    """Of a server that has counted every call as its client saw it."""
    counted = Counter(closed_as if call.end == CLOSED else column(call.end) for call in calls)
    after = account(counted, **more)
    return Books(account(Counter()), after, {"front-end 1": counted.total(), "the engine process": 0})


def round_of(kind: Kind, **more: Any) -> Round:
    """A round in which all went well: two connections, of which a front-end or parent that was killed held
    the first, or both."""
    lost = {"engine": (None, None), "front-end": (10.1, None), "parent": (10.1, 10.1)}[kind]
    held = [Held(5001, 1.0, lost[0]), Held(5002, 1.0, lost[1])]
    ends = {"engine": (LOST, LOST), "front-end": (CLOSED, "matched"), "parent": (CLOSED, CLOSED)}[kind]
    calls = [
        Ended(0, 8.0, 9.0, "matched"),
        Ended(0, 9.5, 10.05, ends[0]),
        Ended(1, 9.5, 10.05, ends[1]),
    ]
    if kind != "parent":
        held.append(Held(5003, 10.2))
        calls += [
            Ended(1, 11.0, 11.1, NOT_READY),
            Ended(1, 15.5, 16.0, "matched"),
            Ended(2, 15.5, 16.5, "no_match"),
        ]
    victims = {"engine": frozenset[int](), "front-end": frozenset({5001}), "parent": frozenset({5001, 5002})}
    made = Round(
        kind, "it", KILLED, victims[kind], Seen(calls, held), None if kind == "parent" else READY,
        gone=10.2, books=None if kind == "parent" else books(calls),
    )  # fmt: skip
    return replace(made, **more)


def with_call(found: Round, end: str, place: int = 1) -> Round:
    """One more call in flight at the kill, which the server has counted in the same way."""
    calls = [*found.seen.calls, Ended(place, 9.9, 10.2, end)]
    seen = Seen(calls, found.seen.connections, found.seen.strays)
    return replace(found, seen=seen, books=books(calls) if found.books else None)


@pytest.mark.parametrize("kind", ["engine", "front-end", "parent"])
def test_nothing_is_wrong_where_every_call_ended_and_is_counted(kind: Kind) -> None:
    found = summary(round_of(kind))
    assert found["violations"] == []
    assert found["last_error_ms"] == 50.0
    assert found["in_flight"] == {"engine": 2, "front-end": 1, "parent": 2}[kind]
    assert (found["connections_of_others"], found["connections_of_others_lost"]) == (
        {"engine": 2, "front-end": 1, "parent": 0}[kind],
        0,
    )


def test_the_first_answer_is_that_of_a_client_that_lost_its_connection() -> None:
    assert summary(round_of("front-end"))["first_answer_ms"] == 6500.0
    assert summary(round_of("engine"))["first_answer_ms"] == 6000.0
    assert summary(round_of("parent"))["first_answer_ms"] is None


@pytest.mark.parametrize("kind", ["engine", "front-end", "parent"])
def test_a_call_without_an_end_is_found(kind: Kind) -> None:
    found = with_call(round_of(kind), UNANSWERED)
    if found.books:  # counted as if it had been cut off
        found = replace(
            found,
            books=books(
                [call._replace(end=CLOSED) if call.end == UNANSWERED else call for call in found.seen.calls]
            ),
        )
    assert list(violations(found)) == ["1 calls did not end"]


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (with_call(round_of("engine"), "no result: b'HTTP/1.1 500'"), "ended with no result"),
        (with_call(round_of("engine"), "failed: internal"), "1 calls ended as failed: internal"),
        (with_call(round_of("front-end"), LOST), "1 calls ended as failed: engine_lost"),
        (replace(round_of("front-end"), ready=None), "was not ready again"),
        (replace(round_of("engine"), ready=17.0), "no call was answered after"),
        (replace(round_of("parent"), left=[7]), "1 processes outlived"),
        (replace(round_of("parent"), victims=frozenset({5001})), "1 connections were lost"),
        (replace(round_of("front-end"), victims=frozenset({5009})), "no call was in flight"),
        (replace(round_of("engine"), seen=Seen([], [], 1)), "1 answers came for no call"),
        (replace(round_of("engine"), killed=8.5), "told that the engine was lost"),
        (
            replace(round_of("engine"), seen=Seen(round_of("engine").seen.calls, [Held(5001, 1.0, 10.5)])),
            "1 connections were lost",
        ),
        (
            replace(
                round_of("parent"),
                seen=Seen([*round_of("parent").seen.calls, Ended(2, 11.0, 12.0, "matched")], [
                    *round_of("parent").seen.connections, Held(5003, 10.9),
                ]),
            ),
            "1 calls were answered after",
        ),
    ],
)  # fmt: skip
def test_a_promise_that_was_broken_is_named(found: Round, sentence: str) -> None:
    assert any(sentence in each for each in violations(found)), list(violations(found))


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"received": 7}, "accounts for 6"),
        ({"in_flight": 1, "received": 7}, "1 calls and 0 pages are held"),
        ({"pages": PAGES | {"held": 5, "free": 85}}, "0 calls and 5 pages are held"),
        ({"pages": PAGES | {"free": 80}}, "do not add up"),
        ({"pages": dict.fromkeys(PAGES, 0)}, "has not come back"),
        ({"failed": 1, "cancelled": 1}, "1 calls as cancelled, at most 0"),
        ({"failed": 1, "answered": 3}, "clients saw 2 calls end as answered and the server 3"),
        ({"failed": 3, "received": 7}, "clients sent 6 calls"),
    ],
)
def test_an_account_that_is_wrong_is_found(more: dict[str, Any], sentence: str) -> None:
    found = round_of("engine")
    wrong = replace(found, books=books(found.seen.calls, **more))
    assert any(sentence in each for each in violations(wrong)), list(violations(wrong))
    assert len(summary(wrong)["accounts_wrong"]) > 0


def test_calls_that_had_come_to_a_front_end_must_be_in_the_account() -> None:
    """It told of 2 at 9.2; one of them was answered before it was killed, or its answer was on its way."""
    found = with_call(with_call(round_of("front-end"), CLOSED, place=0), CLOSED, place=0)
    assert found.cut_off(2, 9.2) == 2
    answered = with_call(found, "matched", place=0)
    assert answered.cut_off(2, 9.2) == 1
    assert found.cut_off(2, 8.9) == 1  # that which ended at 9
    calls = found.seen.calls
    counted = [call for call in calls if call.end != CLOSED]
    told = replace(books([*counted, calls[-1]]), cut_off=1)
    assert list(unbalanced(told, calls)) == []
    assert list(unbalanced(replace(told, cut_off=2), calls)) == [
        "clients sent 8 calls, of which 7 must have come, and the server received 6"
    ]


def test_processes_that_do_not_add_up_are_found() -> None:
    found = round_of("engine")
    assert found.books is not None
    wrong = replace(found.books, received_by_process={"front-end 1": 4, "front-end 2": 1})
    assert list(unbalanced(wrong, found.seen.calls)) == [
        "the processes have received 5 calls and the server 6"
    ]


calls = st.lists(st.sampled_from([*ENDS, CLOSED]).map(lambda end: Ended(0, 9.0, 11.0, end)), max_size=30)


@given(calls, st.data())
def test_a_call_that_was_cut_off_may_be_counted_once_in_any_way(
    made: list[Ended], data: st.DataObject
) -> None:
    """And no other call may: an account with one more or less of anything is found."""
    counted: Counter[str] = Counter(column(call.end) for call in made if call.end != CLOSED)
    closed = sum(call.end == CLOSED for call in made)
    uncounted = 0
    for _ in range(closed):
        end = data.draw(st.sampled_from(["", "cancelled", *ENDS]))
        uncounted += not end
        counted.update([column(end)] if end else [])
    told = Books(account(Counter()), account(counted), {"front-end 1": counted.total()})
    assert list(unbalanced(told, made)) == []
    more = counted + Counter({column(data.draw(st.sampled_from(ENDS))): 1 + uncounted})
    told = Books(account(Counter()), account(more), {"front-end 1": more.total()})
    assert list(unbalanced(told, made))
    seen = [column(call.end) for call in made if call.end != CLOSED]
    for name in set(seen):
        if counted[name] == seen.count(name):
            less = counted - Counter({name: 1})
            told = Books(account(Counter()), account(less), {"front-end 1": less.total()})
            assert list(unbalanced(told, made))


def test_an_answer_belongs_to_the_call_with_its_id() -> None:
    def body(number: int, told: str = '"matched"') -> bytes:
        return b'{"id":%d,"result":{"structuredContent":{"status":%s}}}' % (number, told.encode())

    assert end_of(True, body(7), 7) == "matched"
    assert end_of(True, body(7, '"failed","error":{"code":"engine_lost"}'), 7) == LOST
    assert end_of(True, body(6), 7) is None
    assert str(end_of(False, b"HTTP/1.1 503 Service Unavailable", 7)).startswith("no result")

    class Quiet(Client):
        def ask(self, request: bytes) -> None:
            self.sent = 1.0

    async def converse() -> tuple[list[str], int]:
        client = Quiet()
        conversation = Conversation(client)
        asked = asyncio.create_task(conversation.ask(7, b"", 5.0))
        await asyncio.sleep(0)
        for number in (6, 7, 7):
            conversation.answered(client, True, body(number))
        ends = [(await asked)[0]]
        asked = asyncio.create_task(conversation.ask(8, b"", 5.0))
        await asyncio.sleep(0)
        conversation.lost(client, "closed")
        ends.append((await asked)[0])
        ends.append((await conversation.ask(9, b"", 0.0))[0])
        return ends, conversation.strays

    assert asyncio.run(converse()) == (["matched", CLOSED, UNANSWERED], 2)


def test_targets_are_of_the_worst_round() -> None:
    slow = replace(round_of("engine"), killed=9.6)
    found = [summary(each) for each in (round_of("engine"), slow, round_of("parent"))]
    measured = {target.key.removeprefix("kills."): target.measured for target in targets(found)}
    assert measured == {
        "unanswered": 0, "accounts_wrong": 0, "connections_of_others_lost": 0, "engine_error_ms": 450.0,
        "ready_again_s": pytest.approx(5.4), "processes_left": 0,
    }  # fmt: skip
    lost = summary(with_call(round_of("parent"), UNANSWERED))
    measured = {target.key: target.measured for target in targets([lost])}
    assert measured == {
        "kills.unanswered": 1, "kills.connections_of_others_lost": 0, "kills.processes_left": 0,
    }  # fmt: skip


def test_the_page_shows_each_kind_and_what_was_broken() -> None:
    told = {
        kind: of_kind([summary(round_of(kind)), summary(round_of(kind))])
        for kind in ("front-end", "engine", "parent")
    }
    results = {
        "frontends": 2,
        "connections": 16,
        "kinds": told,
        "violations": ["round 1, it: 1 calls did not end"],
    }
    lines = list(kills_page.section(results, "kills.json"))
    rows = [line for line in lines if line.startswith("|")]
    assert len({row.count("|") for row in rows}) == 1
    assert rows[3].startswith(
        "| the engine process | 2 | 4 | 4 failed: engine_lost | 50 | 5,000 | 6,000 | 0 of 4 | 0 | 0 |"
    )
    assert "- **Broken:** round 1, it: 1 calls did not end." in lines
    page = Path(kills_page.__file__).parent.parent / "docs" / "operations.md"
    assert "new\n" in replaced(page.read_text(encoding="utf-8"), ["new"], kills_page.BEGIN)
