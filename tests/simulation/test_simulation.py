"""The engine's core under random traffic on a virtual clock: every promise after every event."""

from __future__ import annotations

import pytest

from benchmarks.simulation.simulator import Tally, simulate, simulate_world
from engine.errors import RefusalCode


@pytest.fixture(scope="module")
def tally() -> Tally:
    """20,000 requests in worlds of four seeds; raises where a promise is broken."""
    tally = Tally()
    for seed in range(4):
        tally.add(simulate(seed, 5_000, requests_a_world=500))
    return tally


def test_every_request_is_accounted_for(tally: Tally) -> None:
    assert tally.requests == sum(tally.outcomes.values()) == 20_000


def test_every_end_and_every_stage_was_reached(tally: Tally) -> None:
    codes = set(RefusalCode) - {RefusalCode.RATE_LIMITED}
    answers = {"embedded", "scored", "generated", "cancelled", "device_fault", "constraint_fault"}
    assert set(tally.outcomes) == answers | {code.value for code in codes}
    stages = ("queued", "embedding", "choosing", "prefill", "decode, in flight", "ended")
    assert all(tally.cancelled_while[stage] for stage in stages)
    assert all(tally.disturbances[kind] for kind in ("device fault", "drain", "jump", "neighbour"))
    assert tally.refusals_recomputed > 50
    assert tally.pools_rebuilt > 200


def test_a_seed_gives_the_same_run_and_another_seed_another() -> None:
    first, again, other = (simulate_world(seed, 0, 500).digest for seed in (7, 7, 8))
    assert first == again != other


@pytest.mark.parametrize(
    ("seed", "number", "requests", "found"),
    [
        (1, 0, 500, "a request that ran was refused as if its own pages were not free for it"),
        (1, 0, 500, "requests waited for one whose caller had yet to choose while the device was idle"),
        (1, 0, 500, "after a stop of the process its length was taken for the time of a step"),
        (21, 0, 500, "shorter requests passed a longer one without a bound"),
        (37, 0, 500, "a rate measured beside a neighbour was believed long after it had left"),
        (11, 18, 800, "a rank took pages that somebody waited for whose turn had not come again"),
        (12, 12, 800, "of 62 that run in steps of 4 rows the last seemed to wait for too long"),
        (0, 65, 5_000, "a rank took pages with which no row could start, and they were not counted"),
        (3, 106, 5_000, "a row whose constraint failed was missed in its step"),
        (2, 148, 5_000, "a step that was collected late showed that steps take no time"),
        (7, 115, 5_000, "the first two steps were stopped, and their times believed"),
    ],
)
def test_worlds_in_which_a_bug_was_found(seed: int, number: int, requests: int, found: str) -> None:
    assert simulate_world(seed, number, requests).requests == requests, found
