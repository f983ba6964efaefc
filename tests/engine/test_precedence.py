"""The step loop goes first; nobody waits for it without an end."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import pytest

from engine.core import Core
from engine.engine import Engine
from engine.precedence import SPARE_S, Precedence
from engine.request import Embed, Failed, Outcome
from tests.engine.fakes import HashRunner, make_core

LONG_S = 60.0


def in_a_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_others_wait_while_the_loop_is_at_work() -> None:
    precedence = Precedence(longest_wait_s=LONG_S)
    order: list[str] = []
    started = threading.Event()

    def other() -> None:
        started.set()
        precedence.give_way()
        order.append("other")

    precedence.begin(SPARE_S)
    thread = in_a_thread(other)
    assert started.wait(LONG_S)
    order.append("loop")
    precedence.end()
    thread.join(LONG_S)
    assert order == ["loop", "other"]


def test_nobody_waits_while_the_loop_waits_nor_the_loop_for_itself() -> None:
    precedence = Precedence(longest_wait_s=LONG_S)
    precedence.give_way()
    precedence.begin(SPARE_S)
    precedence.give_way()  # a callback of the loop's own thread
    precedence.end()
    precedence.end()  # once more does nothing
    precedence.give_way()
    assert precedence._grace_until == 0.0


def test_a_loop_that_has_hardly_waited_has_no_precedence() -> None:
    precedence = Precedence(longest_wait_s=LONG_S)
    precedence.begin(SPARE_S / 2)
    other = in_a_thread(precedence.give_way)
    other.join(LONG_S / 2)
    assert not other.is_alive()
    precedence.end()


def test_a_loop_that_never_waits_keeps_nobody_for_ever() -> None:
    precedence = Precedence(longest_wait_s=0.001, grace_s=LONG_S)
    precedence.begin(SPARE_S)
    turns: list[int] = []

    def other() -> None:
        for turn in range(1000):
            precedence.give_way()
            turns.append(turn)
            precedence._longest_wait_s = 10 * LONG_S  # but the others are within the grace of the first

    in_a_thread(other).join(LONG_S)
    assert len(turns) == 1000
    precedence.end()


@pytest.mark.parametrize("fail_at", [None, ("launch", 2), ("collect", 1)])
@pytest.mark.parametrize("depth", [1, 2])
def test_it_ends_with_the_engine(depth: int, fail_at: tuple[str, int] | None) -> None:
    """Whatever ends the loop, who comes later waits for nothing."""
    core, runner = engine_parts(depth, fail_at)
    seconds = itertools.count()  # each look at the clock finds another gone: every wait was a long one
    engine = Engine(core, runner, clock=lambda: float(next(seconds)))
    engine._precedence = Precedence(longest_wait_s=LONG_S)
    engine.start()
    engine.mark_ready()
    ended: list[Outcome] = []
    both = threading.Semaphore(0)

    def note(outcome: Outcome) -> None:
        ended.append(outcome)
        both.release()

    for _ in range(2):
        engine.submit(Embed((1,) * 12), on_done=note)
    assert both.acquire(timeout=LONG_S)
    assert both.acquire(timeout=LONG_S)
    engine.close()
    assert any(isinstance(outcome, Failed) for outcome in ended) == (fail_at is not None)
    assert not engine._precedence._at_work.locked()


def engine_parts(depth: int, fail_at: tuple[str, int] | None) -> tuple[Core, HashRunner]:
    core, runner = make_core(20, 4, step_tokens=8, depth=depth)
    core.not_ready = ""
    runner.fail_at = fail_at
    return core, runner
