"""The engine with its thread: faults, drains, deadlines, clients; over the model that is a hash."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial

import pytest

import engine as package
from engine.engine import Engine
from engine.errors import Refusal, RefusalCode
from engine.local import LocalClient
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
)
from engine.runner import Output
from tests.engine.fakes import VOCABULARY, FakeStep, HashRunner, expected, make_core, same

WAIT_S = 30.0


@dataclass
class GatedRunner(HashRunner):
    """Collects a step only when it may: `gate` is open at first."""

    gate: threading.Event = field(default_factory=threading.Event)
    entered: threading.Event = field(default_factory=threading.Event)

    def execute(self, step: FakeStep) -> list[Output]:
        self.entered.set()
        assert self.gate.wait(WAIT_S)
        return super().execute(step)


@dataclass
class Made:
    engine: Engine
    runner: GatedRunner

    def ask(self, request: Request, **terms: object) -> Future[Outcome]:
        answer: Future[Outcome] = Future()
        self.engine.submit(request, on_done=answer.set_result, **terms)
        return answer


Make = Callable[..., Made]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Made] = []

    def build(
        pages: int = 60,
        *,
        open_: bool = True,
        clock: Callable[[], float] = time.monotonic,
        **options: int,
    ) -> Made:
        core, plain = make_core(pages, **options)
        runner = GatedRunner(pages, plain.page_tokens, plain.depth)
        core.pool._on_free = runner.poison
        runner.is_published = plain.is_published
        if open_:
            runner.gate.set()
        core.not_ready = "it has not passed its canary"
        made.append(Made(Engine(core, runner, clock=clock), runner))
        made[-1].engine.start()
        made[-1].engine.mark_ready()
        return made[-1]

    yield build
    for each in made:
        each.runner.gate.set()
        each.engine.close()


MIXED: list[Request] = [
    Embed((1, 2, 3, 4, 5), keep=4),
    Generate((1, 2, 3), 7),
    Score(((1, 2, 3, 4), (5, 6, 7, 8, 9)), (1, 2), 1, 2),
    Score(((1, 2, 3, 4),) * 3, (3, 2), 1, 2, window=1),
    Generate((1, 2, 3, 4, 9), 3),
]


def test_every_kind_through_one_admission(make: Make) -> None:
    engine = make().engine
    assert engine.status().ready
    for request, ask in (
        (Embed((1, 2)), engine.embed),
        (Score(((1,),), (2,), 1, 2), engine.score),
        (Generate((1, 2), 5), engine.generate),
    ):
        assert same(ask(request), expected(request))
    status = engine.status()
    assert (status.waiting, status.running, status.pages.held) == (0, 0, 0)
    assert status.steps > 0
    assert status.tokens_per_s > 0.0
    assert status.kernels.startswith("hash; core ")


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("where", ["launch", "collect"])
@pytest.mark.parametrize("step", [1, 2, 3, 5, 8])
def test_a_step_that_fails_ends_every_request_once(make: Make, where: str, step: int, depth: int) -> None:
    made = make(20, open_=False, depth=depth)
    made.runner.fail_at = (where, step)
    told: list[list[Outcome]] = [[] for _ in range(30)]
    done = [threading.Event() for _ in told]

    def tell(number: int, outcome: Outcome) -> None:
        told[number].append(outcome)
        done[number].set()

    for number in range(30):
        made.engine.submit(MIXED[number % len(MIXED)], on_done=partial(tell, number), caller=str(number % 3))
    made.runner.gate.set()
    assert all(flag.wait(WAIT_S) for flag in done)
    made.engine._thread.join(WAIT_S)
    failed = 0
    for number, outcomes in enumerate(told):
        (outcome,) = outcomes
        if isinstance(outcome, Failed):
            failed += 1
            assert outcome == Failed("device_fault", "A step failed on the device; the engine has stopped.")
        else:
            assert same(outcome, expected(MIXED[number % len(MIXED)]))
    assert failed
    status = made.engine.status()
    assert (status.ready, status.waiting, status.running, status.pages.held) == (False, 0, 0, 0)
    late = made.ask(MIXED[0]).result(0)
    assert isinstance(late, Refusal)
    assert late.code is RefusalCode.NOT_READY
    assert "a step failed on the device" in late.message


def test_a_drain_finishes_what_was_taken_and_refuses_the_rest(make: Make) -> None:
    made = make(20, open_=False)
    taken = [made.ask(MIXED[n % len(MIXED)]) for n in range(12)]
    drained: Future[bool] = Future()
    threading.Thread(target=lambda: drained.set_result(made.engine.drain(WAIT_S))).start()
    while not made.engine.status().draining:
        pass
    late = made.ask(MIXED[0]).result(WAIT_S)
    assert isinstance(late, Refusal)
    assert late.code is RefusalCode.DRAINING
    made.runner.gate.set()
    assert drained.result(WAIT_S)
    for number, answer in enumerate(taken):
        assert same(answer.result(0), expected(MIXED[number % len(MIXED)]))


def test_a_drain_that_takes_too_long_refuses_what_is_left(make: Make) -> None:
    made = make(20, open_=False)
    taken = [made.ask(MIXED[n % len(MIXED)]) for n in range(12)]
    assert made.runner.entered.wait(WAIT_S)
    assert not made.engine.drain(0.0)
    for answer in taken:
        refusal = answer.result(0)
        assert isinstance(refusal, Refusal)
        assert refusal.code is RefusalCode.DRAINING
    assert made.engine.status().pages.held > 0, "pages returned under a step in flight"
    made.runner.gate.set()
    assert made.engine.drain(WAIT_S)
    assert made.engine.status().pages.held == 0


def test_a_probe_after_the_engine_has_stopped_is_refused(make: Make) -> None:
    made = make()
    made.engine.close()
    outcome = made.ask(Embed((1, 2, 3)), probe=True).result(WAIT_S)
    assert isinstance(outcome, Refusal)
    assert outcome.code is RefusalCode.NOT_READY
    assert "closed" in outcome.message


def test_whoever_submits_does_not_wait_for_the_lock_and_is_answered_by_who_lets_go_of_it(make: Make) -> None:
    made = make()
    with made.engine._locked():
        served = made.ask(MIXED[0])  # would wait for ever for a lock that this thread has
        assert not served.done()
    assert not isinstance(served.result(WAIT_S), Refusal | Failed)
    made.engine.close()
    with made.engine._locked():  # no step loop is there any more to take it in
        refused = made.ask(MIXED[0])
        assert not refused.done()
    assert isinstance(refused.result(0), Refusal)


def test_the_wait_for_admission_begins_with_the_arrival(make: Make) -> None:
    now = [100.0]
    made = make(clock=lambda: now[0])
    with made.engine._locked():  # as the step loop holds it: what arrives is taken in later
        answer = made.ask(Embed((1, 2)))
        now[0] += 0.25
    outcome = answer.result(WAIT_S)
    assert isinstance(outcome, Embedded)
    assert (outcome.timing.queue_ms, outcome.timing.run_ms) == (250.0, 0.0)


def test_whoever_supplies_or_cancels_does_not_wait_for_the_lock(make: Make) -> None:
    made = make()
    vectors: list[Future[tuple[float, ...]]] = [Future(), Future()]
    answers: list[Future[Outcome]] = [Future(), Future()]
    handles = [
        made.engine.submit(
            Rank((4, 5), 3, 8, (6,), 1, 2), on_done=answer.set_result, on_vector=vector.set_result
        )
        for answer, vector in zip(answers, vectors, strict=True)
    ]
    for vector in vectors:
        vector.result(WAIT_S)
    with made.engine._locked():
        handles[0].supply(((1, 2), (3,)))
        handles[1].cancel()
        with pytest.raises(ValueError, match="once"):
            handles[0].supply(((1, 2),))
        assert not any(answer.done() for answer in answers)
    assert isinstance(answers[0].result(WAIT_S), Scored)
    assert isinstance(answers[1].result(WAIT_S), Cancelled)


def test_prefixes_before_the_vector_are_an_error_and_after_the_end_are_too_late(make: Make) -> None:
    made = make(open_=False)
    answer: Future[Outcome] = Future()
    handle = made.engine.submit(Rank((4, 5), 3, 8, (6,), 1, 2), on_done=answer.set_result)
    with pytest.raises(ValueError, match="after the query's vector"):
        handle.supply(((1, 2),))
    handle.cancel()
    assert isinstance(answer.result(WAIT_S), Cancelled)
    handle.supply(((1, 2),))


def test_a_request_can_be_cancelled_before_it_is_taken_in(make: Make) -> None:
    made = make(open_=False)
    answer: Future[Outcome] = Future()
    with made.engine._lock:  # let go of without taking anything in
        handle = made.engine.submit(MIXED[0], on_done=answer.set_result)
    handle.cancel()
    assert isinstance(answer.result(WAIT_S), Cancelled)


def test_close_leaves_nothing_unanswered(make: Make) -> None:
    made = make(20, open_=False, depth=2)
    taken = [made.ask(MIXED[n % len(MIXED)]) for n in range(12)]
    assert made.runner.entered.wait(WAIT_S)
    closing = threading.Thread(target=made.engine.close)
    with made.engine._changed:
        closing.start()
        assert made.engine._changed.wait_for(lambda: made.engine._stopping, WAIT_S)
    made.runner.gate.set()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    outcomes = [answer.result(0) for answer in taken]
    assert all(isinstance(each, Refusal | Embedded | Scored | Generated) for each in outcomes)
    assert any(isinstance(each, Refusal) and each.code is RefusalCode.NOT_READY for each in outcomes)
    assert made.engine.status().pages.held == 0
    made.engine.close()


def test_a_callback_that_raises_harms_nobody(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    made = make()

    def broken(outcome: Outcome) -> None:
        raise RuntimeError("not my day")

    made.engine.submit(MIXED[0], on_done=broken)
    assert same(made.ask(MIXED[1]).result(WAIT_S), expected(MIXED[1]))
    assert "not my day" in caplog.text


def test_a_callback_may_submit(make: Make) -> None:
    made = make()
    second: Future[Outcome] = Future()
    made.engine.submit(
        MIXED[0], on_done=lambda outcome: made.engine.submit(MIXED[1], on_done=second.set_result)
    )
    assert same(second.result(WAIT_S), expected(MIXED[1]))


def test_a_deadline_ends_a_request_while_nothing_runs(make: Make) -> None:
    made = make()
    vector: Future[tuple[float, ...]] = Future()
    answer: Future[Outcome] = Future()
    made.engine.submit(
        Rank((1,), 1, 4, (1,), 1, 2),
        deadline=time.monotonic() + 0.05,
        on_done=answer.set_result,
        on_vector=vector.set_result,
    )
    assert vector.result(WAIT_S)
    refusal = answer.result(WAIT_S)
    assert isinstance(refusal, Refusal)
    assert refusal.code is RefusalCode.DEADLINE
    assert made.engine.status().pages.held == 0


def test_ten_thousand_refusals_are_ten_thousand_answers(make: Make) -> None:
    made = make(8, open_=False, max_queue=0)
    blocker = made.ask(Embed((1,) * 32))
    refusals = [made.ask(Embed((2,) * 30), caller=str(n)) for n in range(10_000)]
    outcomes = [each.result(WAIT_S) for each in refusals]  # while the step is still under way
    assert not blocker.done()
    for outcome in outcomes:
        assert isinstance(outcome, Refusal)
        assert (outcome.code, outcome.page_deficit) == (RefusalCode.QUEUE_FULL, 8)
    made.runner.gate.set()
    assert same(blocker.result(WAIT_S), expected(Embed((1,) * 32)))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Embed(()), "tokens must not be empty"),
        (Embed((1, VOCABULARY)), f"tokens must be from 0 to {VOCABULARY - 1}, one is {VOCABULARY}"),
        (Embed((-1,)), "one is -1"),
        (Embed((1,) * 4097), "the text has 4,097 tokens, the model's context is 4,096"),
        (Embed((1,), keep=-1), "keep"),
        (Generate((1,), 0), "max_tokens must be at least 1"),
        (Generate((1,) * 4000, 98), "prompt and output have 4,097"),
        (Generate((1,), 1, temperature=-1.0), "temperature"),
        (Generate((1,), 1, temperature=float("nan")), "temperature"),
        (Score(((1,), ()), (), 1, 2), "prefix tokens must not be empty"),
        (Score(((1,),), (1,), 1, VOCABULARY), "positive and negative"),
        (Score(((1,),), (1,), 1, 2, window=0), "window must be at least 1"),
        (Score(((1,) * 4096,), (1,), 1, 2), "prefix and suffix have 4,097"),
        (Rank((), 1, 1, (1,), 1, 2), "query tokens must not be empty"),
        (Rank((1,), 0, 1, (1,), 1, 2), "rows and prefix_tokens must be at least 1"),
        (Rank((1,), 1, 1, (), 1, 2), "suffix tokens must not be empty"),
        (Rank((1,), 1, 4096, (1,), 1, 2), "prefix and suffix have 4,097"),
    ],
)
def test_requests_that_make_no_sense(make: Make, request_: Request, message: str) -> None:
    made = make(4)
    with pytest.raises(ValueError, match=message):
        made.ask(request_)
    assert made.engine.status().waiting == 0


# The client on an event loop.


def test_the_client_runs_all_kinds_at_once(make: Make) -> None:
    made = make(24)
    client = LocalClient(made.engine)

    async def all_at_once() -> list[Outcome]:
        return list(await asyncio.gather(*(client.run(MIXED[n % 5], caller=str(n)) for n in range(50))))

    for number, outcome in enumerate(asyncio.run(all_at_once())):
        assert same(outcome, expected(MIXED[number % 5]))
    # A second loop, after the first was closed.
    assert same(asyncio.run(client.run(MIXED[0])), expected(MIXED[0]))


def test_the_client_ranks(make: Make) -> None:
    client = LocalClient(make().engine)
    request = Rank((4, 5), 3, 8, (6,), 1, 2)
    chosen = ((1,) * 8, (2,) * 5)
    seen: list[tuple[float, ...]] = []

    def choose(vector: object) -> tuple[tuple[int, ...], ...]:
        seen.append(tuple(vector))
        return chosen

    outcome = asyncio.run(client.rank(request, choose))
    assert same(outcome, expected(request, chosen))
    vector = expected(Embed((4, 5)))
    assert isinstance(vector, Embedded)
    assert seen == [vector.vector]


@pytest.mark.parametrize("prefixes", [((1,) * 9,), ((1,),) * 4, ((VOCABULARY,),)])
def test_a_bad_choice_raises_and_frees_the_pages(make: Make, prefixes: tuple[tuple[int, ...], ...]) -> None:
    made = make()
    with pytest.raises(ValueError, match="prefix"):
        asyncio.run(LocalClient(made.engine).rank(Rank((4, 5), 3, 8, (6,), 1, 2), lambda vector: prefixes))
    assert made.engine.drain(WAIT_S)
    assert made.engine.status().pages.held == 0


def test_a_rank_that_is_refused_never_asks_for_prefixes(make: Make) -> None:
    client = LocalClient(make(2).engine)

    def choose(vector: object) -> tuple[tuple[int, ...], ...]:
        raise AssertionError("asked")

    outcome = asyncio.run(client.rank(Rank((4, 5), 3, 80, (6,), 1, 2), choose))
    assert isinstance(outcome, Refusal)
    assert outcome.code is RefusalCode.REQUEST_TOO_LARGE


@pytest.mark.interpreted
def test_cancelling_the_task_cancels_the_request(make: Make) -> None:
    made = make(open_=False)
    client = LocalClient(made.engine)
    outcomes: list[Outcome] = []

    async def hang_up() -> None:
        task = asyncio.create_task(client.run(Generate((1, 2), 50)))
        await asyncio.to_thread(made.runner.entered.wait, WAIT_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    original = made.engine._core._end
    made.engine._core._end = lambda task, outcome: (outcomes.append(outcome), original(task, outcome))
    asyncio.run(hang_up())
    assert outcomes == [Cancelled()]
    made.runner.gate.set()
    assert made.engine.drain(WAIT_S)
    assert made.engine.status().pages.held == 0


def test_a_deadline_is_told_while_a_step_still_runs(make: Make) -> None:
    made = make(open_=False)
    outcome = asyncio.run(LocalClient(made.engine).run(Embed((1,)), deadline=time.monotonic() + 0.05))
    assert isinstance(outcome, Refusal)
    assert outcome.code is RefusalCode.DEADLINE
    assert not made.runner.gate.is_set()


def test_the_loop_is_woken_once_for_all_that_a_step_brought(make: Make) -> None:
    made = make(60, open_=False, step_tokens=64, step_rows=32)
    client = LocalClient(made.engine)

    async def many() -> int:
        loop = asyncio.get_running_loop()
        wakes = 0
        plain = loop.call_soon_threadsafe

        def counted(*arguments: object, **named: object) -> object:
            nonlocal wakes
            wakes += threading.current_thread().name == "engine"
            return plain(*arguments, **named)

        loop.call_soon_threadsafe = counted
        tasks = [asyncio.create_task(client.run(Embed((n,) * 3))) for n in range(20)]
        await asyncio.to_thread(made.runner.entered.wait, WAIT_S)
        made.runner.gate.set()
        await asyncio.gather(*tasks)
        return wakes

    wakes, steps = asyncio.run(many()), made.engine.status().steps
    assert 0 < wakes <= steps


@pytest.mark.interpreted
def test_an_idle_engine_sleeps(make: Make) -> None:
    made = make()
    made.ask(MIXED[0]).result(WAIT_S)
    looked = 0
    begin = made.engine._core.begin_step

    def counted(now: float) -> object:
        nonlocal looked
        looked += 1
        return begin(now)

    made.engine._core.begin_step = counted
    threading.Event().wait(0.2)
    assert looked <= 1


def test_threads_ask_at_once(make: Make) -> None:
    made = make(24, depth=2)
    answers: list[list[Future[Outcome]]] = [[] for _ in range(4)]

    def asking(index: int) -> None:
        for number in range(100):
            answers[index].append(made.ask(MIXED[number % 5], caller=str(index)))

    threads = [threading.Thread(target=asking, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    for each in answers:
        assert not wait(each, WAIT_S).not_done
        assert all(same(each[n].result(), expected(MIXED[n % 5])) for n in range(100))
    assert made.engine.drain(WAIT_S)
    assert made.engine.status().pages.held == 0


def test_exported_names_are_sorted_and_there() -> None:
    assert package.__all__ == sorted(package.__all__)
    assert all(hasattr(package, name) for name in package.__all__)
