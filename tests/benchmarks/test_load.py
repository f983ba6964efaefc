"""The shapes of load, over clients whose server is a function in the same loop."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.ladder.answers import TAIL, code_of, retry_after_s, status_of, timing_of
from benchmarks.ladder.driver import Settings
from benchmarks.ladder.load import Burst, ClosedLoop, Load, OpenLoop, Prepared, Raw
from benchmarks.ladder.wire import Client, Endpoint

WAIT_S = 20.0
MATCHED = b'{"result":{"structuredContent":{"status":"matched","tools":[]}}}'


def refusal(retry_ms: float) -> bytes:
    return (
        b'{"result":{"structuredContent":{"status":"refused","refusal":{"code":"queue_full",'
        b'"retry_after_ms":%f}}}}' % retry_ms
    )


class Peer:
    """Stands where a connected client does; `answer` is its server. Counts what is under way at once."""

    def __init__(self, answer: Callable[[Peer], bytes | None]) -> None:
        self.owner: Any = None
        self.calls = 0
        self.sent = 0.0
        self.closed = False
        self.asked = 0
        self._answer = answer
        self._under_way = False

    def ask(self, request: bytes) -> None:
        assert not self._under_way, "a second request before the first was answered"
        self._under_way = True
        self.asked += 1
        self.sent = time.monotonic()
        asyncio.get_running_loop().call_soon(self._end)

    def _end(self) -> None:
        body = self._answer(self)
        self._under_way = False
        if body is None:
            self.closed = True
            self.owner.lost(self, "gone")
        else:
            self.owner.answered(self, True, body)


def peers(count: int, answer: Callable[[Peer], bytes | None]) -> tuple[list[Peer], list[Client]]:
    made = [Peer(answer) for _ in range(count)]
    return made, cast(list[Client], made)


def requests() -> Iterator[Prepared]:
    return (Prepared("short", number, b"") for number in itertools.count())


def run(make: Callable[[], Load]) -> Load:
    async def main() -> Load:
        load = make()
        await asyncio.wait_for(load.run(time.monotonic()), WAIT_S)
        return load

    return asyncio.run(main())


@given(clients=st.integers(1, 8), calls=st.integers(1, 6))
def test_a_closed_loop_asks_each_client_often_enough(clients: int, calls: int) -> None:
    made, held = peers(clients, lambda peer: MATCHED)
    load = run(lambda: ClosedLoop(held, requests(), 0.0, calls=calls))
    assert min(peer.asked for peer in made) >= calls
    assert len(load.ended) == sum(peer.asked for peer in made)
    assert {raw.status for raw in load.ended} == {"matched"}
    numbers = [raw.request.query for raw in load.ended]
    assert sorted(numbers) == list(range(len(numbers)))
    assert all(raw.due == raw.sent <= raw.ended for raw in load.ended)


def test_a_closed_loop_goes_on_until_its_time_is_over() -> None:
    _, held = peers(2, lambda peer: MATCHED)
    began = time.monotonic()
    load = run(lambda: ClosedLoop(held, requests(), 0.2, calls=1))
    assert load.stopped - began >= 0.2


def test_a_refused_client_waits_as_long_as_it_is_told() -> None:
    made, held = peers(1, lambda peer: refusal(120.0) if peer.asked == 1 else MATCHED)
    load = run(lambda: ClosedLoop(held, requests(), 0.0, calls=2))
    first, second = load.ended
    assert (first.status, second.status) == ("refused", "matched")
    assert second.sent - first.ended >= 0.119
    assert made[0].asked == 2


@pytest.mark.parametrize("broken", [None, b'{"error":{"code":-32603}}', b'{"result":{}}'])
def test_the_first_failure_stops_everything(broken: bytes | None) -> None:
    made, held = peers(4, lambda peer: broken if peer is made[2] and peer.asked == 3 else MATCHED)
    load = run(lambda: ClosedLoop(held, requests(), 60.0))
    assert sum(raw.status == "failed" for raw in load.ended) == 1
    assert max(peer.asked for peer in made) <= 4
    assert all(raw.reason for raw in load.ended if raw.status == "failed")


def test_a_connection_that_is_lost_between_two_calls_is_a_failure_too() -> None:
    made, held = peers(1, lambda peer: refusal(60_000.0))

    class Dropped(ClosedLoop):
        def after(self, client: Client, raw: Raw) -> None:
            super().after(client, raw)
            asyncio.get_running_loop().call_soon(made[0].owner.lost, client, "gone")

    load = run(lambda: Dropped(held, requests(), 60.0))
    assert [(raw.status, raw.reason) for raw in load.ended] == [
        ("refused", ""),
        ("failed", "between calls, gone"),
    ]


def test_a_call_that_is_never_answered_has_failed() -> None:
    class Silent(Peer):
        def _end(self) -> None:
            """Never."""

    made = [Silent(lambda peer: MATCHED)]
    load = run(lambda: ClosedLoop(cast(list[Client], made), requests(), 0.0, most_s=0.05, patience_s=0.05))
    assert [(raw.status, "no answer" in raw.reason) for raw in load.ended] == [("failed", True)]


@given(clients=st.integers(0, 9))
def test_a_burst_asks_each_client_once(clients: int) -> None:
    made, held = peers(clients, lambda peer: MATCHED)
    load = run(lambda: Burst(held, requests(), 0.0))
    assert [peer.asked for peer in made] == [1] * clients
    assert len(load.ended) == clients


def test_arrivals_come_at_their_rate_and_none_is_lost() -> None:
    _, held = peers(20, lambda peer: MATCHED)
    load = run(lambda: OpenLoop(held, requests(), 0.5, rate=400.0, seed=3))
    assert isinstance(load, OpenLoop)
    assert 140 <= load.arrivals <= 260  # 200 expected, 4 deviations
    assert len(load.ended) == load.arrivals
    assert all(raw.due <= raw.sent for raw in load.ended)
    source = random.Random(3)
    gaps = [later.due - earlier.due for earlier, later in itertools.pairwise(load.ended)]
    assert source.expovariate(400.0) > 0
    assert gaps == pytest.approx([source.expovariate(400.0) for _ in gaps], abs=1e-6)


def test_an_arrival_that_finds_no_client_waits_and_its_wait_counts() -> None:
    class Slow(Peer):
        def ask(self, request: bytes) -> None:
            self.asked += 1
            self.sent = time.monotonic()
            asyncio.get_running_loop().call_later(0.05, self._end)

    made = [Slow(lambda peer: MATCHED)]
    load = run(lambda: OpenLoop(cast(list[Client], made), requests(), 0.3, rate=200.0))
    assert isinstance(load, OpenLoop)
    assert load.arrivals > len(load.ended)  # those that were never sent are seen by the difference
    waits = [raw.sent - raw.due for raw in load.ended]
    assert waits == sorted(waits)
    assert waits[-1] > 0.1


@given(text=st.text(), status=st.sampled_from(["matched", "no_match", "refused"]))
def test_no_text_of_an_answer_passes_for_its_status(text: str, status: str) -> None:
    planted = text + '"structuredContent":{"status":"failed"'
    first: dict[str, Any] = {"_meta": {"status": "failed"}, "content": [{"text": planted}]}
    answer = {**first, "structuredContent": {"status": status, "note": planted}}
    body = json.dumps({"result": answer}, separators=(",", ":"), ensure_ascii=False).encode()
    assert status_of(body) == status


def test_the_end_of_an_answer_tells_timing_code_and_retry() -> None:
    body = b'"timing_ms":{"queue":1.5,"retrieve":2.0,"engine":3.0,"total":7.25},' + refusal(250.0)
    assert timing_of(body[-TAIL:]) == (1.5, 2.0, 3.0, 7.25)
    assert code_of(body) == "queue_full"
    assert retry_after_s(body) == 0.25
    assert retry_after_s(b'"retry_after_ms":null') == 1.0


@pytest.mark.parametrize("timeout_ms", [None, 10_000, 60_000])
def test_no_call_counts_as_unanswered_before_its_timeout(timeout_ms: int | None) -> None:
    settings = Settings(Endpoint("127.0.0.1", 8443, "/mcp", Path("ca.pem")), timeout_ms=timeout_ms)
    assert settings.patience_s >= (timeout_ms or 10_000) / 1000.0 + 10.0
