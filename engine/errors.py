"""Every refusal and every failure of the engine.

Faults are exceptions, one tree:

    EngineError
    ├── ConfigError      a value outside its range, or a combination that cannot work
    ├── ModelError       a model, tokenizer or adapter file that is missing, damaged or of another kind
    ├── LoadRefused      the allowance or the card cannot hold what was asked; nothing is left allocated
    ├── CanaryFailed     a known answer came out wrong; the engine does not serve
    └── EngineFault      a step failed on the device; requests in flight end as Failed

Refusals of a request are values, not exceptions: a `Refusal` travels the same path as an answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class EngineError(Exception):
    """Base of every fault. `str()` is one sentence that says what is wrong and what to do."""


class ConfigError(EngineError):
    """A configuration value is out of range, or values contradict each other."""


class ModelError(EngineError):
    """A model, tokenizer or adapter file is missing, damaged or does not fit."""


class LoadRefused(EngineError):
    """The plan does not fit. `needed_mib`, `free_mib` and `short_mib` are MiB, short rounded up."""

    def __init__(self, message: str, *, needed_mib: int, free_mib: int) -> None:
        super().__init__(message)
        self.needed_mib = needed_mib
        self.free_mib = free_mib
        self.short_mib = max(0, needed_mib - free_mib)


class CanaryFailed(EngineError):
    """A known answer came out wrong."""


class EngineFault(EngineError):
    """A step failed on the device, or the engine is gone."""


class RefusalCode(StrEnum):
    """Why a request was refused. The strings are what users see (docs and interface)."""

    REQUEST_TOO_LARGE = "request_too_large"  # needs more pages than exist; never retry
    PAGES_SHORT = "pages_short"  # by the measured rate the pages do not come before the deadline
    QUEUE_FULL = "queue_full"
    DEADLINE = "deadline"  # pages would come in time, the rest of the work would not
    NOT_READY = "not_ready"
    DRAINING = "draining"
    RATE_LIMITED = "rate_limited"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that was not served, with the numbers of the moment it was decided.

    `pages_needed` is the need of the smallest window in which the request could run
    (admission.py); `pages_free` is what was free for this request: free pages plus cached pages
    that nobody references, less those that it would itself reuse.
    """

    code: RefusalCode
    message: str
    pages_needed: int
    pages_free: int
    pages_total: int
    page_tokens: int
    queue_depth: int
    retry_after_ms: int | None

    @property
    def page_deficit(self) -> int:
        """Pages short at the decision, never negative; against the whole pool where it can never fit."""
        against = self.pages_total if self.code is RefusalCode.REQUEST_TOO_LARGE else self.pages_free
        return max(0, self.pages_needed - against)
