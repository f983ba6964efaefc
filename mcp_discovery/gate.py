"""An engine's client that can be there before the engine is, and outlive it.

Discovery holds a `Gate`; behind it an engine is put in place, taken away, replaced. While the gate is
closed every request is refused at once, as `not_ready` with the reason. The warm-up goes through it
too, and waits while any caller's request is under way, though not for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from engine.client import Choose, EngineClient, EngineStatus, no_engine
from engine.errors import Refusal, RefusalCode
from engine.request import Outcome, Rank, Request
from mcp_discovery.discovery.warm import CALLER as WARM_UP

RETRY_MS = 1000
PATIENCE_S = 1.0


class Gate:
    """An `EngineClient`. Used from one event loop."""

    def __init__(self, reason: str, page_tokens: int, patience_s: float = PATIENCE_S) -> None:
        """`reason` says why it is closed; `page_tokens` stands in its refusals; the warm-up waits at
        most `patience_s` for a moment without calls."""
        self._patience_s = patience_s
        self._client: EngineClient | None = None
        self._reason = reason
        self._page_tokens = page_tokens
        self._draining = False
        self._under_way = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    @property
    def reason(self) -> str:
        """Why requests are refused, "" while the gate is open."""
        return self._reason

    def open(self, client: EngineClient) -> None:
        """Lets requests through to `client`, unless it drains."""
        self._reason = self._reason if self._draining else ""
        self._client = client

    def close(self, reason: str) -> None:
        """Refuses requests for `reason`; those let through go on."""
        self._reason = reason
        self._client = None

    async def drain(self, timeout: float) -> bool:
        """Refuses requests as draining from now on, and waits for those let through. Whether all have ended
        within `timeout` seconds."""
        self._reason, self._draining = "it is draining", True
        with suppress(TimeoutError):
            await asyncio.wait_for(self._quiet.wait(), timeout)
        return self._quiet.is_set()

    async def run(self, request: Request, *, deadline: float | None = None, caller: str = "") -> Outcome:
        if caller == WARM_UP:
            with suppress(TimeoutError):  # never quiet: the warm-up gets its turn all the same
                await asyncio.wait_for(self._quiet.wait(), self._patience_s)
            return await self._run(request, deadline, caller)
        with self._counted():
            return await self._run(request, deadline, caller)

    async def rank(
        self, request: Rank, choose: Choose, *, deadline: float | None = None, caller: str = ""
    ) -> Outcome:
        if self._client is None or self._draining:
            return self._refusal()
        with self._counted():
            return await self._client.rank(request, choose, deadline=deadline, caller=caller)

    def status(self) -> EngineStatus:
        if self._client is not None:
            return self._client.status()
        return no_engine(self._reason)

    async def _run(self, request: Request, deadline: float | None, caller: str) -> Outcome:
        if self._client is None or self._draining:
            return self._refusal()
        return await self._client.run(request, deadline=deadline, caller=caller)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._under_way += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._quiet.set()

    def _refusal(self) -> Refusal:
        return Refusal(
            code=RefusalCode.DRAINING if self._draining else RefusalCode.NOT_READY,
            message=f"The server is not ready: {self._reason}.",
            pages_needed=0,
            pages_free=0,
            pages_total=0,
            page_tokens=self._page_tokens,
            queue_depth=0,
            retry_after_ms=RETRY_MS,
        )
