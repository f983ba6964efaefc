"""Every call accounted for, exactly, at any moment: the only place where calls begin and end.

An `Accounting` belongs to one event loop and needs no lock.
"""

from __future__ import annotations

import logging
import time
from asyncio import CancelledError
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from mcp_discovery.observe.counts import Counts
from mcp_discovery.observe.ledger import Ledger

logger = logging.getLogger(__name__)


class Call:
    """One call between its arrival and its end; `end` may be called once, `begin` before it."""

    __slots__ = ("_begun", "_ended", "_ledger", "_started")

    def __init__(self, ledger: Accounting) -> None:
        self._ledger = ledger
        self._started = time.monotonic()
        self._begun = self._ended = False

    @property
    def ended(self) -> bool:
        return self._ended

    def begin(self) -> None:
        """The call is valid: from now on it is received and in flight."""
        if not self._begun:
            self._begun = True
            self._ledger._open_one()

    def end(self, status: str, code: str = "") -> None:
        """Closes the call with a result's `status`, and for `refused` its `code`. Any but an `invalid` one
        was received; one that was received and turns out to be invalid is a fault of ours."""
        if self._ended:
            logger.error("accounting: a call was ended twice, the second time as %s", status)
            return
        if status != "invalid":
            self.begin()
        elif self._begun:
            logger.error("accounting: a call was found to be invalid after it had begun")
            status = "failed"
        self._ended = True
        self._ledger._close(status, code, time.monotonic() - self._started, begun=self._begun)


Observer = Callable[[str, str, float], None]
"""(status, refusal code or "", seconds) of a call that ended."""


class Accounting:
    """The calls of one process, written down in its ledger."""

    def __init__(self, observe: Observer | None = None, ledger: Ledger | None = None) -> None:
        self.ledger = ledger or Ledger()
        self._observe = observe
        self._open = 0

    @contextmanager
    def call(self) -> Iterator[Call]:
        """A call's whole life, which is to begin once it is known to be valid. What raises inside ends it: as
        cancelled, or as failed."""
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
        """The counts now. Calls that were lost or doubled are logged as an error."""
        counts = replace(self.ledger.counts(), in_flight=self._open)
        if counts.surplus:
            logger.error("accounting: %d calls are unaccounted for: %s", counts.surplus, counts)
        return counts

    def _open_one(self) -> None:
        self.ledger.begin()
        self._open += 1

    def _close(self, status: str, code: str, seconds: float, *, begun: bool) -> None:
        self._open -= begun
        self.ledger.end(status, code, seconds)
        if self._observe is not None:
            self._observe(status, code, seconds)
