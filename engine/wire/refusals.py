"""What is said where no engine was asked: by the server while it has none, by the client without a server."""

from __future__ import annotations

from engine.client import EngineStatus
from engine.client import no_engine as no_engine
from engine.errors import Refusal, RefusalCode
from engine.wire.messages import EngineFacts

RETRY_MS = 1000


def refuse(status: EngineStatus, facts: EngineFacts | None, code: RefusalCode, message: str) -> Refusal:
    """With the numbers of a snapshot; how many pages are needed only the engine could say, so 0."""
    pages = status.pages
    return Refusal(
        code=code,
        message=message,
        pages_needed=0,
        pages_free=pages.free + pages.cached,
        pages_total=pages.total,
        page_tokens=facts.page_tokens if facts else 0,
        queue_depth=status.waiting,
        retry_after_ms=RETRY_MS,
    )
