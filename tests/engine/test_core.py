"""The engine without its thread, over a model that is a hash: every answer is checked against its own
tokens, freed pages are poisoned, and the pool is rebuilt after every change."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.core import Core, CoreLimits, Step
from engine.errors import EngineFault, Refusal, RefusalCode
from engine.pages import PagePool
from engine.queue import Bypass, WaitQueue
from engine.request import (
    Cancelled,
    Embed,
    Embedded,
    Failed,
    Generate,
    Generated,
    Rank,
    Request,
    Score,
    Scored,
    Tokens,
)
from engine.runner import ReadPair, single_reads
from engine.schedule import StepLimits
from engine.task import RankTask, Task, Terms
from tests.engine.fakes import VOCABULARY, Asked, World, expected, make_core, same

SIZE = 4
# Prefixes that branch from each other, some ending inside a page.
PREFIXES: list[Tokens] = [(a,) * 4 + (b,) * n for a in (1, 2) for b in (3, 4) for n in (0, 2, 4, 7, 8)]
prefixes = st.lists(st.sampled_from(PREFIXES), min_size=0, max_size=6).map(tuple)
texts = st.lists(st.sampled_from((5, 6)), min_size=1, max_size=8).map(tuple)
windows = st.one_of(st.none(), st.integers(1, 3))


class Odd:
    """A constraint: only odd tokens."""

    def allowed(self, output: Sequence[int]) -> Sequence[int]:
        return range(1, VOCABULARY, 2)


requests = st.one_of(
    st.builds(lambda p, t, k: Embed(p + t, k), st.sampled_from(PREFIXES), texts, st.integers(0, 12)),
    st.builds(lambda p, k: Embed(p, k), st.sampled_from(PREFIXES), st.integers(0, 12)),
    st.builds(
        lambda p, t, m, s, c, k: Generate(p + t, m, frozenset(s), constraint=c, keep=k),
        st.sampled_from(PREFIXES),
        texts,
        st.integers(1, 9),
        st.sets(st.integers(0, VOCABULARY - 1), max_size=20),
        st.sampled_from((None, Odd())),
        st.integers(0, 12),
    ),
    st.builds(lambda p, s, w: Score(p, s, 1, 2, w), prefixes, texts, windows),
    st.builds(lambda p, w: Score(p, (), 1, 2, w), prefixes, windows),
    st.builds(lambda q, n, s, w: Rank(q, n, 12, s, 1, 2, w), texts, st.integers(1, 6), texts, windows),
)


class CoreMachine(RuleBasedStateMachine):
    """Requests of all kinds come, are cancelled, expire, and are served, in pools down to one page."""

    @initialize(
        pages=st.integers(1, 24),
        depth=st.integers(1, 2),
        step_tokens=st.integers(1, 24),
        step_rows=st.integers(1, 6),
    )
    def start(self, pages: int, depth: int, step_tokens: int, step_rows: int) -> None:
        core, runner = make_core(pages, SIZE, step_tokens=step_tokens, step_rows=step_rows, depth=depth)
        self.world = World(core, runner)
        self.expects: dict[Asked, str] = {}

    @rule(
        request=requests,
        caller=st.sampled_from("ab"),
        patience=st.one_of(st.none(), st.none(), st.floats(0.0, 2.0)),
    )
    def submit(self, request: Request, caller: str, patience: float | None) -> None:
        world = self.world
        before = world.core.pool.counts()
        deadline = None if patience is None else world.now + patience
        asked = world.submit(request, deadline=deadline, caller=caller)
        if asked.outcomes and isinstance(asked.outcome, Refusal):
            assert asked.outcome.pages_total == before.total
            assert world.core.pool.counts() == before, "a refusal changed the pages"
        self.expects[asked] = "any" if patience is not None else "answer"

    @precondition(lambda self: self.world.core.running or len(self.world.core.queue))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        open_ = [each for each in self.world.asked if not each.outcomes]
        if open_:
            asked = data.draw(st.sampled_from(open_))
            self.world.cancel(asked)
            assert asked.outcome == Cancelled()
            self.expects[asked] = "cancelled"

    @rule()
    def launch(self) -> None:
        self.world.launch()

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.world.step()

    @rule()
    def collect(self) -> None:
        self.world.collect()

    @rule(seconds=st.floats(0.0, 1.0))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds

    @precondition(lambda self: self.world.due)
    @rule(chosen=prefixes, data=st.data())
    def supply(self, chosen: tuple[Tokens, ...], data: st.DataObject) -> None:
        asked = data.draw(st.sampled_from(self.world.due))
        assert isinstance(asked.request, Rank)
        self.world.supply(asked, chosen[: asked.request.rows])

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        """Whatever came before, everything ends, and every page comes back."""
        if not hasattr(self, "world"):
            return
        world = self.world
        for _ in range(3000):
            for asked in world.due:
                assert isinstance(asked.request, Rank)
                world.supply(asked, tuple(PREFIXES[: asked.request.rows]))
            if not world.step() and not world.due:
                break
        self.adds_up()
        assert world.core.idle, "requests that fit alone do not come to an end"
        assert world.core.pool.counts().held == 0
        for asked in world.asked:
            outcome, expects = asked.outcome, self.expects[asked]
            if expects == "answer" and isinstance(outcome, Refusal):
                assert outcome.code is RefusalCode.REQUEST_TOO_LARGE
                assert outcome.pages_needed > outcome.pages_total
            elif expects == "answer":
                assert isinstance(outcome, Embedded | Scored | Generated)
            elif expects == "cancelled":
                assert outcome == Cancelled()


CoreMachine.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
TestCore = CoreMachine.TestCase


def random_request(rng: random.Random) -> Request:
    chosen = tuple(rng.choice(PREFIXES) for _ in range(rng.randrange(1, 7)))
    tail = tuple(rng.choice((5, 6)) for _ in range(rng.randrange(1, 9)))
    kinds: list[Request] = [
        Embed(chosen[0] + tail, rng.randrange(12)),
        Generate(chosen[0] + tail, rng.randrange(1, 12), keep=rng.randrange(12)),
        Score(chosen, tail, 1, 2, rng.choice((None, 1, 2))),
        Rank(tail, len(chosen), 12, tail, 1, 2),
    ]
    return rng.choice(kinds)


@pytest.mark.parametrize("depth", [1, 2])
def test_thousands_of_requests_in_a_small_pool(depth: int) -> None:
    """Long runs reach states that short ones do not: everything is checked after every step."""
    rng = random.Random(depth)
    core, runner = make_core(40, SIZE, step_tokens=24, step_rows=8, depth=depth)
    world = World(core, runner)
    ended = 0
    for number in range(3000):
        deadline = world.now + rng.expovariate(2.0) if rng.random() < 0.1 else None
        world.submit(random_request(rng), deadline=deadline, caller=f"c{rng.randrange(3)}")
        for asked in world.due:
            assert isinstance(asked.request, Rank)
            world.supply(asked, tuple(rng.choices(PREFIXES, k=rng.randrange(asked.request.rows + 1))))
        if rng.random() < 0.1:
            world.cancel(rng.choice(world.asked))
        for _ in range(rng.randrange(8)):
            world.step()
        world.check()
        ended += sum(bool(each.outcomes) for each in world.asked)
        world.asked = [each for each in world.asked if not each.outcomes]
        if number % 50 == 49:  # let the queue run dry now and then
            while world.step() or world.due:
                for asked in world.due:
                    world.supply(asked, ())
            assert core.idle
            assert core.pool.counts().held == 0
    assert ended + len(world.asked) == 3000


def test_resident_prefixes_are_shared_and_a_part_full_page_serves_many_rows_at_once() -> None:
    core, runner = make_core(40, SIZE, step_tokens=64, step_rows=16)
    world = World(core, runner)
    shared = (1,) * 10  # two whole pages and half of a third
    rows = (shared,) * 6
    world.submit(Score((shared,), (5,), 1, 2))
    world.run()
    asked = world.submit(Score(rows, (5, 6, 5), 1, 2))
    world.run()
    answer = asked.outcome
    assert isinstance(answer, Scored)
    assert same(answer, expected(asked.request))
    assert answer.usage.cached_tokens == 6 * 8
    assert answer.usage.pages == 2 + 6 * 2  # the two shared ones, and for each row the rest
    assert core.pool.counts().cached == 2


def test_a_prompt_that_is_resident_as_a_whole_computes_its_last_page() -> None:
    core, runner = make_core(10, SIZE)
    world = World(core, runner)
    for cached in (0, 4, 4):
        asked = world.submit(Embed((1,) * 8, keep=8))
        world.run()
        assert isinstance(asked.outcome, Embedded)
        assert asked.outcome.usage.cached_tokens == cached
        assert core.pool.counts().cached == 2


def test_a_group_streams_through_one_row_where_no_more_fits() -> None:
    core, runner = make_core(4, SIZE, step_tokens=64, step_rows=16)
    world = World(core, runner)
    asked = world.submit(Score(tuple(PREFIXES[4::5]), (5, 6), 1, 2))
    world.run()
    assert isinstance(asked.outcome, Scored)
    assert asked.outcome.usage.pages == 4


def test_pages_of_rows_that_are_no_more_return_before_the_group_ends() -> None:
    core, runner = make_core(60, SIZE, step_tokens=6, step_rows=16)
    world = World(core, runner)
    rows = tuple((token,) for token in range(10, 20))
    asked = world.submit(Score(rows, (5, 6), 1, 2))
    held = []
    while not asked.outcomes:
        world.step()
        held.append(core.pool.counts().held)
    assert held == sorted(held, reverse=True)
    assert len(set(held)) >= 3


def test_a_prefix_is_evictable_again_as_soon_as_its_row_has_ended() -> None:
    core, runner = make_core(60, SIZE, step_tokens=6, step_rows=16)
    world = World(core, runner)
    rows = tuple((token,) * 4 for token in range(10, 20))
    for _ in range(2):  # the second time all prefixes are resident, and pinned from the beginning
        asked = world.submit(Score(rows, (5, 6, 5), 1, 2, window=2))
        cached = []
        while not asked.outcomes:
            world.step()
            cached.append(core.pool.counts().cached)
        assert cached == sorted(cached)
        assert len(set(cached)) >= 4


def test_a_group_that_waited_uses_what_is_resident_when_it_is_admitted() -> None:
    core, runner = make_core(8, SIZE, step_tokens=8)
    world = World(core, runner)
    prefix = (1,) * 8
    world.submit(Embed(prefix, keep=8))
    world.run()
    assert core.pool.counts().cached == 2
    world.submit(Generate((9,) * 8, max_tokens=9))
    waiting = world.submit(Score((prefix,), (5,) * 13, 1, 2))  # four pages of its own, two are free
    world.submit(Embed((8,) * 12))  # takes a page of the prefix's
    world.step()
    assert core.pool.counts().cached == 1
    assert waiting.task in core.queue
    world.run()
    assert isinstance(waiting.outcome, Scored)
    assert waiting.outcome.usage.cached_tokens == 4


def test_a_group_that_waited_reuses_what_others_have_published_meanwhile() -> None:
    core, runner = make_core(12, SIZE, step_tokens=8)
    world = World(core, runner)
    prefix = (1,) * 8
    world.submit(Embed((9,) * 24))
    world.submit(Embed(prefix, keep=8))
    waiting = world.submit(Score((prefix,), (5,) * 13, 1, 2))
    assert waiting.task in core.queue
    world.run()
    assert isinstance(waiting.outcome, Scored)
    assert waiting.outcome.usage.cached_tokens == 8


def test_a_rank_takes_what_its_prefixes_need_once_they_are_known() -> None:
    core, runner = make_core(320, SIZE, step_tokens=64, step_rows=16)
    world = World(core, runner)
    warm = world.submit(Score(tuple(PREFIXES[4::5]), (5,), 1, 2))
    world.run()
    assert isinstance(warm.outcome, Scored)
    rank = world.submit(Rank((5, 6), 4, 12, (5, 5), 1, 2))
    world.run()
    before = core.pool.counts()
    assert before.held == 4  # of one row of four pages: no more is taken for rows that are not known
    world.supply(rank, tuple(PREFIXES[4::5]))
    assert core.pool.counts().held - 3 * 4 <= 4 * 1  # beside what is resident, a page for each row
    world.run()
    assert isinstance(rank.outcome, Scored)
    assert rank.outcome.usage.prompt_tokens == 2 + sum(map(len, PREFIXES[4::5])) + 4 * 2


def test_a_rank_takes_no_more_pages_while_others_wait_for_theirs() -> None:
    core, runner = make_core(12, SIZE, step_tokens=64, step_rows=16)
    world = World(core, runner)
    rank = world.submit(Rank((5, 6), 4, 12, (5, 5), 1, 2))
    world.run()
    waiting = world.submit(Generate((7,) * 40, 4))  # eleven pages, of which eight are free
    world.run()
    assert waiting.task in core.queue
    world.supply(rank, tuple(PREFIXES[4::5]))
    assert core.pool.counts().held == 4
    world.run()
    assert isinstance(rank.outcome, Scored)
    assert isinstance(waiting.outcome, Generated)


def test_a_rank_takes_no_more_pages_while_one_that_was_short_of_them_waits_for_its_next_turn() -> None:
    core, runner = make_core(29, SIZE, step_tokens=16, step_rows=16)
    world = World(core, runner)
    rank = world.submit(Rank((5, 6), 4, 12, (5, 5), 1, 2))
    world.run()
    waiting = world.submit(Generate((7,) * 100, 4))  # 26 pages, of which 25 are free
    passing = world.submit(Embed((8,) * 48))  # feeds the device for three steps: nobody's turn comes
    world.launch()
    assert (waiting.task in core.queue, passing.task in core.queue) == (True, False)
    world.collect()
    world.launch()
    world.supply(rank, tuple(PREFIXES[4::5]))
    assert core.pool.counts().held == 4 + 12
    world.run()
    assert isinstance(rank.outcome, Scored)
    assert isinstance(waiting.outcome, Generated)


def test_ranks_hold_a_part_of_the_pool_for_rows_that_are_not_known_while_others_run() -> None:
    core, runner = make_core(64, SIZE, step_tokens=64, depth=2)  # 16 pages in all, four each
    world = World(core, runner)
    runs = world.submit(Generate((9,) * 8, 30))
    ranks = [world.submit(Rank((5, number), 4, 12, (5, 5), 1, 2)) for number in range(10)]
    admitted = [rank for rank in ranks if rank.task not in core.queue]
    assert len(admitted) == 4
    for _ in range(6):
        world.step()
        assert sum(rank.task not in core.queue for rank in ranks) == 4
    world.supply(admitted[0], (PREFIXES[4],))  # one has its rows: the next takes its place
    world.step()
    assert sum(rank.task not in core.queue for rank in ranks) == 5
    world.run()
    assert isinstance(runs.outcome, Generated)
    assert sum(rank.task not in core.queue for rank in ranks) == 10  # nothing else runs


def test_a_rank_without_prefixes_is_answered_at_once() -> None:
    core, runner = make_core(20, SIZE)
    world = World(core, runner)
    rank = world.submit(Rank((5, 6), 4, 12, (5, 5), 1, 2))
    world.run()
    world.supply(rank, ())
    assert isinstance(rank.outcome, Scored)
    assert rank.outcome.probabilities == ()
    assert core.pool.counts().held == 0


@pytest.mark.parametrize(
    ("chosen", "message"),
    [(tuple(PREFIXES[:5]), "5 prefixes"), (((1,) * 13,), "13 tokens")],
)
def test_a_rank_takes_no_more_than_it_asked_for(chosen: tuple[Tokens, ...], message: str) -> None:
    core, runner = make_core(20, SIZE)
    world = World(core, runner)
    rank = world.submit(Rank((5, 6), 4, 12, (5, 5), 1, 2))
    with pytest.raises(ValueError, match="after the query's vector"):
        core.supply(rank.task, (), 0.0)  # type: ignore[arg-type]
    world.run()
    with pytest.raises(ValueError, match=message):
        core.supply(rank.task, chosen, 0.0)  # type: ignore[arg-type]
    world.supply(rank, ((1,) * 12,))
    world.run()
    assert isinstance(rank.outcome, Scored)


def test_a_rank_waiting_for_its_prefixes_expires_and_can_be_cancelled() -> None:
    core, runner = make_core(20, SIZE)
    world = World(core, runner)
    late = world.submit(Rank((5, 6), 4, 12, (5, 5), 1, 2), deadline=1.0)
    gone = world.submit(Rank((6, 6), 4, 12, (5, 5), 1, 2))
    world.run()
    assert core.next_deadline() == 1.0
    world.cancel(gone)
    world.now = 1.0
    world.step()
    assert isinstance(late.outcome, Refusal)
    assert late.outcome.code is RefusalCode.DEADLINE
    assert core.pool.counts().held == 0
    core.supply(late.task, tuple(PREFIXES), 1.0)  # type: ignore[arg-type]
    assert core.idle


STAGES = ["queued", "admitted", "in flight", "between steps", "decoding", "ended"]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", ["cancel", "expire"])
def test_an_end_from_outside_at_every_stage(stage: str, how: str) -> None:
    core, runner = make_core(12, SIZE, step_tokens=8, step_rows=4)
    world = World(core, runner)
    if stage == "queued":
        world.submit(Generate((9,) * 40, max_tokens=4))
    asked = world.submit(Generate((1,) * 17, max_tokens=8))
    for _ in range({"between steps": 1, "decoding": 4, "ended": 60}.get(stage, 0)):
        world.step()
    if stage == "in flight":
        world.launch()
    assert asked.task is not None
    held = core.pool.counts().held
    before = list(asked.outcomes)
    if how == "cancel":
        world.cancel(asked)
    else:
        core.expire(asked.task)
        world.tell()
    if stage == "ended":
        assert asked.outcomes == before
        assert isinstance(asked.outcome, Generated)
        return
    assert isinstance(asked.outcome, Cancelled if how == "cancel" else Refusal)
    if stage == "in flight":
        assert core.pool.counts().held == held, "pages returned under a step in flight"
    world.collect()
    world.run()
    assert core.idle
    assert core.pool.counts().held == 0


def test_a_deadline_that_cannot_be_met_is_refused_at_once_and_computes_nothing() -> None:
    core, runner = make_core(100, SIZE, step_tokens=8)
    world = World(core, runner, step_s=1.0)
    world.submit(Embed((1,) * 32))
    world.run()  # four seconds for 32 tokens
    launches = runner.launches
    hopeless = world.submit(Embed((2,) * 80), deadline=world.now + 9.0)
    feasible = world.submit(Embed((2,) * 64), deadline=world.now + 9.0)
    assert isinstance(hopeless.outcome, Refusal)
    assert hopeless.outcome.code is RefusalCode.DEADLINE
    assert hopeless.outcome.page_deficit == 0
    world.run()
    assert isinstance(feasible.outcome, Embedded)
    assert runner.launches == launches + 8


def test_pages_that_do_not_come_in_time_are_said_to_be_short() -> None:
    core, runner = make_core(10, SIZE, step_tokens=8)
    world = World(core, runner, step_s=1.0)
    world.submit(Embed((1,) * 8))
    world.run()
    world.submit(Generate((3,) * 16, max_tokens=20))
    short = world.submit(Embed((2,) * 8), deadline=world.now + 2.0)
    refusal = short.outcome
    assert isinstance(refusal, Refusal)
    assert refusal.code is RefusalCode.PAGES_SHORT
    assert (refusal.pages_needed, refusal.pages_free, refusal.page_deficit) == (2, 1, 1)
    assert refusal.retry_after_ms is not None
    assert refusal.message.startswith("The request needs 2 pages, 1 free of 10: 1 short")


def test_a_short_request_is_admitted_past_long_ones_and_ends_first() -> None:
    core, runner = make_core(400, SIZE, step_tokens=16, step_rows=16)
    world = World(core, runner)
    long = [world.submit(Score(tuple((n, m) for m in range(60)), (5,) * 6, 1, 2)) for n in range(10, 14)]
    for _ in range(3):
        world.step()
    short = world.submit(Score(((1,), (2,)), (5, 6), 1, 2))
    for _ in range(3):
        world.step()
    assert short.outcomes
    assert not any(each.outcomes for each in long)


def test_a_stream_of_short_requests_does_not_keep_a_long_one_out() -> None:
    core, runner = make_core(400, SIZE, step_tokens=16, step_rows=16)
    world = World(core, runner)
    for number in range(20):
        world.submit(Embed((number,) * 8), caller="short")
    long = world.submit(Embed((90,) * 100), caller="long")
    for number in range(150):
        for more in range(3):
            world.submit(Embed((number % 90, more) * 4), caller="short")
        world.step()
        if long.outcomes:
            break
    assert isinstance(long.outcome, Embedded)
    assert len(core.queue) > 20, "short ones kept waiting all the time"


def test_callers_share_the_engine_whatever_they_ask() -> None:
    core, runner = make_core(400, SIZE, step_tokens=16, step_rows=16)
    world = World(core, runner)
    greedy = [world.submit(Embed((n % 90, 1, 2, 3, 4, 5, 6, 7)), caller="greedy") for n in range(300)]
    for _ in range(5):
        world.step()
    modest = world.submit(Embed((91,) * 8), caller="modest")
    ended = sum(bool(each.outcomes) for each in greedy)
    while not modest.outcomes:
        world.step()
    assert sum(bool(each.outcomes) for each in greedy) - ended <= 12


def test_requests_passed_often_run_one_at_a_time() -> None:
    core, runner = make_core(400, SIZE, step_tokens=4, step_rows=16)
    core.queue = WaitQueue(Bypass(admissions=0))
    world = World(core, runner)
    world.submit(Score(((1, 2), (3, 4)), (5,) * 6, 1, 2))
    long = [world.submit(Embed((number,) * 200), caller=str(number)) for number in range(90, 94)]
    world.launch()
    assert [each.task in core.queue for each in long] == [False, True, True, True]
    world.cancel(long[0])
    world.step()
    world.launch()
    assert [each.task in core.queue for each in long[1:]] == [False, True, True]


def test_a_request_whose_caller_chooses_keeps_nobody_waiting() -> None:
    core, runner = make_core(100, SIZE, step_tokens=4)
    world = World(core, runner)
    rank = world.submit(Rank((5, 6), 8, 12, (5, 5), 1, 2))
    world.run()
    assert world.due == [rank]
    other = world.submit(Embed((1,) * 40))
    world.run()
    assert isinstance(other.outcome, Embedded)


def test_a_refused_request_that_ran_had_its_pages() -> None:
    core, runner = make_core(10, SIZE, step_tokens=8)
    world = World(core, runner)
    asked = world.submit(Embed((1,) * 24))
    world.launch()
    assert asked.task is not None
    core.expire(asked.task)
    world.tell()
    refusal = asked.outcome
    assert isinstance(refusal, Refusal)
    assert (refusal.pages_needed, refusal.pages_free, refusal.page_deficit) == (6, 10, 0)


def test_an_old_rate_does_not_refuse_for_ever() -> None:
    core, runner = make_core(100, SIZE, step_tokens=8)
    world = World(core, runner, step_s=1.0)  # beside a neighbour, which then leaves
    world.submit(Embed((1,) * 32))
    world.run()
    world.step_s = 0.01
    refused = world.submit(Embed((2,) * 80), deadline=world.now + 5.0)
    assert isinstance(refused.outcome, Refusal)
    world.now += 60.0
    tried = world.submit(Embed((2,) * 80), deadline=world.now + 5.0)
    world.run()
    assert isinstance(tried.outcome, Embedded)


class Broken:
    """A constraint that fails, or allows what does not exist."""

    def __init__(self, allowed: Sequence[int] | None) -> None:
        self._allowed = allowed

    def allowed(self, output: Sequence[int]) -> Sequence[int]:
        if self._allowed is None:
            raise KeyError("gone")
        return self._allowed


@pytest.mark.parametrize("allowed", [None, [], [VOCABULARY], [-1]])
def test_a_broken_constraint_fails_its_own_request_alone(allowed: Sequence[int] | None) -> None:
    core, runner = make_core(20, SIZE)
    world = World(core, runner)
    broken = world.submit(Generate((1, 2), 4, constraint=Broken(allowed)))
    other = world.submit(Generate((1, 2), 4))
    world.run()
    assert isinstance(broken.outcome, Failed)
    assert broken.outcome.code == "constraint_fault"
    assert isinstance(other.outcome, Generated)
    assert core.pool.counts().held == 0


def test_nothing_is_taken_before_the_engine_is_ready_or_when_it_drains() -> None:
    core, runner = make_core(20, SIZE)
    world = World(core, runner)
    core.not_ready = "it is loading"
    early = world.submit(Score((), (1,), 1, 2))
    core.not_ready = ""
    core.draining = True
    late = world.submit(Embed((1,)))
    assert isinstance(early.outcome, Refusal)
    assert early.outcome.code is RefusalCode.NOT_READY
    assert "it is loading" in early.outcome.message
    assert isinstance(late.outcome, Refusal)
    assert late.outcome.code is RefusalCode.DRAINING


def test_deadlines_of_ended_requests_do_not_pile_up() -> None:
    core, runner = make_core(20, SIZE)
    world = World(core, runner)
    for number in range(2000):
        world.submit(Embed((number % 90,)), deadline=1e9)
        world.run()
        world.asked.clear()
    assert len(core._deadlines) < 1000


def test_pages_are_not_released_under_a_step() -> None:
    core, runner = make_core(20, SIZE)
    world = World(core, runner)
    asked = world.submit(Embed((1,) * 8))
    world.launch()
    assert asked.task is not None
    with pytest.raises(EngineFault, match="in flight"):
        asked.task.release()


@pytest.mark.parametrize("limits", [StepLimits(512, 512), StepLimits.for_slow_steps(512, 512)])
def test_rows_start_of_no_more_requests_than_the_next_step_has_room_for(limits: StepLimits) -> None:
    core = Core(PagePool(2000, 16), CoreLimits(limits, 1, 64, 1_000_000, VOCABULARY, 8192))
    core.not_ready = ""
    tools = tuple((1,) * 40 + (tool,) * 40 for tool in range(2, 130))

    def submit(request: Request) -> Task:
        return core.submit(request, Terms(0.0, None, "a", lambda outcome: None), 0.0)

    def run(step: Step) -> None:
        reads = single_reads(step.parts, step.reads)
        core.end_step(step, [0.5 if isinstance(read, ReadPair) else (1.0,) for read in reads], 0.0, 0.4)

    submit(Score(tools, (1,) * 4, 1, 2))
    while step := core.begin_step(0.0):
        run(step)
    ranks = [submit(Rank((1, 2, 3 + number) * 10, 16, 96, (1,) * 30, 1, 2)) for number in range(8)]
    while step := core.begin_step(0.0):
        run(step)
    for number, rank in enumerate(ranks):
        assert isinstance(rank, RankTask)
        core.supply(rank, tools[number * 16 : number * 16 + 16], 0.0)
    held = [rank.pages_held for rank in ranks]
    step = core.begin_step(0.0)
    assert step is not None
    in_step = {part.key for part in step.slices}
    assert {
        rank.number for rank, before in zip(ranks, held, strict=True) if rank.pages_held > before
    } <= in_step
