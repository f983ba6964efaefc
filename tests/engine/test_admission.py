"""What a request needs, against brute force; windows; refusals and their numbers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.admission import (
    Load,
    Moment,
    Need,
    Running,
    Sizes,
    Work,
    computed_tokens,
    pages_for,
    refuse,
    retry_after_ms,
    shareable_pages,
    shrunk_window,
    size_row,
    smallest_need,
    too_late,
    widest_window,
)
from engine.errors import Refusal, RefusalCode
from engine.pages import PagePool, Reservation
from engine.rate import StepTimes
from engine.request import Embed, Generate, Rank, Request, Score, Tokens
from tests.engine.fakes import World, make_core

SIZE = 4


def chain_for(pool: PagePool, prefix: Tokens, prompt: int) -> tuple[int, ...]:
    return pool.match(prefix, shareable_pages(len(prefix), prompt, SIZE))


def publish(pool: PagePool, text: Tokens) -> None:
    pages = len(text) // SIZE
    held = pool.reserve(pages)
    assert isinstance(held, Reservation)
    held.publish(text, held.take(pages))
    held.release()


@given(prompt=st.integers(1, 60), output=st.integers(0, 20), resident=st.integers(0, 12))
def test_own_pages_against_placing_every_token(prompt: int, output: int, resident: int) -> None:
    pool = PagePool(64, SIZE)
    text = tuple(range(prompt))
    publish(pool, tuple(range(resident * SIZE)))
    size = size_row(pool, chain_for(pool, text, prompt), prompt, output)
    # One token after the other gets a place; the last one generated is never fed back.
    shared, own, placed = 0, set(), 0
    while (shared + 1) * SIZE <= prompt - 1 and shared < resident:
        shared += 1
    for at in range(prompt + max(output, 1) - 1):
        placed = at // SIZE
        if placed >= shared:
            own.add(placed)
    assert (len(size.chain), size.own) == (shared, len(own))
    cached = shared * SIZE
    assert size.own == pages_for(computed_tokens(prompt, output), SIZE) - cached // SIZE
    assert prompt - cached >= 1


words = st.lists(st.integers(0, 1), min_size=0, max_size=4).map(
    lambda w: tuple(t for t in w for _ in range(SIZE))
)


@settings(max_examples=300)
@given(
    total=st.integers(1, 14),
    resident=st.lists(words, max_size=3),
    pinned=words,
    taken=st.integers(0, 6),
    prefixes=st.lists(st.tuples(words, st.integers(0, SIZE - 1)), min_size=1, max_size=5),
    suffix=st.integers(1, 6),
    most=st.integers(1, 5),
)
def test_a_window_is_granted_exactly_where_each_row_could_run_alone(
    total: int,
    resident: list[Tokens],
    pinned: Tokens,
    taken: int,
    prefixes: list[tuple[Tokens, int]],
    suffix: int,
    most: int,
) -> None:
    def make() -> PagePool:
        pool = PagePool(total, SIZE)
        for text in resident:
            if len(text) // SIZE <= pool.available:
                publish(pool, text)
        pool.reserve(0, [pool.match(pinned, 4)])
        pool.reserve(min(taken, pool.available))
        return pool

    pool = make()
    texts = [prefix + (9,) * rest for prefix, rest in prefixes]
    rows = [size_row(pool, chain_for(pool, t, len(t) + suffix), len(t) + suffix, 0) for t in texts]
    need = smallest_need(rows, pool.available)
    alone = [isinstance(make().reserve(row.own, [row.chain]), Reservation) for row in rows]
    window = widest_window(rows, pool, most)
    assert (window is not None) == all(alone) == (need.deficit == 0)
    if window is None:
        assert need.deficit == max(row.own - pool.available_beside([row.chain]) for row in rows)
        return
    granted = pool.reserve(window.own, window.chains)
    assert isinstance(granted, Reservation)
    own = [row.pages - len(chain) for row, chain in zip(rows, window.chains, strict=True)]
    assert max(own) <= window.own <= sum(sorted(own, reverse=True)[:most])


@given(
    needs=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    owned=st.integers(9, 40),
    most=st.integers(1, 8),
)
def test_a_reservation_shrinks_to_the_rows_and_never_grows(needs: list[int], owned: int, most: int) -> None:
    kept = shrunk_window(needs, owned, most)
    assert max(needs) <= kept <= owned
    largest = sorted(needs, reverse=True)
    assert kept == max(sum(largest[:n]) for n in range(1, most + 1) if sum(largest[:n]) <= owned)


def times(tokens_per_s: float) -> StepTimes:
    seen = StepTimes()
    for tokens in (10, 20, 40):
        seen.observe(tokens, tokens / tokens_per_s)
    return seen


def moment(**changes: object) -> Moment:
    values: dict[str, object] = {
        "need": Need(5, 9, 5),
        "work": Work(100),
        "tokens_ahead": 0,
        "load": Load(),
        "step_tokens": 50,
    }
    return Moment(**{**values, **changes})  # type: ignore[arg-type]


THREE_RUN = Load((Running(900, 9), Running(100, 3), Running(200, 3)))


@pytest.mark.parametrize(
    ("changes", "seconds", "code"),
    [
        ({}, 1.01, None),
        ({}, 0.99, RefusalCode.DEADLINE),
        ({}, 0.0, RefusalCode.DEADLINE),
        ({"tokens_ahead": 200}, 3.01, None),
        ({"tokens_ahead": 200}, 2.99, RefusalCode.DEADLINE),
        # What runs with less left goes first, what has more does not.
        ({"load": Load((Running(50, 1), Running(500, 1)))}, 1.51, None),
        ({"load": Load((Running(50, 1), Running(500, 1)))}, 1.49, RefusalCode.DEADLINE),
        # Five pages short: they come when the first two requests end, after 3 s.
        ({"need": Need(9, 4, 9), "load": THREE_RUN}, 4.01, None),
        ({"need": Need(9, 4, 9), "load": THREE_RUN}, 3.5, RefusalCode.DEADLINE),
        ({"need": Need(9, 4, 9), "load": THREE_RUN}, 2.99, RefusalCode.PAGES_SHORT),
    ],
)
def test_work_that_cannot_end_in_time(
    changes: dict[str, object], seconds: float, code: RefusalCode | None
) -> None:
    assert too_late(moment(**changes), times(100.0), seconds) is code


@given(
    drawn=st.lists(st.builds(Running, st.integers(1, 60), st.integers(0, 9), st.integers(0, 40)), max_size=9),
    late=st.integers(0, 3),
    early=st.integers(0, 3),
    feeding=st.integers(1, 120),
    size=st.integers(0, 70),
    pages=st.integers(0, 30),
)
def test_a_load_against_counting_one_by_one(
    drawn: list[Running], late: int, early: int, feeding: int, size: int, pages: int
) -> None:
    load = Load(drawn[late:], feeding)
    for each in drawn[:late]:
        load.add(each)
    for each in drawn[:early]:
        load.add(each)
        load.remove(each)
    before = [each for each in drawn if each.tokens <= size]
    assert load.tokens == sum(each.tokens for each in drawn)
    assert load.tokens_before(size) == sum(each.tokens for each in before)
    assert (size >= load.fed_from) == (sum(each.prompt for each in before) >= feeding)
    ends = sorted(drawn)
    needed = [n for n in range(len(ends) + 1) if sum(each.pages for each in ends[:n]) >= pages]
    assert load.tokens_until(pages) == sum(each.tokens for each in ends[: min(needed, default=len(ends))])


def test_without_a_measured_rate_only_a_deadline_that_has_passed_counts() -> None:
    assert too_late(moment(tokens_ahead=10**9), StepTimes(), 0.001) is None
    assert too_late(moment(), StepTimes(), -1.0) is RefusalCode.DEADLINE


@pytest.mark.parametrize("tokens", [4, 400, 4_000])
def test_a_quick_step_shows_that_those_before_it_were_stopped(tokens: int) -> None:
    seen = StepTimes()
    for _ in range(2):
        seen.observe(400, 100.0)  # of 0.45 s, in a process that was stopped
    seen.observe(tokens, 0.0)  # one that was in flight with them
    seen.observe(tokens, 0.05 + tokens * 0.001, alone=True)
    for size in (400, 4, 4_000):
        seen.observe(size, 0.05 + size * 0.001)
    assert seen.seconds(400, 1) == pytest.approx(0.45, rel=0.05)


def test_the_rate_tells_fixed_costs_from_those_of_tokens() -> None:
    seen = StepTimes()
    for tokens in (1, 400, 1, 1, 300, 1):
        seen.observe(tokens, 0.05 + tokens * 0.001)
    assert seen.seconds(500, 1) == pytest.approx(0.55, rel=1e-6)
    assert seen.seconds(10, 10) == pytest.approx(0.51, rel=1e-6)
    assert seen.tokens_per_s == pytest.approx(704 / 1.004, rel=0.1)
    assert retry_after_ms(1000, 500, seen) == pytest.approx(1100, abs=1)


def test_a_step_that_was_stopped_counts_for_a_slow_one() -> None:
    times = StepTimes()
    for _ in range(20):
        times.observe(100, 0.01)
    times.observe(100, 10.0)  # the process was stopped for ten seconds
    assert times.seconds(100, 1) <= 0.02
    for _ in range(100):
        times.observe(100, 1.0)  # and this is a device that has become a hundred times slower
    assert times.seconds(100, 1) >= 0.5


def test_a_step_that_took_no_time_does_not_hide_those_that_follow() -> None:
    times = StepTimes()
    for seconds in (0.0, 1.0, 1.0):
        times.observe(10, seconds)
    assert times.seconds(10, 1) > 0.5


@given(st.lists(st.tuples(st.integers(1, 9000), st.floats(1e-6, 100.0)), min_size=1, max_size=30))
def test_estimates_are_never_negative(steps: list[tuple[int, float]]) -> None:
    seen = StepTimes()
    for tokens, seconds in steps:
        seen.observe(tokens, seconds)
    assert seen.seconds(100, 1) >= 0.0
    assert seen.seconds(200, 2) >= seen.seconds(100, 1)
    assert seen.tokens_per_s > 0.0


def test_refusals_carry_their_numbers_in_one_sentence() -> None:
    sizes = Sizes(4936, 16, 3, 5000, 250)
    short = refuse(RefusalCode.PAGES_SHORT, Need(96, 71, 96), sizes)
    assert short.message.startswith("The request needs 96 pages, 71 free of 4,936: 25 short")
    assert (short.page_deficit, short.retry_after_ms, short.queue_depth) == (25, 250, 3)
    large = refuse(RefusalCode.REQUEST_TOO_LARGE, Need(4000, 71, 5000), sizes)
    assert (large.pages_needed, large.page_deficit, large.retry_after_ms) == (5000, 64, None)
    assert "64 short" in large.message
    for code in RefusalCode:
        if code is not RefusalCode.RATE_LIMITED:
            message = refuse(code, Need(1, 0, 1), sizes).message
            assert message.count(". ") == 0
            assert message.endswith(".")


@pytest.mark.parametrize(
    ("request_", "needed"),
    [
        (Embed((1,) * 41), 11),
        (Generate((1,) * 20, max_tokens=21), 10),
        (Generate((1,) * 20, max_tokens=22), 11),
        (Score(((1,) * 4, (2,) * 36), (3,) * 5, 1, 2), 11),
        (Rank((1,) * 8, rows=2, prefix_tokens=36, suffix=(3,) * 5, positive=1, negative=2), 11),
        (Rank((1,) * 41, rows=2, prefix_tokens=4, suffix=(3,), positive=1, negative=2), 11),
    ],
)
def test_a_request_that_can_never_fit_is_refused_at_once(request_: Request, needed: int) -> None:
    core, runner = make_core(10)
    world = World(core, runner)
    outcome = world.submit(request_).outcomes
    if needed <= 10:
        assert outcome == []
        return
    (refusal,) = outcome
    assert isinstance(refusal, Refusal)
    assert refusal.code is RefusalCode.REQUEST_TOO_LARGE
    assert (refusal.pages_needed, refusal.page_deficit, refusal.pages_total) == (needed, needed - 10, 10)
    assert refusal.retry_after_ms is None


def test_the_queue_is_bounded_in_requests_and_in_tokens() -> None:
    core, runner = make_core(8, max_queue=2, max_queued_tokens=40)
    world = World(core, runner)
    world.submit(Generate((1,) * 30, max_tokens=2))
    world.submit(Embed((2,) * 12))
    assert len(core.queue) == 1
    heavy = world.submit(Embed((3,) * 29))
    world.submit(Embed((4,) * 12))
    many = world.submit(Embed((5,)))
    for asked in (heavy, many):
        assert isinstance(asked.outcome, Refusal)
        assert asked.outcome.code is RefusalCode.QUEUE_FULL
    assert isinstance(many.outcome, Refusal)
    assert many.outcome.queue_depth == 2
    world.run()
    assert all(each.outcomes for each in world.asked)


def test_an_empty_queue_of_no_length_still_admits_what_fits() -> None:
    core, runner = make_core(8, max_queue=0)
    world = World(core, runner)
    first = world.submit(Embed((1,) * 32))
    second = world.submit(Embed((2,) * 32))
    assert first.outcomes == []
    assert isinstance(second.outcome, Refusal)
    assert (second.outcome.pages_needed, second.outcome.pages_free) == (8, 0)


def test_a_queue_without_room_is_not_said_to_be_full_with_nothing() -> None:
    core, runner = make_core(4, SIZE, max_queue=0)
    world = World(core, runner)
    world.submit(Embed((1,) * 16))
    refusal = world.submit(Embed((2,) * 16)).outcome
    assert isinstance(refusal, Refusal)
    assert refusal.code is RefusalCode.QUEUE_FULL
    assert refusal.message == (
        "The request would have to wait and the queue has no room for it; it needs 4 pages, 0 free of 4."
    )


def test_no_time_to_come_back_is_named_where_nothing_is_ahead() -> None:
    seen = times(1000.0)
    assert retry_after_ms(0, 500, seen) is None
    assert retry_after_ms(1, 500, seen) is not None
