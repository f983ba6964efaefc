"""Every call accounted for, exactly, at any moment.

    received = answered + no_match + sum(refused) + failed + cancelled + in_flight

`received` counts valid calls. A call with a bad argument is counted apart, as `invalid`: it is known
to be invalid before its first await, so nobody sees it as received.

An `Accounting` belongs to one event loop and needs no lock. Counts of several processes add up.
"""

from __future__ import annotations

import logging
import time
from asyncio import CancelledError
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger(__name__)

ANSWERS = {"matched": "answered", "partial": "answered", "no_match": "no_match", "failed": "failed"}
"""Result status -> the count it belongs to, for every status but `refused` and `invalid`."""


@dataclass(frozen=True, slots=True)
class Counts:
    """One reading of the counts."""

    received: int = 0
    answered: int = 0
    no_match: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    failed: int = 0
    cancelled: int = 0
    in_flight: int = 0
    invalid: int = 0

    @property
    def surplus(self) -> int:
        """Calls received less calls accounted for: zero unless a bug lost or doubled one."""
        ended = self.answered + self.no_match + sum(self.refused.values()) + self.failed + self.cancelled
        return self.received - ended - self.in_flight

    def __add__(self, other: Counts) -> Counts:
        codes = sorted({*self.refused, *other.refused})
        return Counts(
            received=self.received + other.received,
            answered=self.answered + other.answered,
            no_match=self.no_match + other.no_match,
            refused={code: self.refused.get(code, 0) + other.refused.get(code, 0) for code in codes},
            failed=self.failed + other.failed,
            cancelled=self.cancelled + other.cancelled,
            in_flight=self.in_flight + other.in_flight,
            invalid=self.invalid + other.invalid,
        )

    def as_json(self) -> dict[str, Any]:
        """The object of `/accounting`, without the pages."""
        return {
            "received": self.received,
            "answered": self.answered,
            "no_match": self.no_match,
            "refused": dict(self.refused),
            "failed": self.failed,
            "cancelled": self.cancelled,
            "in_flight": self.in_flight,
            "invalid": self.invalid,
        }


class Call:
    """One call between its arrival and its end; `end` may be called once."""

    __slots__ = ("_ended", "_ledger", "_started")

    def __init__(self, ledger: Accounting) -> None:
        self._ledger = ledger
        self._started = time.monotonic()
        self._ended = False

    @property
    def ended(self) -> bool:
        return self._ended

    def end(self, status: str, code: str = "") -> None:
        """Closes the call with a result's `status`, and for `refused` its `code`."""
        if self._ended:
            logger.error("accounting: a call was ended twice, the second time as %s", status)
            return
        self._ended = True
        self._ledger._close(status, code, time.monotonic() - self._started)


Observer = Callable[[str, str, float], None]
"""(status, refusal code or "", seconds) of a call that ended."""


class Accounting:
    """The ledger of one process."""

    def __init__(self, observe: Observer | None = None) -> None:
        self._observe = observe
        self._received = 0
        self._in_flight = 0
        self._ended = dict.fromkeys(("answered", "no_match", "failed", "cancelled", "invalid"), 0)
        self._refused: dict[str, int] = {}

    @contextmanager
    def call(self) -> Iterator[Call]:
        """A call's whole life. What raises inside ends it: as cancelled, or as failed."""
        self._received += 1
        self._in_flight += 1
        call = Call(self)
        try:
            yield call
        except CancelledError:
            if not call.ended:
                call.end("cancelled")
            raise
        finally:
            if not call.ended:
                call.end("failed")

    def counts(self) -> Counts:
        """The counts now. A violated identity is logged as an error."""
        counts = Counts(
            received=self._received,
            refused=dict(self._refused),
            in_flight=self._in_flight,
            **self._ended,
        )
        if counts.surplus:
            logger.error("accounting: %d calls are unaccounted for: %s", counts.surplus, counts)
        return counts

    def _close(self, status: str, code: str, seconds: float) -> None:
        self._in_flight -= 1
        if status == "refused":
            self._refused[code] = self._refused.get(code, 0) + 1
        elif status == "invalid":
            self._received -= 1
            self._ended["invalid"] += 1
        else:
            self._ended["cancelled" if status == "cancelled" else ANSWERS[status]] += 1
        if self._observe is not None:
            self._observe(status, code, seconds)
