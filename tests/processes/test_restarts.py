"""When a process that failed is started again: a model of the rule, held against it event by event."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mcp_discovery.config import RecoveryTable
from mcp_discovery.processes.restarts import Restarts


@given(
    st.integers(0, 4),
    st.floats(0.0, 8.0, allow_nan=False),
    st.lists(st.floats(0.0, 20.0, allow_nan=False), max_size=30),
)
def test_the_backoff_doubles_until_a_healthy_time_or_the_end(
    most: int, backoff_s: float, healthy: list[float]
) -> None:
    restarts = Restarts(RecoveryTable(restarts=most, backoff_s=backoff_s, healthy_s=10.0))
    row: list[float | None] = []
    for number, healthy_s in enumerate(healthy):
        delay = restarts.after(f"failure {number}", healthy_s)
        if healthy_s >= 10.0:
            row = []
        row.append(delay)
        expected: list[float | None] = [backoff_s * 2.0**place for place in range(min(most, len(row)))]
        assert row == expected + [None] * (len(row) - len(expected))
        assert restarts.last_failure == f"failure {number}"


def test_every_restart_is_counted_over_all_time() -> None:
    restarts = Restarts(RecoveryTable(restarts=1, healthy_s=10.0))
    assert [restarts.after("", 11.0), restarts.after("", 11.0), restarts.after("", 0.0)] == [1.0, 1.0, None]
    assert restarts.total == 2
