"""The caller's end of the wire: an `EngineClient` whose engine is in another process."""

from __future__ import annotations

import asyncio
import math
import random
import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType

from engine.client import Choose, EngineStatus
from engine.errors import EngineFault, Refusal, RefusalCode
from engine.request import Cancelled, Outcome, Rank, Request
from engine.wire.link import Call, Greeting, Link, trusted_uids
from engine.wire.messages import AskStatus, EngineFacts, Invalid, Ping
from engine.wire.refusals import no_engine, refuse

MAX_NAME = 200


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds."""

    handshake_s: float = 2.0  # from connecting to the welcome
    first_retry_s: float = 0.05  # after a lost connection; doubles up to
    last_retry_s: float = 2.0
    silence_s: float = 30.0  # without a frame from the server, which pushes its status: it hangs
    grace_s: float = 0.25  # after a deadline, for the engine's own refusal to come


class WireClient:
    """`EngineClient` over one connection, which is made again whenever it is lost. Used from one event loop.

    async with WireClient(path, name="front-end 1") as client:
        await client.wait_connected(timeout=5.0)
        outcome = await client.run(Embed(tokens), deadline=time.monotonic() + 1.0)

    While there is no connection, requests are refused as not ready with the reason. Requests under way
    when it is lost end at once as `Failed("engine_lost", ...)`.
    """

    def __init__(
        self,
        path: Path,
        *,
        name: str = "",
        shares_callers: bool = False,
        patience: Patience | None = None,
        uids: frozenset[int] | None = None,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        """`name` stands in the server's log. `shares_callers`: a caller of this process is the same caller
        as one of that name on other connections (front-ends of one server), not its own. `on_change` is
        called when the connection, the engine's readiness or its facts changed; it must not raise. A
        server that runs as none of `uids` (None: this process's user, or root) is not trusted."""
        if len(name) > MAX_NAME:
            raise ValueError(f"the client's name has {len(name)} characters, at most {MAX_NAME} are sent")
        self._path = path
        self._greeting = Greeting(name, shares_callers, trusted_uids() if uids is None else uids)
        self._patience = patience or Patience()
        self._on_change = on_change or _nothing
        self._link: Link | None = None  # welcomed and not lost
        self._reason = "it has not connected to its engine yet"  # why there is no link
        self._last = no_engine("")
        self._last_at = -math.inf
        self._connected = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    @property
    def is_connected(self) -> bool:
        return self._link is not None

    @property
    def facts(self) -> EngineFacts | None:
        """Of the engine at the other end; None while there is none."""
        return None if self._link is None else self._link.facts

    @property
    def in_flight(self) -> int:
        """Requests on which the server has not said its last word."""
        return 0 if self._link is None else len(self._link.calls)

    @property
    def status_age_s(self) -> float:
        """How old the snapshot is that `status` gives, infinite where none has come yet."""
        return time.monotonic() - (self._last_at if self._link is None else self._link.status_at)

    async def __aenter__(self) -> WireClient:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Begins to connect, and does not wait for it."""
        self._keeper = asyncio.create_task(self._keep_connected(), name="wire client")

    async def close(self) -> None:
        """Ends the connection; what is under way ends as `Failed("engine_lost", ...)`."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})
        self._reason = "its connection to the engine was closed"

    async def wait_connected(self, timeout: float) -> bool:
        """Whether there is a connection within `timeout` seconds."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._connected.wait(), timeout)
        return self.is_connected

    async def run(self, request: Request, *, deadline: float | None = None, caller: str = "") -> Outcome:
        """As `EngineClient.run`. Raises ValueError for a request that makes no sense or is too large for a
        frame, UndeclaredConstraint for a constraint other than `ItemList`."""
        if isinstance(request, Rank):
            raise ValueError("a Rank request goes through rank()")
        return await self._run(request, None, deadline, caller)

    async def rank(
        self, request: Rank, choose: Choose, *, deadline: float | None = None, caller: str = ""
    ) -> Outcome:
        """As `EngineClient.rank`; `choose` gets the vector as an array of float64."""
        return await self._run(request, choose, deadline, caller)

    def status(self) -> EngineStatus:
        """The last snapshot the server has pushed; never waits. Not ready while there is no connection."""
        link = self._link
        if link is None:
            return replace(self._last, ready=False, reason=self._reason)
        return link.status

    async def ask_status(self, timeout: float = 5.0) -> EngineStatus:
        """A snapshot of now. Raises EngineFault where none comes."""
        await self._question(AskStatus, timeout)
        return self.status()

    async def ping(self, timeout: float = 5.0) -> float:
        """Round trip to the server's event loop in seconds. Raises EngineFault where nothing comes back."""
        started = time.monotonic()
        await self._question(Ping, timeout)
        return time.monotonic() - started

    async def _run(
        self, request: Request, choose: Choose | None, deadline: float | None, caller: str
    ) -> Outcome:
        link = self._link
        if link is None or link.is_closed or len(link.calls) >= link.window:
            return self._refusal(link)
        call = link.ask(request, deadline, caller)
        if deadline is not None:
            self._watch(link, call, deadline)
        try:
            answer = await call.future
            if isinstance(answer, array) and choose is not None:
                link.supply(call, choose(answer))
                answer = call.answered or await call.future
        finally:
            if call.timer is not None:
                call.timer.cancel()
            link.withdraw(call, Cancelled())  # nothing, where it has its answer
        if isinstance(answer, Invalid):
            raise ValueError(answer.message)
        assert not isinstance(answer, array)
        return answer

    def _watch(self, link: Link, call: Call, deadline: float) -> None:
        """Ends a call that the engine has not ended by its deadline, so that nothing hangs on it."""
        wait = deadline + self._patience.grace_s - time.monotonic()
        loop = asyncio.get_running_loop()
        call.timer = loop.call_later(wait, lambda: link.withdraw(call, self._too_late(link)))

    async def _keep_connected(self) -> None:
        patience = self._patience
        retry_s = patience.first_retry_s
        while True:
            link = await self._connect()
            if link is not None:
                retry_s = patience.first_retry_s
                await self._stay(link)
            await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))  # not all at once
            retry_s = min(2.0 * retry_s, patience.last_retry_s)

    async def _connect(self) -> Link | None:
        """A link that is welcome; None, and why in `_reason`, where there is none."""
        loop, patience = asyncio.get_running_loop(), self._patience
        link = Link(self._greeting, patience.silence_s, self._on_change, self._forget)
        try:
            await loop.create_unix_connection(lambda: link, str(self._path))
        except OSError as error:
            self._reason = f"its engine cannot be reached at {self._path} ({error.strerror or error})"
            return None
        try:
            await asyncio.wait(
                (link.welcomed, link.lost),
                timeout=patience.handshake_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if link.welcomed.done() and not link.lost.done():
                return link
            if not link.lost.done():
                link.end(f"no welcome came within {patience.handshake_s:g} seconds")
        except asyncio.CancelledError:
            link.end("the client was closed")
            await link.lost
            raise
        self._reason = f"the connection to its engine was refused: {link.reason}"
        return None

    async def _stay(self, link: Link) -> None:
        """Until the link is lost."""
        self._link = link
        self._connected.set()
        self._on_change()
        try:
            await asyncio.shield(link.lost)
        except asyncio.CancelledError:
            link.end("the client was closed")
            await link.lost
            raise

    def _forget(self, link: Link) -> None:
        """A link is lost: at once, so that nothing is asked of it any more."""
        if link is not self._link:
            return  # it was never welcome
        self._last, self._last_at = link.status, link.status_at
        self._reason = f"the connection to its engine was lost: {link.reason}"
        self._link = None
        self._connected.clear()
        self._on_change()

    async def _question(self, make: Callable[[int], AskStatus | Ping], timeout: float) -> None:
        link = self._link
        if link is None:
            raise EngineFault(f"There is no engine to ask: {self._reason}.")
        try:
            answer = await asyncio.wait_for(link.question(make), timeout)
        except TimeoutError:
            raise EngineFault(f"The engine's process did not answer within {timeout:g} seconds.") from None
        if answer is None:
            raise EngineFault(f"The connection to the engine was lost: {link.reason}.")

    def _refusal(self, link: Link | None) -> Refusal:
        """Why a request is not sent."""
        say = partial(refuse, self.status(), self.facts)
        if link is None:
            return say(RefusalCode.NOT_READY, f"The server is not ready: {self._reason}.")
        if link.draining:
            return say(RefusalCode.DRAINING, f"The server takes no more calls: {link.draining}.")
        if link.is_choked:
            return say(RefusalCode.QUEUE_FULL, "The connection is busy: the engine's process lags behind.")
        return say(RefusalCode.QUEUE_FULL, f"The connection is busy with {len(link.calls):,} requests.")

    def _too_late(self, link: Link) -> Refusal:
        message = "The deadline has passed and the engine has not said anything."
        return refuse(link.status, link.facts, RefusalCode.DEADLINE, message)


def _nothing() -> None:
    pass
