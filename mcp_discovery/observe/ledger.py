"""The counts of one process in memory that another may read, even after the process was killed.

A valid call writes one cell when it comes and one when it ends. What came and did not end is in flight, or,
once the process is gone, was cancelled with it: so the account balances wherever a kill falls. An invalid
call never came: it writes its end alone, so that no reader sees it among those received.

Cells are 64-bit integers in the machine's order, written by one thread of one process. A reader looks at
the ends before it looks at the beginnings, so that no call seems to end before it came.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace

from engine.errors import RefusalCode
from mcp_discovery.observe.counts import Counts

STATUSES = ("matched", "partial", "no_match", "failed", "cancelled", "invalid")
"""Ends with one cell each; a refusal has one for its code."""
CODES = (*map(str, RefusalCode), "other")
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

_ENDS = (*STATUSES, *(f"refused: {code}" for code in CODES))
_TIMED = (*STATUSES, "refused")
_WIDTH = len(BUCKETS_S) + 2  # of the latencies of one status: buckets, one beyond them, a sum in us
_CELLS = 1 + len(_ENDS) + len(_TIMED) * _WIDTH
BYTES = 8 * _CELLS


@dataclass(frozen=True, slots=True)
class Latencies:
    """Calls with one status by how long they took: `buckets[i]` took at most `BUCKETS_S[i]` and more than
    the bound before it, the last one more than all."""

    buckets: tuple[int, ...]
    sum_s: float

    def __add__(self, other: Latencies) -> Latencies:
        pairs = zip(self.buckets, other.buckets, strict=True)
        return Latencies(tuple(one + another for one, another in pairs), self.sum_s + other.sum_s)


class Ledger:
    """The cells of one process."""

    def __init__(self, memory: mmap.mmap | bytearray | None = None) -> None:
        """`memory` has at least `BYTES`, zeros at first; None: of its own."""
        self._memory = bytearray(BYTES) if memory is None else memory
        self._cells = memoryview(self._memory)[:BYTES].cast("q")
        self._places = {end: place for place, end in enumerate(_ENDS, start=1)}
        first = 1 + len(_ENDS)
        self._timed = {status: first + number * _WIDTH for number, status in enumerate(_TIMED)}

    @classmethod
    def shared(cls, file: int) -> Ledger:
        """Over the open file of this number, which has `BYTES`; whoever maps it sees the same cells."""
        return cls(mmap.mmap(file, BYTES))

    def begin(self) -> None:
        """A valid call has come."""
        self._cells[0] += 1

    def end(self, status: str, code: str, seconds: float) -> None:
        """A call has ended with `status`, and for `refused` with `code`; as `invalid` one that never came."""
        place = self._places.get(f"refused: {code}" if status == "refused" else status)
        self._cells[self._places["refused: other"] if place is None else place] += 1
        at = self._timed.get(status, self._timed["refused"])
        self._cells[at + bisect_left(BUCKETS_S, seconds)] += 1
        self._cells[at + _WIDTH - 1] += round(1e6 * seconds)

    def counts(self) -> Counts:
        """Of a process that runs."""
        ends = {end: self._cells[place] for end, place in self._places.items()}
        begun, invalid = self._cells[0], ends.pop("invalid")
        refused = {code: count for code in CODES if (count := ends[f"refused: {code}"])}
        return Counts(
            received=begun,
            answered=ends["matched"] + ends["partial"],
            no_match=ends["no_match"],
            refused=refused,
            failed=ends["failed"],
            cancelled=ends["cancelled"],
            in_flight=begun - sum(ends.values()),
            invalid=invalid,
        )

    def last_counts(self) -> Counts:
        """Of a process that has ended: what it had in flight was cancelled with it."""
        counts = self.counts()
        return replace(counts, cancelled=counts.cancelled + counts.in_flight, in_flight=0)

    def latencies(self) -> Mapping[str, Latencies]:
        """Status -> its calls that ended, of those with any."""
        found = {}
        for status, at in self._timed.items():
            buckets = tuple(self._cells[at : at + _WIDTH - 1])
            if any(buckets):
                found[status] = Latencies(buckets, self._cells[at + _WIDTH - 1] / 1e6)
        return found
