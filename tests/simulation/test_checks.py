"""The checks of the simulation find what is planted: a bug in the core ends the run with a sentence."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.simulation.__main__ import gather, parts_of, run_part, seeds_of
from benchmarks.simulation.checks import Violation
from benchmarks.simulation.simulator import simulate_world
from engine import core, schedule
from engine.core import Core
from engine.pages import PagePool, Reservation
from engine.queue import WaitQueue
from engine.request import Tokens

WORLDS = 40


def keep_surplus(self: Reservation, keep: int) -> None:
    surplus = self.spare[keep:]
    del self.spare[keep:]
    self.owned.difference_update(surplus)


def never_overdue(self: WaitQueue[Any], item: Any) -> bool:
    return False


def never_earmarked(self: WaitQueue[Any], waiting: Any, now: float) -> bool:
    return False


def never_told(self: Core) -> None:
    return None


def forget_the_waiting(self: Core, outcome: Any) -> None:
    for task in list(self.running.values()):
        self._end(task, outcome(task))


def least_left_first(left: int, unserved: int, patience: int) -> tuple[int, int]:
    return (1, left)


def match_less(self: PagePool, tokens: Tokens, most: int) -> tuple[int, ...]:
    return ()


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("owner", "name", "bug"),
    [
        (Reservation, "shrink", keep_surplus),
        (WaitQueue, "is_overdue", never_overdue),
        (WaitQueue, "_is_earmarked", never_earmarked),
        (Core, "next_deadline", never_told),
        (Core, "end_all", forget_the_waiting),
        (PagePool, "match", match_less),
        (schedule, "preference", least_left_first),
    ],
)
def test_a_planted_bug_is_found(owner: Any, name: str, bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, bug)
    if owner is schedule:
        monkeypatch.setattr(core, name, bug)  # imported there by name

    def run() -> None:
        for requests in (500, 2000):  # some bugs need a longer queue than a small world has
            for seed in range(WORLDS):
                simulate_world(seed, 0, requests)

    with pytest.raises(Violation, match=r"\w+ \w+"):
        run()


@pytest.mark.interpreted
def test_a_run_names_the_world_that_ended_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reservation, "shrink", keep_surplus)
    part = run_part(0, 0, [300, 300])
    assert part.violation.startswith("seed 0, world 0 of 300 requests: ")
    assert gather([part])["violations"] == [part.violation]


def test_the_parts_of_a_run_are_all_of_it() -> None:
    parts = parts_of(3, 23_000)
    assert sum(sum(sizes) for _, _, sizes in parts) == 23_000
    assert [first for _, first, _ in parts] == [0, 4]
    assert seeds_of("1,5-7") == [1, 5, 6, 7]
