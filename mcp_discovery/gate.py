"""An engine's client that can be there before the engine is, and outlive it.

Discovery holds a `Gate`; behind it an engine is put in place, taken away, replaced. While the gate is
closed every request is refused at once, as `not_ready` with the reason, except the warm-up's own.
"""

from __future__ import annotations

from engine.client import Choose, EngineClient, EngineStatus, PageCounts
from engine.errors import Refusal, RefusalCode
from engine.request import Outcome, Rank, Request

WARM_UP = "warm-up"
RETRY_MS = 1000


class Gate:
    """An `EngineClient`. Used from one event loop."""

    def __init__(self, reason: str, page_tokens: int) -> None:
        """`reason` says why it is closed; `page_tokens` stands in refusals until an engine is there."""
        self._client: EngineClient | None = None
        self._reason = reason
        self._page_tokens = page_tokens

    @property
    def reason(self) -> str:
        """Why requests are refused, "" while the gate is open."""
        return self._reason

    def close(self, reason: str, client: EngineClient | None = None) -> None:
        """Refuses requests for `reason`. With `client`, the warm-up reaches that engine already."""
        self._reason = reason
        self._client = client

    def open(self, client: EngineClient) -> None:
        """Lets requests through to `client`."""
        self._reason = ""
        self._client = client

    async def run(self, request: Request, *, deadline: float | None = None, caller: str = "") -> Outcome:
        client = self._passage(caller)
        if client is None:
            return self._refusal()
        return await client.run(request, deadline=deadline, caller=caller)

    async def rank(
        self, request: Rank, choose: Choose, *, deadline: float | None = None, caller: str = ""
    ) -> Outcome:
        client = self._passage(caller)
        if client is None:
            return self._refusal()
        return await client.rank(request, choose, deadline=deadline, caller=caller)

    def status(self) -> EngineStatus:
        if self._client is not None:
            return self._client.status()
        return EngineStatus(
            ready=False,
            draining=False,
            reason=self._reason,
            pages=PageCounts(0, 0, 0, 0),
            waiting=0,
            waiting_tokens=0,
            running=0,
            steps=0,
            tokens_per_s=0.0,
            kernels="",
        )

    def _passage(self, caller: str) -> EngineClient | None:
        return self._client if not self._reason or caller == WARM_UP else None

    def _refusal(self) -> Refusal:
        pages = self.status().pages
        return Refusal(
            code=RefusalCode.NOT_READY,
            message=f"The server is not ready: {self._reason}.",
            pages_needed=0,
            pages_free=pages.free,
            pages_total=pages.total,
            page_tokens=self._page_tokens,
            queue_depth=0,
            retry_after_ms=RETRY_MS,
        )
