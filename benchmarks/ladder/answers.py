"""What an answer says, read from its bytes: the little that is needed at once, the rest after a run."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

TAIL = 1536  # bytes at an answer's end that hold usage, timing, refusal and error
ANSWERS = ("matched", "partial", "no_match")
_STATUS = b'"structuredContent":{"status":"'
_TIMING = re.compile(rb'"timing_ms":(\{[^{}]*\})')
_CODE = re.compile(rb'"(?:refusal|error)":\{"code":"([^"]+)"')
_RETRY = re.compile(rb'"retry_after_ms":([\d.]+)')


class Call(NamedTuple):
    """One call. Moments are `time.monotonic()` seconds; `due` is when it was to be sent."""

    kind: str  # "short" or "long"
    query: int
    due: float
    sent: float
    ended: float
    status: str  # as the server said, or "failed"
    code: str  # of a refusal or an error
    reason: str  # of a failure
    queue_ms: float
    retrieve_ms: float
    engine_ms: float
    total_ms: float
    differs: str | None  # None: not compared; "": as the reference; else the sentence

    @property
    def latency_ms(self) -> float:
        return (self.ended - self.due) * 1000.0

    @property
    def outside_ms(self) -> float:
        """Neither queue, retrieval nor engine: TLS, HTTP, MCP, and waiting for the event loop."""
        return max(0.0, (self.ended - self.sent) * 1000.0 - self.queue_ms - self.retrieve_ms - self.engine_ms)


def status_of(body: bytes) -> str:
    """The status of a result, "" where there is none. A quote inside a text is escaped, so no text can
    hold these bytes."""
    start = body.find(_STATUS)
    if start < 0:
        return ""
    start += len(_STATUS)
    return body[start : body.index(b'"', start)].decode()


def retry_after_s(tail: bytes) -> float:
    """What a refusal asks its client to wait; a second where it names no time."""
    found = _RETRY.search(tail)
    return float(found[1]) / 1000.0 if found else 1.0


def timing_of(tail: bytes) -> tuple[float, float, float, float]:
    """Milliseconds of queue, retrieval and engine, and the server's total."""
    found = _TIMING.search(tail)
    if found is None:
        return 0.0, 0.0, 0.0, 0.0
    timing = json.loads(found[1])
    return timing["queue"], timing["retrieve"], timing["engine"], timing["total"]


def code_of(tail: bytes) -> str:
    found = _CODE.search(tail)
    return found[1].decode() if found else ""


def structured(body: bytes) -> dict[str, Any]:
    """The result object of an answer."""
    result: dict[str, Any] = json.loads(body)["result"]["structuredContent"]
    return result
