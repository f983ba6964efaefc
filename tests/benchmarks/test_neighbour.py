"""The neighbour's arithmetic and manners, in miniature on a CPU."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest
import torch

from benchmarks.memory_trace import MIB, ProcessProbe, Trace
from benchmarks.neighbour import Decoder, Neighbour, Shape, Tally, read_orders

SMALL = Shape(
    layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, experts=8, experts_per_token=2, expert_hidden=16,
    vocabulary=64, batch=8, context=16,
)  # fmt: skip
WAIT_S = 20.0


def test_the_default_shape_has_thirty_billion_parameters() -> None:
    shape = Shape()
    expert = 3 * shape.hidden * shape.expert_hidden
    attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    layer = shape.experts * expert + attention + shape.hidden * shape.experts
    parameters = shape.layers * layer + 2 * shape.vocabulary * shape.hidden
    assert 2 * parameters / 2**30 == pytest.approx(57, abs=0.5)


def test_steps_give_tokens_of_the_vocabulary_and_stay_finite() -> None:
    torch.manual_seed(0)
    decoder = Decoder(SMALL, torch.device("cpu"), torch.float32)
    before = decoder.tokens.clone()
    for _ in range(3):
        decoder.run()
    assert 0 <= int(decoder.tokens.min()) <= int(decoder.tokens.max()) < SMALL.vocabulary
    assert not torch.equal(decoder.tokens, before)
    hidden = torch.randn(SMALL.batch, SMALL.hidden)
    assert torch.isfinite(decoder.layers[0](hidden)).all()


class Talk:
    """A neighbour in a thread whose step is an event."""

    def __init__(self, mode: str) -> None:
        self.told: queue.Queue[dict[str, Any]] = queue.Queue()
        self.stepped = threading.Semaphore(0)
        self.orders: queue.Queue[str] = queue.Queue()
        self.neighbour = Neighbour(self.stepped.release, 0.5, self.told.put)
        while self.stepped.acquire(blocking=False):
            """Those that set the pace."""
        self.thread = threading.Thread(target=self.neighbour.run, args=(self.orders, mode))
        self.thread.start()

    def ask(self, order: str) -> dict[str, Any]:
        self.orders.put(order)
        return self.told.get(timeout=WAIT_S)


def test_it_steps_while_busy_only_and_tells_of_each_step_once() -> None:
    talk = Talk("idle")
    assert (talk.ask("report")["steps"], talk.ask("busy")["mode"]) == (0, "idle")
    for _ in range(3):
        assert talk.stepped.acquire(timeout=WAIT_S)
    busy = talk.ask("idle")
    assert busy["mode"] == "busy"
    assert busy["steps"] >= 3
    assert 0.0 < busy["running_share"] <= 1.0
    ended = talk.ask("stop")
    talk.thread.join(WAIT_S)
    assert (ended["mode"], ended["steps"], talk.thread.is_alive()) == ("idle", 0, False)


def test_the_end_of_the_orders_is_a_stop() -> None:
    orders: queue.Queue[str] = queue.Queue()
    read_orders(iter(["busy\n", "nonsense\n", "idle\n"]), orders)
    assert [orders.get_nowait() for _ in range(3)] == ["busy", "idle", "stop"]
    assert orders.empty()


def test_a_report_shares_the_time_out() -> None:
    tally = Tally(steps=[0.01, 0.03, 0.02])
    tally.began -= 1.0
    told = tally.report("busy", 0.01)
    assert (told["step_p50_ms"], told["step_p99_ms"]) == (20.0, 30.0)
    assert told["running_share"] == pytest.approx(0.06, abs=0.002)
    assert told["card_share"] == pytest.approx(0.03, abs=0.002)


def test_a_trace_keeps_the_highest_and_says_when_it_can_no_longer_see() -> None:
    seen, sampled = [5 * MIB], threading.Semaphore(0)

    def read() -> int:
        sampled.release()
        if seen[0] < 0:
            raise OSError("the card is gone")
        return seen[0]

    with Trace(ProcessProbe(read)) as trace:
        assert sampled.acquire(timeout=WAIT_S)
        assert sampled.acquire(timeout=WAIT_S)
        seen[0] = 1 * MIB
        for _ in range(3):  # whatever was read before is counted by now
            assert sampled.acquire(timeout=WAIT_S)
        assert trace.take()[0] == 5.0
        for _ in range(3):
            assert sampled.acquire(timeout=WAIT_S)
        assert trace.take()[0] == 1.0
        seen[0] = -1
        trace.thread.join(WAIT_S)
        with pytest.raises(RuntimeError, match="the card is gone"):
            trace.take()
