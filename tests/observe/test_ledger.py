"""Counts in memory that outlives its process: they balance wherever a kill falls."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_discovery.observe.ledger import BUCKETS_S, BYTES, CODES, STATUSES, Ledger

ENDS = st.one_of(
    st.tuples(st.sampled_from(STATUSES), st.just("")),
    st.tuples(st.just("refused"), st.sampled_from((*CODES, "unheard of"))),
)
SECONDS = st.floats(0.0, 100.0, allow_nan=False)

WRITE_AND_DIE = """
import os, sys
from mcp_discovery.observe.ledger import Ledger
ledger = Ledger.shared(int(sys.argv[1]))
for _ in range(3):
    ledger.begin()
ledger.end("matched", "", 0.1)
os.kill(os.getpid(), 9)
"""


class Watched:
    """Cells that keep a copy of the memory as each write leaves it: what a kill there would leave."""

    def __init__(self, ledger: Ledger, memory: bytearray) -> None:
        self._cells, self._memory = ledger._cells, memory
        self.copies: list[bytearray] = []

    def __getitem__(self, place: Any) -> Any:
        return self._cells[place]

    def __setitem__(self, place: int, value: int) -> None:
        self._cells[place] = value
        self.copies.append(bytearray(self._memory))


@given(st.lists(st.one_of(st.none(), st.tuples(ENDS, SECONDS)), max_size=40))
def test_the_account_balances_after_every_single_write(
    events: list[tuple[tuple[str, str], float] | None],
) -> None:
    """None is a call that comes; the rest are ends, as far as there are calls to end, or of invalid ones.
    What was received stays so."""
    memory = bytearray(BYTES)
    ledger = Ledger(memory)
    watched = ledger._cells = Watched(ledger, memory)  # type: ignore[assignment]
    begun = ended = 0
    for event in events:
        if event is None:
            ledger.begin()
            begun += 1
        elif event[0][0] == "invalid" or ended < begun:
            (status, code), seconds = event
            ledger.end(status, code, seconds)
            ended += status != "invalid"
        live = ledger.counts()
        assert live.surplus == 0
        assert live.in_flight == begun - ended
    received = 0
    for copy in watched.copies:
        left = Ledger(copy)
        assert left.counts().received >= received
        last = left.last_counts()
        received = last.received
        assert (last.surplus, last.in_flight) == (0, 0)
        assert last.cancelled >= left.counts().cancelled
        assert last.received == left._cells[0]


@given(st.lists(st.tuples(st.sampled_from((*STATUSES, "refused")), SECONDS), max_size=30))
def test_latencies_are_those_of_a_plain_list(calls: list[tuple[str, float]]) -> None:
    ledger = Ledger()
    for status, seconds in calls:
        if status != "invalid":
            ledger.begin()
        ledger.end(status, "queue_full" if status == "refused" else "", seconds)
    found = ledger.latencies()
    assert set(found) == {status for status, _ in calls}
    for status, held in found.items():
        times = [seconds for name, seconds in calls if name == status]
        assert held.sum_s == pytest.approx(sum(times), abs=1e-6 * len(times))
        assert sum(held.buckets) == len(times)
        for at, bound in enumerate(BUCKETS_S):
            assert sum(held.buckets[: at + 1]) == sum(seconds <= bound for seconds in times)


def test_another_process_sees_what_a_killed_one_has_written() -> None:
    with tempfile.TemporaryFile() as file:
        os.truncate(file.fileno(), BYTES)
        command = [sys.executable, "-c", WRITE_AND_DIE, str(file.fileno())]
        assert subprocess.run(command, pass_fds=[file.fileno()]).returncode == -signal.SIGKILL
        last = Ledger.shared(file.fileno()).last_counts()
    assert (last.received, last.answered, last.cancelled, last.in_flight) == (3, 1, 2, 0)
