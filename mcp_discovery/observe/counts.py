"""What became of the calls, as numbers.

    received = answered + no_match + sum(refused) + failed + cancelled + in_flight

`received` counts valid calls. A call with a bad argument is counted apart, as `invalid`, and at no moment
among those received.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
