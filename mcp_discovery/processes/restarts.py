"""How often a process that failed is started again, and after how long. Time is the caller's."""

from __future__ import annotations

from mcp_discovery.config import RecoveryTable


class Restarts:
    """Failures of one process. The back-off doubles with each one that follows within the healthy time."""

    def __init__(self, table: RecoveryTable) -> None:
        self._table = table
        self.total = 0
        self.in_a_row = 0
        self.last_failure = ""

    def after(self, failure: str, healthy_s: float) -> float | None:
        """Seconds until the next start, None where it has failed too often.

        `healthy_s` is how long the process had been ready when it failed: from `recovery.healthy_s` on,
        the failures before are forgotten.
        """
        self.last_failure = failure
        if healthy_s >= self._table.healthy_s:
            self.in_a_row = 0
        if self.in_a_row >= self._table.restarts:
            return None
        delay = self._table.backoff_s * 2.0**self.in_a_row
        self.in_a_row += 1
        self.total += 1
        return delay
