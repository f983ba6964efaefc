"""Requests through the wire: answers, refusals, failures, cancels, deadlines, and what is counted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from engine.errors import EngineFault, Refusal, RefusalCode
from engine.request import (
    Cancelled,
    Embed,
    Embedded,
    Failed,
    Generate,
    Generated,
    Outcome,
    Rank,
    Request,
    Score,
    Scored,
    Timing,
    Tokens,
    Usage,
)
from engine.wire import ItemList, Patience, UndeclaredConstraint, WireClient, WireLimits
from tests.engine.wire.doubles import (
    FACTS,
    RANK,
    WAIT_S,
    answer_to,
    go,
    serving,
    until,
    vector_of,
)

CONSTRAINT = ItemList(((1,), (2, 3)), end=9, separator=(7,), most=2)
REQUESTS: list[Request] = [
    Embed((1, 2, 3), keep=2),
    Score(((1, 2), (3,), (1, 2)), (4, 5), 1, 2, window=2),
    Score((), (4,), 1, 2),
    Generate((5, 6), 7, frozenset({9, 8}), 0.5, 11, CONSTRAINT, keep=1),
    Generate((1,), 1),
]
REFUSAL = Refusal(RefusalCode.PAGES_SHORT, "No pages.", 9, 4, 10, 16, 3, 250)


def test_requests_arrive_whole_and_answers_come_back() -> None:
    async def test() -> None:
        async with serving() as wire, wire.client() as client:
            for number, request in enumerate(REQUESTS):
                deadline = time.monotonic() + 100.0 + number
                outcome = await client.run(request, deadline=deadline, caller=f"caller {number}")
                assert outcome == answer_to(request)
                asked = wire.engine.asked[-1]
                assert asked.request == request
                assert asked.deadline == deadline
                assert asked.caller == f"1:caller {number}"
            assert client.in_flight == wire.server.in_flight == 0

    go(test)


@pytest.mark.parametrize(
    "outcome",
    [
        REFUSAL,
        Refusal(RefusalCode.REQUEST_TOO_LARGE, "Too large.", 99, 4, 10, 16, 0, None),
        Failed("device_fault", "A step failed."),
        Cancelled(),
        Embedded((0.1, -1e-300, 1.0), Usage(3, 2, 1, 4), Timing(0.25, 1.5)),
        Scored((0.1, 1.0 / 3.0), Usage(3, 2, 0, 4), Timing(0.25, 1.5)),
        Generated((5, 6), Usage(3, 2, 2, 4), Timing(0.25, 1.5)),
    ],
)
def test_every_outcome_comes_back_as_it_was(outcome: Outcome) -> None:
    async def test() -> None:
        async with serving(by_itself=False) as wire, wire.client() as client:
            call = asyncio.create_task(client.run(Embed((1,))))
            (asked,) = await wire.engine.arrived(1)
            asked.end(outcome)
            assert await call == outcome

    go(test)


def test_a_rank_request_chooses_between_its_stages() -> None:
    async def test() -> None:
        chosen = ((1, 2), (3,), (1, 2))
        seen: list[list[float]] = []

        def choose(vector: Sequence[float]) -> Sequence[Tokens]:
            seen.append(list(vector))
            return chosen

        async with serving() as wire, wire.client() as client:
            for _ in range(3):
                assert await client.rank(RANK, choose) == answer_to(RANK, chosen)
                assert wire.engine.asked[-1].supplied == chosen
        assert seen == [list(vector_of(RANK.query))] * 3

    go(test)


def test_a_rank_request_that_ends_before_its_vector_does_not_choose() -> None:
    def choose(vector: Sequence[float]) -> Sequence[Tokens]:
        raise AssertionError("asked to choose")

    async def test() -> None:
        async with serving(by_itself=False) as wire, wire.client() as client:
            call = asyncio.create_task(client.rank(RANK, choose))
            (asked,) = await wire.engine.arrived(1)
            asked.end(REFUSAL)
            assert await call == REFUSAL

    go(test)


def test_a_rank_request_that_ends_while_it_chooses_is_answered_with_its_end() -> None:
    async def test() -> None:
        async with serving(by_itself=False) as wire, wire.client() as client:
            call = asyncio.create_task(client.rank(RANK, lambda vector: ((1,),)))
            (asked,) = await wire.engine.arrived(1)
            asked.send_vector()
            asked.end(REFUSAL)  # in the same frame batch as the vector
            assert await call == REFUSAL
            assert await client.ping() > 0.0
            assert asked.supplied is None

    go(test)


def test_what_makes_no_sense_raises_as_it_does_locally() -> None:
    async def test() -> None:
        async with serving() as wire, wire.client() as client:
            with pytest.raises(ValueError, match="tokens must not be empty"):
                await client.run(Embed(()))
            with pytest.raises(ValueError, match="9 prefixes are more than 8"):
                await client.rank(RANK, lambda vector: ((1,),) * 9)
            with pytest.raises(ValueError, match=r"goes through rank\(\)"):
                await client.run(RANK)
            with pytest.raises(ValueError, match="beyond 64 bits"):
                await client.run(Embed((1 << 70,)))
            assert await client.run(Embed((1,))) == answer_to(Embed((1,)))
            assert wire.server.in_flight == client.in_flight == 0

    go(test)


def test_a_constraint_that_is_code_is_refused_by_the_client() -> None:
    class Odd:
        def allowed(self, output: Sequence[int]) -> Sequence[int]:
            return (1,)

    async def test() -> None:
        async with serving() as wire, wire.client() as client:
            with pytest.raises(UndeclaredConstraint, match="of type Odd is code"):
                await client.run(Generate((1,), 4, constraint=Odd()))
            assert not wire.engine.asked
            assert client.in_flight == 0

    go(test)


def test_a_frame_above_the_limit_is_not_sent() -> None:
    async def test() -> None:
        async with serving(WireLimits(max_frame=1000)) as wire, wire.client() as client:
            with pytest.raises(ValueError, match=r"bytes, the limit is 1,000"):
                await client.run(Embed((70_000,) * 500))
            with pytest.raises(ValueError, match=r"bytes, the limit is 1,000"):
                await client.rank(RANK, lambda vector: ((70_000,) * 500, (1,)))
            await until(lambda: wire.server.in_flight == 0)
            chosen = ((1, 2), (3,))
            assert await client.rank(RANK, lambda vector: chosen) == answer_to(RANK, chosen)

    go(test)


def test_answers_in_any_order_go_to_their_own_requests() -> None:
    async def test() -> None:
        async with serving(by_itself=False) as wire, wire.client() as one, wire.client() as other:
            requests = [Embed((number, number + 1)) for number in range(200)]
            clients = (one, other)
            calls = [
                asyncio.create_task(clients[number % 2].run(request))
                for number, request in enumerate(requests)
            ]
            for asked in sorted(await wire.engine.arrived(200), key=lambda asked: hash(asked.request)):
                asked.answer()
            outcomes = await asyncio.gather(*calls)
            assert outcomes == [answer_to(request) for request in requests]

    go(test)


def test_200_of_200_cancels_reach_the_engine() -> None:
    async def test() -> None:
        async with serving(by_itself=False) as wire, wire.client() as client:
            calls: list[asyncio.Task[Outcome]] = []
            for number in range(200):
                if number % 2:
                    calls.append(asyncio.create_task(client.run(Embed((number,)))))
                else:
                    calls.append(asyncio.create_task(client.rank(RANK, lambda vector: ())))
            stays = asyncio.create_task(client.run(Embed((999,))))
            asked = list(await wire.engine.arrived(201))
            for each in asked[:100:2]:
                each.send_vector()
            for call in calls:
                call.cancel()
            assert await asyncio.gather(*calls, return_exceptions=True) != []
            assert all(call.cancelled() for call in calls)
            await asyncio.gather(*(asyncio.wait_for(each.changed.wait(), WAIT_S) for each in asked[:200]))
            assert [each.cancels for each in asked] == [1] * 200 + [0]
            await until(lambda: client.in_flight == wire.server.in_flight == 1)
            asked[200].answer()
            assert await stays == answer_to(Embed((999,)))

    go(test)


def test_200_of_200_hang_ups_reach_the_engine_and_touch_nobody_else() -> None:
    async def test() -> None:
        async with serving(by_itself=False) as wire, wire.client() as stays:
            kept = asyncio.create_task(stays.run(Embed((999,))))
            await wire.engine.arrived(1)
            async with wire.client() as goes:
                calls = [asyncio.create_task(goes.run(Embed((number,)))) for number in range(200)]
                asked = list(await wire.engine.arrived(201))
            for outcome in await asyncio.gather(*calls):
                assert isinstance(outcome, Failed)
                assert outcome.code == "engine_lost"
            await until(lambda: wire.server.connections == 1)
            assert [each.cancels for each in asked] == [0] + [1] * 200
            assert wire.server.in_flight == 1
            asked[0].answer()
            assert await kept == answer_to(Embed((999,)))

    go(test)


def test_200_of_200_deadlines_end_their_calls_where_the_engine_says_nothing() -> None:
    async def test() -> None:
        patience = Patience(grace_s=0.0)
        async with serving(by_itself=False) as wire, wire.client(patience=patience) as client:
            deadline = time.monotonic() + 0.05
            calls = [
                asyncio.create_task(client.run(Embed((number,)), deadline=deadline)) for number in range(200)
            ]
            for outcome in await asyncio.gather(*calls):
                assert isinstance(outcome, Refusal)
                assert outcome.code is RefusalCode.DEADLINE
            assert time.monotonic() >= deadline
            asked = wire.engine.asked
            assert [each.deadline for each in asked] == [deadline] * 200
            await until(lambda: [each.cancels for each in asked] == [1] * 200)
            await until(lambda: client.in_flight == wire.server.in_flight == 0)

    go(test)


def test_a_choice_that_raises_takes_its_request_back() -> None:
    def choose(vector: Sequence[float]) -> Sequence[Tokens]:
        raise LookupError("nothing to choose from")

    async def test() -> None:
        async with serving() as wire, wire.client() as client:
            with pytest.raises(LookupError):
                await client.rank(RANK, choose)
            await until(lambda: wire.engine.asked[0].cancels == 1)
            await until(lambda: client.in_flight == wire.server.in_flight == 0)

    go(test)


def test_the_window_bounds_a_connection_on_both_sides() -> None:
    async def test() -> None:
        async with serving(WireLimits(window=3), by_itself=False) as wire, wire.client() as client:
            calls = [asyncio.create_task(client.run(Embed((number,)))) for number in range(5)]
            await asyncio.sleep(0)  # each has been sent, or refused without being sent
            assert client.in_flight == 3
            refused = await asyncio.gather(*calls[3:])
            for outcome in refused:
                assert isinstance(outcome, Refusal)
                assert outcome.code is RefusalCode.QUEUE_FULL
                assert outcome.pages_total == 10
                assert outcome.pages_free == 8
                assert outcome.page_tokens == FACTS.page_tokens
                assert outcome.retry_after_ms
            asked = list(await wire.engine.arrived(3))
            assert len(asked) == 3
            calls[0].cancel()
            await until(lambda: client.in_flight == 2)
            again = asyncio.create_task(client.run(Embed((7,))))
            asked = list(await wire.engine.arrived(4))
            for each in asked:
                each.answer()
            assert await again == answer_to(Embed((7,)))
            await asyncio.gather(*calls[1:])

    go(test)


def test_callers_belong_to_their_connection_unless_it_shares_them() -> None:
    async def test() -> None:
        async with serving() as wire, wire.client() as one, wire.client(shares_callers=True) as other:
            await one.run(Embed((1,)), caller="alice")
            await other.run(Embed((1,)), caller="alice")
            assert [asked.caller for asked in wire.engine.asked] == ["1:alice", "alice"]

    go(test)


def test_status_is_the_last_snapshot_with_its_age() -> None:
    async def test() -> None:
        async with serving(WireLimits(status_every_s=0.01)) as wire:
            early = WireClient(wire.path)
            assert early.status_age_s == float("inf")
            assert not early.status().ready
            async with wire.client() as client:
                status = client.status()
                assert status.ready
                assert status.pages == wire.engine.pages
                assert client.facts == FACTS
                await client.run(Embed((1,)))
                await until(lambda: client.status().steps == 1)  # pushed
                assert client.status_age_s < WAIT_S
                asked = await client.ask_status()
                assert asked == wire.engine.status()

    go(test)


def test_a_server_without_an_engine_refuses_until_it_is_opened_and_after_it_is_shut() -> None:
    async def test() -> None:
        changes: list[bool] = []
        async with (
            serving(open_=False, reason="the model is being loaded") as wire,
            wire.client(on_change=lambda: changes.append(True)) as client,
        ):
            for outcome in (
                await client.run(Embed((1,))),
                await client.rank(RANK, lambda vector: ()),
            ):
                assert isinstance(outcome, Refusal)
                assert outcome.code is RefusalCode.NOT_READY
                assert outcome.message == "The server is not ready: the model is being loaded."
            assert client.facts is None
            assert client.status().reason == "the model is being loaded"
            changes.clear()
            wire.server.open(wire.engine, FACTS)
            await until(lambda: client.status().ready)
            assert changes
            assert client.facts == FACTS
            assert await client.run(Embed((1,))) == answer_to(Embed((1,)))
            wire.server.shut("its engine has failed")
            outcome = await client.run(Embed((1,)))
            assert isinstance(outcome, Refusal)
            assert "its engine has failed" in outcome.message
            await until(lambda: not client.status().ready)

    go(test)


def test_draining_lets_what_runs_go_on_and_refuses_the_rest() -> None:
    async def test() -> None:
        async with serving(by_itself=False) as wire, wire.client() as client, wire.client() as late:
            call = asyncio.create_task(client.rank(RANK, lambda vector: ((1,),)))
            (asked,) = await wire.engine.arrived(1)
            wire.server.drain("the host restarts")
            assert isinstance(await late.run(Embed((1,))), Refusal)  # sent before it heard, or not sent
            await until(lambda: client.status().draining)
            for each, under_way in ((client, 1), (late, 0)):
                refused = asyncio.create_task(each.run(Embed((1,))))
                await asyncio.sleep(0)
                assert each.in_flight == under_way  # it was not sent
                outcome = await refused
                assert isinstance(outcome, Refusal)
                assert outcome.code is RefusalCode.DRAINING
                assert "the host restarts" in outcome.message
            assert not await wire.server.idle(0.0)
            asked.send_vector()
            await asyncio.wait_for(asked.changed.wait(), WAIT_S)
            asked.answer()
            assert await call == answer_to(RANK, ((1,),))
            assert await wire.server.idle(WAIT_S)
            assert len(wire.engine.asked) == 1

    go(test)


def test_a_lost_server_ends_what_is_under_way_at_once_and_is_found_again() -> None:
    async def test() -> None:
        async with serving(by_itself=False) as wire, wire.client() as client:
            calls = [asyncio.create_task(client.run(Embed((number,)))) for number in range(300)]
            await wire.engine.arrived(300)
            await wire.server.close()
            for outcome in await asyncio.gather(*calls):
                assert isinstance(outcome, Failed)
                assert outcome.code == "engine_lost"
            outcome = await client.run(Embed((1,)))
            assert isinstance(outcome, Refusal)
            assert outcome.code is RefusalCode.NOT_READY
            assert not client.status().ready
            assert client.in_flight == 0
            with pytest.raises(EngineFault):
                await client.ping()

            async with serving() as other:
                other.path.rename(wire.path)
                assert await client.wait_connected(WAIT_S)
                chosen = ((1, 2), (3,))
                assert await client.rank(RANK, lambda vector: chosen) == answer_to(RANK, chosen)

    go(test)


def test_a_client_without_a_server_says_so() -> None:
    async def test() -> None:
        async with serving() as wire:
            path = wire.path
        async with WireClient(path) as client:
            await until(lambda: "No such file" in client.status().reason)
            outcome = await client.run(Embed((1,)))
            assert isinstance(outcome, Refusal)
            assert outcome.code is RefusalCode.NOT_READY
            assert str(path) in outcome.message
        outcome = await client.run(Embed((1,)))
        assert isinstance(outcome, Refusal)

    go(test)


def test_a_rank_of_a_whole_catalogue_sends_each_prefix_once() -> None:
    async def test() -> None:
        catalogue = [(number, number + 1, number + 2) for number in range(64)]
        request = Rank((1, 2), 64, 8, (3,), 1, 2)
        sent: list[int] = []
        async with serving() as wire, wire.client() as client:
            assert client._link is not None
            client._link._writer._transport = Recording(client._link._transport, sent)
            for _ in range(3):
                assert await client.rank(request, lambda vector: catalogue) == answer_to(
                    request, tuple(catalogue)
                )
                sent.append(-1)
        first, second, third = _totals(sent)
        assert second == third
        assert first > second + 64 * 6

    go(test)


class Recording:
    def __init__(self, transport: asyncio.Transport, sent: list[int]) -> None:
        self._transport = transport
        self._sent = sent

    def write(self, data: bytes) -> None:
        self._sent.append(len(data))
        self._transport.write(data)

    def is_closing(self) -> bool:
        return self._transport.is_closing()


def _totals(sent: list[int]) -> list[int]:
    totals, now = [], 0
    for size in sent:
        if size < 0:
            totals.append(now)
            now = 0
        else:
            now += size
    return totals
