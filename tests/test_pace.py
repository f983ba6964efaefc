"""Calls that come together begin a few at a time, and the loop looks at everything else in between."""

from __future__ import annotations

import asyncio

import pytest

from mcp_discovery.pace import Pace


class Turns:
    """Counts the turns of the running loop."""

    def __init__(self) -> None:
        self.count = 0
        self._next()

    def _next(self) -> None:
        self.count += 1
        self._handle = asyncio.get_running_loop().call_soon(self._next)

    def stop(self) -> None:
        self._handle.cancel()


async def begun_in_turns(pace: Pace, calls: int) -> list[tuple[int, int]]:
    """(call, turn in which it begins) of calls that come together, in the order in which they begin."""
    turns = Turns()
    begun: list[tuple[int, int]] = []

    async def call(number: int) -> None:
        await pace.turn()
        begun.append((number, turns.count))

    await asyncio.gather(*map(call, range(calls)))
    turns.stop()
    return begun


def test_calls_that_come_together_begin_in_order_a_few_in_each_turn() -> None:
    begun = asyncio.run(begun_in_turns(Pace(3), 20))
    assert [number for number, _ in begun] == list(range(20))
    turns = [turn for _, turn in begun]
    assert all(turns.count(turn) <= 3 for turn in turns)
    assert turns[-1] - turns[0] <= 8  # and no turn goes by in which none begins


def test_a_call_alone_does_not_wait() -> None:
    async def main() -> None:
        pace = Pace(1)
        for _ in range(3):
            call = asyncio.ensure_future(pace.turn())
            await asyncio.sleep(0)
            assert call.done()
            await asyncio.sleep(0)

    asyncio.run(main())


def test_a_call_that_is_taken_back_keeps_nobody_waiting() -> None:
    async def main() -> list[type]:
        pace = Pace(1)
        calls = [asyncio.ensure_future(pace.turn()) for _ in range(5)]
        await asyncio.sleep(0)
        for call in calls[1:4]:
            call.cancel()
        ended = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 5)
        return [type(each) for each in ended]

    assert asyncio.run(main()) == [type(None), *[asyncio.CancelledError] * 3, type(None)]


@pytest.mark.parametrize("turns", range(1, 6))
def test_it_outlives_a_loop_that_ended_in_a_turn(turns: int) -> None:
    pace = Pace(1)
    loop = asyncio.new_event_loop()
    calls = [loop.create_task(pace.turn()) for _ in range(4)]
    for _ in range(turns):
        loop.call_soon(loop.stop)
        loop.run_forever()
    assert len(asyncio.run(asyncio.wait_for(begun_in_turns(pace, 5), 5))) == 5
    for call in calls:
        call.cancel()
    loop.run_until_complete(asyncio.gather(*calls, return_exceptions=True))
    loop.close()
