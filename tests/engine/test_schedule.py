"""What runs in a step, and whose turn it is to be admitted."""

from __future__ import annotations

import random
from array import array
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.queue import Bypass, Turn, WaitQueue
from engine.schedule import Lane, StepLimits, plan_step
from engine.sequence import Sequence


def prompt(tokens: int, computed: int = 0, launched: int = 0) -> Sequence:
    return Sequence(array("i", [1] * tokens), tokens, tokens, (), computed, launched)


def decoding(launched: int = 0) -> Sequence:
    return Sequence(array("i", [1] * 5), 4, 9, (), 4, launched)


sequences = st.one_of(
    st.builds(prompt, st.integers(1, 60)),
    st.builds(lambda n, c: prompt(n + c, c), st.integers(1, 30), st.integers(1, 30)),
    st.builds(decoding),
    st.builds(prompt, st.just(20), st.just(0), st.integers(1, 20)),
    st.builds(decoding, st.just(1)),
)
lanes = st.lists(st.lists(sequences, max_size=4), max_size=8).flatmap(
    lambda groups: st.tuples(*[st.integers(0, 8) for _ in groups]).map(
        lambda unserved: [
            Lane(key, group, sum(each.pending for each in group), waited)
            for key, (group, waited) in enumerate(zip(groups, unserved, strict=True))
        ]
    )
)
limits = st.builds(StepLimits, st.integers(1, 64), st.integers(1, 12))


@settings(max_examples=400)
@given(lanes=lanes, limits=limits)
def test_a_step_is_full_in_bounds_and_runs_nothing_twice(lanes: list[Lane], limits: StepLimits) -> None:
    plan = plan_step(lanes, limits)
    owner = {each: lane.key for lane in lanes for each in lane.sequences}
    seen = [part.sequence for part in plan.slices]
    assert len(set(seen)) == len(seen) <= limits.rows
    assert plan.tokens <= limits.tokens
    for part in plan.slices:
        assert part.key == owner[part.sequence]
        assert 1 <= part.tokens <= part.sequence.pending
        assert not part.sequence.launched
        assert not part.sequence.decoding or part.tokens == 1
    ready = [each for each in owner if each.pending]
    left = sum(each.pending for each in ready) - plan.tokens
    assert not left or plan.tokens == limits.tokens or len(plan.slices) == limits.rows
    decoders = [each for each in ready if each.decoding]
    served = [each for each in decoders if each in set(seen)]
    assert len(served) == min(len(decoders), limits.tokens, limits.rows)
    assert plan == plan_step(lanes, limits)


@given(lanes=lanes, limits=limits)
def test_nobody_takes_more_than_a_share_while_others_wait(lanes: list[Lane], limits: StepLimits) -> None:
    plan = plan_step(lanes, limits)
    taken: Counter[int] = Counter()
    for part in plan.slices:
        if not part.sequence.decoding:
            taken[part.key] += part.tokens
    wanted = {lane.key: sum(each.pending for each in lane.sequences if not each.decoding) for lane in lanes}
    share = max(1, limits.tokens // limits.share)
    waiting = [key for key in wanted if wanted[key] and not taken[key]]
    if waiting and len(plan.slices) < limits.rows:
        assert all(count <= share for count in taken.values())


slow_limits = st.builds(
    lambda tokens, rows, share, short, fill: StepLimits(tokens, rows, share, 4, short, fill),
    st.integers(1, 64),
    st.integers(1, 12),
    st.integers(1, 8),
    st.integers(0, 64),
    st.integers(1, 64),
)


@settings(max_examples=400)
@given(lanes=lanes, limits=slow_limits)
def test_long_requests_fill_a_step_only_in_part(lanes: list[Lane], limits: StepLimits) -> None:
    """A long one may have its share; what it has beyond does not bring the step over `fill`."""
    plan = plan_step(lanes, limits)
    left = {lane.key: lane.left for lane in lanes}
    taken: Counter[int] = Counter()
    for part in plan.slices:
        if not part.sequence.decoding:
            taken[part.key] += part.tokens
    share, fill = max(1, limits.tokens // limits.share), limits.fill or 0
    beyond = any(taken[key] > share and left[key] > limits.short for key in taken)
    # Short ones may take more of it after the long one did, in their order.
    assert not beyond or plan.tokens - sum(taken[key] for key in taken if left[key] <= limits.short) <= fill
    assert plan.tokens <= limits.tokens
    assert len(plan.slices) <= limits.rows
    # And it is no emptier than that: who is short has all that there was room for, and others their share.
    if plan.tokens < limits.tokens and len(plan.slices) < limits.rows:
        for lane in lanes:
            wanted = sum(each.pending for each in lane.sequences if not each.decoding)
            due = wanted if lane.left <= limits.short else min(wanted, share)
            assert taken[lane.key] >= due
            assert taken[lane.key] == wanted or plan.tokens >= fill


def test_a_short_request_runs_whole_beside_a_long_one_where_steps_are_slow() -> None:
    limits = StepLimits.for_slow_steps(512, 512)
    long, short = Lane(0, [prompt(265) for _ in range(32)], 8480, 4), Lane(1, [prompt(480)], 480, 0)
    assert {part.key for part in plan_step([long], limits).slices} == {0}
    assert plan_step([long], limits).tokens == 192
    taken: Counter[int] = Counter()
    for part in plan_step([long, short], limits).slices:
        taken[part.key] += part.tokens
    assert taken == {0: 64, 1: 448}


@settings(max_examples=30)
@given(
    limits=st.sampled_from([StepLimits(16, 8), StepLimits.for_slow_steps(16, 8)]),
    count=st.integers(1, 48),
    seed=st.integers(0, 2**16),
)
def test_long_requests_take_turns_however_many_short_ones_come(
    limits: StepLimits, count: int, seed: int
) -> None:
    """None waits for longer than `patience` steps and one step for each other that runs."""
    rng = random.Random(seed)
    long = {key: prompt(10_000) for key in range(count)}
    served = dict.fromkeys(long, 0)
    for number in range(1, 200):
        lanes = [Lane(key, [each], each.pending, number - served[key]) for key, each in long.items()]
        lanes += [
            Lane(100 * number + at, [prompt(tokens)], tokens, 0)
            for at, tokens in enumerate(rng.choices(range(1, 17), k=rng.randrange(12)))
        ]
        for part in plan_step(lanes, limits).slices:
            if part.key in long:
                assert number - served[part.key] <= limits.patience + count
                served[part.key] = number
                long[part.key].launch(part.tokens)
                long[part.key].collect()
    assert all(200 - last <= limits.patience + count for last in served.values())


def test_several_prompts_share_a_step_and_what_is_left_is_filled() -> None:
    long, short = prompt(1000), prompt(10)
    plan = plan_step([Lane(0, [long], 1000, 0), Lane(1, [short], 10, 0)], StepLimits(64, 8))
    assert {part.key: part.tokens for part in plan.slices} == {0: 54, 1: 10}


def test_the_request_with_least_left_comes_first() -> None:
    rows = [prompt(30) for _ in range(3)]
    plan = plan_step(
        [Lane(0, rows[:1], 900, 0), Lane(1, rows[1:2], 30, 0), Lane(2, rows[2:], 60, 0)],
        StepLimits(8, 8, share=2),
    )
    assert [part.key for part in plan.slices] == [1, 2]


def test_a_stream_of_short_requests_does_not_hold_a_long_one_for_ever() -> None:
    limits = StepLimits(tokens=16, rows=8, share=4, patience=4)
    long, last, gaps, step = prompt(200), 0, [], 0
    while long.pending:
        step += 1
        short = [Lane(1000 * step + i, [prompt(8)], 8, 0) for i in range(10)]
        plan = plan_step([Lane(0, [long], long.pending, step - last), *short], limits)
        given_long = [part.tokens for part in plan.slices if part.key == 0]
        if given_long:
            gaps.append(step - last)
            last = step
            long.launch(given_long[0])
            long.collect()
        assert step < 1000
    assert max(gaps) <= limits.patience


def test_rows_limit_the_step() -> None:
    lanes = [Lane(key, [decoding()], 5, key) for key in range(10)]
    plan = plan_step(lanes, StepLimits(64, 4))
    assert [part.key for part in plan.slices] == [9, 8, 7, 6]


def test_among_equal_requests_the_one_admitted_first_goes_first() -> None:
    """Whichever came first: a caller's thousandth may have come long before another's first."""
    lanes = [Lane(key, [prompt(8)], 8, 0) for key in (7, 3, 9)]
    assert [part.key for part in plan_step(lanes, StepLimits(16, 4, share=1)).slices] == [7, 3]
    overdue = [Lane(key, [prompt(8)], 8, 6) for key in (7, 3, 9)]
    assert [part.key for part in plan_step(overdue, StepLimits(16, 4, share=1)).slices] == [7, 3]


# The queue.


def drain(queue: WaitQueue[str], room: int, now: float = 0.0) -> list[str]:
    """Admits the next `room` requests."""
    taken: list[str] = []

    def attempt(item: str) -> Turn:
        if len(taken) == room:
            return Turn.STOP
        taken.append(item)
        return Turn.TAKEN

    queue.admit(attempt, now)
    return taken


def test_callers_take_turns_and_each_is_served_in_order() -> None:
    queue: WaitQueue[str] = WaitQueue()
    for item in ("a1", "a2", "a3", "b1", "c1", "c2"):
        queue.push(item, item[0], 1)
    assert drain(queue, 4) == ["a1", "b1", "c1", "a2"]
    queue.push("b2", "b", 1)
    assert drain(queue, 9) == ["c2", "a3", "b2"]
    assert (len(queue), queue.tokens) == (0, 0)


def test_one_callers_thousand_do_not_delay_the_first_of_another() -> None:
    queue: WaitQueue[str] = WaitQueue()
    for number in range(1000):
        queue.push(f"g{number}", "greedy", 10)
    assert queue.tokens_ahead("modest", 10) == 10
    assert queue.tokens_ahead("greedy", 10) == 10_000
    queue.push("m", "modest", 10)
    assert "m" in drain(queue, 2)


@settings(max_examples=200)
@given(
    needs=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), min_size=1, max_size=40),
    admissions=st.integers(1, 6),
    seed=st.integers(0, 2**16),
)
def test_nobody_is_passed_more_often_than_the_bound_and_all_are_admitted(
    needs: list[tuple[str, int]], admissions: int, seed: int
) -> None:
    """Requests need pages, hold them for a while and return them; small ones keep arriving."""
    rng = random.Random(seed)
    bound = Bypass(admissions=admissions, seconds=1e9, most_short=8)
    queue: WaitQueue[int] = WaitQueue(bound)
    pages_of = {number: pages for number, (_, pages) in enumerate(needs)}
    caller_of = {number: caller for number, (caller, _) in enumerate(needs)}
    arriving = list(pages_of)
    free, held, admitted = 9, [], []
    passed: Counter[int] = Counter()

    def attempt(item: int) -> Turn:
        nonlocal free
        if pages_of[item] > free:
            tried.append(item)
            return Turn.NO_PAGES
        free -= pages_of[item]
        held.append(item)
        admitted.append(item)
        for other in tried:
            passed[other] += 1
        return Turn.TAKEN

    for _ in range(2000):
        if arriving and rng.random() < 0.6:
            item = arriving.pop(0)
            queue.push(item, caller_of[item], pages_of[item])
        tried: list[int] = []
        queue.admit(attempt, 0.0)
        if held and rng.random() < 0.5:
            free += pages_of[held.pop(rng.randrange(len(held)))]
        if not arriving and not len(queue):
            break
    assert sorted(admitted) == list(pages_of)
    # Within the round in which the bound is reached, those behind may all be admitted still.
    assert all(count <= admissions + len(needs) for count in passed.values())


def test_after_the_bound_freed_pages_are_kept_for_who_was_passed() -> None:
    queue: WaitQueue[str] = WaitQueue(Bypass(admissions=2, seconds=1e9))
    queue.push("long", "a", 100)
    free = 1

    def attempt(item: str) -> Turn:
        nonlocal free
        need = 3 if item == "long" else 1
        if need > free:
            return Turn.NO_PAGES
        free -= need
        return Turn.TAKEN

    for number in range(2):
        queue.push(f"s{number}", "b", 1)
        queue.admit(attempt, 0.0)
        assert f"s{number}" not in queue
        free += 1
    for number in range(2, 5):
        queue.push(f"s{number}", "b", 1)
        queue.admit(attempt, 0.0)
        assert f"s{number}" in queue, "passed once too often"
    free = 3
    queue.admit(attempt, 0.0)
    assert "long" not in queue


def test_after_a_time_freed_pages_are_kept_for_who_was_passed() -> None:
    queue: WaitQueue[str] = WaitQueue(Bypass(admissions=10**9, seconds=1.0))
    queue.push("long", "a", 100)
    queue.push("s0", "b", 1)
    queue.push("s1", "b", 1)
    room = {"s0": Turn.TAKEN, "s1": Turn.LATER}

    queue.admit(lambda item: room.get(item, Turn.NO_PAGES), 5.0)
    assert "s0" not in queue
    queue.admit(lambda item: room.get(item, Turn.NO_PAGES), 5.9)
    asked: list[str] = []
    queue.admit(lambda item: asked.append(item) or Turn.NO_PAGES, 6.0)  # type: ignore[func-returns-value]
    assert asked == ["long"]


def test_a_request_whose_turn_comes_later_lets_others_pass_and_stays_first() -> None:
    queue: WaitQueue[str] = WaitQueue(Bypass(admissions=1, seconds=0.0))
    queue.push("long", "a", 100)
    for number in range(4):
        queue.push(f"s{number}", "b", 1)
        asked: list[str] = []

        def attempt(item: str, asked: list[str] = asked) -> Turn:
            asked.append(item)
            return Turn.LATER if item == "long" else Turn.TAKEN

        queue.admit(attempt, float(number))
        assert asked == ["long", f"s{number}"]
    assert list(queue) == ["long"]


@settings(max_examples=200)
@given(
    waiting=st.lists(
        st.tuples(st.sampled_from("aaab"), st.sampled_from(sorted(set(Turn) - {Turn.STOP}, key=str))),
        min_size=30,
        max_size=80,
    ),
    stop=st.integers(0, 160),
    most=st.integers(1, 60),
)
def test_a_round_offers_each_one_turn_in_rotation(
    waiting: list[tuple[str, Turn]], stop: int, most: int
) -> None:
    queue: WaitQueue[int] = WaitQueue(Bypass(most_short=most, most_skipped=most))
    turn_of = {number: Turn.STOP if number == stop else turn for number, (_, turn) in enumerate(waiting)}
    own: dict[str, list[int]] = {}
    for number, (caller, _) in enumerate(waiting):
        queue.push(number, caller, 1)
        own.setdefault(caller, []).append(number)
    callers = list(own)
    rotation = sorted(turn_of, key=lambda n: (own[waiting[n][0]].index(n), callers.index(waiting[n][0])))
    wanted: list[int] = []
    skipped = 0
    while len(wanted) < len(rotation) and skipped < most:
        wanted.append(rotation[len(wanted)])
        if turn_of[wanted[-1]] is Turn.STOP:
            break
        skipped += turn_of[wanted[-1]] in (Turn.NO_PAGES, Turn.LATER)
    asked: list[int] = []
    queue.admit(lambda number: asked.append(number) or turn_of[number], 0.0)  # type: ignore[func-returns-value]
    assert asked == wanted
    assert set(queue) == set(turn_of) - {n for n in asked if turn_of[n] in (Turn.TAKEN, Turn.GONE)}


@given(st.lists(st.tuples(st.sampled_from("pr"), st.sampled_from("abc"), st.integers(1, 50)), max_size=60))
def test_tokens_are_those_of_who_waits(changes: list[tuple[str, str, int]]) -> None:
    queue: WaitQueue[int] = WaitQueue()
    reference: dict[int, tuple[str, int]] = {}
    for number, (change, caller, tokens) in enumerate(changes):
        if change == "p":
            queue.push(number, caller, tokens)
            reference[number] = (caller, tokens)
        else:
            assert queue.remove(tokens) == (reference.pop(tokens, None) is not None)
        assert list(queue) == list(reference)
        assert queue.tokens == sum(tokens for _, tokens in reference.values())
        own = sum(tokens for who, tokens in reference.values() if who == "a")
        assert own <= queue.tokens_ahead("a", 1) <= queue.tokens


@pytest.mark.parametrize("count", [0, 3])
def test_a_sequence_launches_only_what_is_pending(count: int) -> None:
    sequence = prompt(2)
    with pytest.raises(Exception, match="pending"):
        sequence.launch(count)
    sequence.launch(2)
    with pytest.raises(Exception, match="pending"):
        sequence.launch(1)
