"""Reads the answers of a run once it is over, and holds them against references where there are any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.contamination import Answer, Reference, Tolerance, compare
from benchmarks.ladder.answers import ANSWERS, Call, code_of, structured, timing_of
from benchmarks.ladder.load import Raw

DEFAULT_LIMIT = 5  # the tool's own, which the short requests leave as it is


@dataclass(frozen=True, slots=True)
class Judge:
    """References by the number of their query; without any nothing is compared."""

    references: Mapping[int, Reference]
    tolerance: Tolerance = field(default_factory=Tolerance)

    @classmethod
    def of(cls, path: Path | None, queries: Sequence[str]) -> Judge:
        """From a file of `benchmarks.references`, for those queries that are in it; raises ValueError where
        it is none, or holds none of them."""
        if path is None:
            return cls({})
        from benchmarks.references import (
            References,
        )  # brings the engine with it, which a driver has no use for

        known = References.read(path)
        found = {at: reference for at, text in enumerate(queries) if (reference := known.of(text))}
        if not found:
            raise ValueError(f"{path} has no reference for any of the queries")
        return cls(found)

    @property
    def compares(self) -> bool:
        return bool(self.references)

    def call(self, raw: Raw) -> Call:
        """The call that `raw` was, its answer read."""
        status, reason = raw.status, raw.reason
        code = code_of(raw.tail) if status in ("refused", "failed", "invalid") else ""
        if status == "invalid":
            status, reason = "failed", f"the server found a bad argument: {code}"
        elif status == "failed" and not reason:
            reason = f"the server failed the call: {code}"
        return Call(
            raw.request.kind, raw.request.query, raw.due, raw.sent, raw.ended, status, code, reason,
            *timing_of(raw.tail), self._compared(raw),
        )  # fmt: skip

    def _compared(self, raw: Raw) -> str | None:
        reference = self.references.get(raw.request.query)
        if reference is None or raw.status not in ANSWERS:
            return None
        answer = Answer.of(structured(raw.body), DEFAULT_LIMIT)
        return compare(reference, answer, self.tolerance).sentence
