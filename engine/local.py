"""The client of an engine in this process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from engine.client import Choose, EngineStatus
from engine.engine import Engine
from engine.request import Outcome, Rank, Request

T = TypeVar("T")


class LocalClient:
    """`EngineClient` on an event loop. The engine's thread wakes the loop once for all that a step
    brought, not once for each request."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._mailboxes: dict[asyncio.AbstractEventLoop, _Mailbox] = {}
        engine.after_callbacks(self._deliver)

    async def run(self, request: Request, *, deadline: float | None = None, caller: str = "") -> Outcome:
        if isinstance(request, Rank):
            raise ValueError("a Rank request goes through rank()")
        return await self._run(request, None, deadline, caller)

    async def rank(
        self, request: Rank, choose: Choose, *, deadline: float | None = None, caller: str = ""
    ) -> Outcome:
        return await self._run(request, choose, deadline, caller)

    def status(self) -> EngineStatus:
        return self._engine.status()

    async def _run(
        self, request: Request, choose: Choose | None, deadline: float | None, caller: str
    ) -> Outcome:
        loop = asyncio.get_running_loop()
        post = self._mailbox(loop).post
        done: asyncio.Future[Outcome] = loop.create_future()
        vector: asyncio.Future[tuple[float, ...]] = loop.create_future()
        handle = self._engine.submit(
            request,
            deadline=deadline,
            caller=caller,
            on_done=lambda outcome: post(lambda: _settle(done, outcome)),
            on_vector=lambda value: post(lambda: _settle(vector, value)),
        )
        timer = None if deadline is None else loop.call_later(deadline - time.monotonic(), handle.expire)
        try:
            if choose is not None:
                await asyncio.wait((done, vector), return_when=asyncio.FIRST_COMPLETED)
                if not done.done():
                    handle.supply(tuple(choose(vector.result())))
            return await done
        finally:
            if timer is not None:
                timer.cancel()
            if not done.done() or done.cancelled():  # cancelling this task has cancelled the future
                handle.cancel()

    def _mailbox(self, loop: asyncio.AbstractEventLoop) -> _Mailbox:
        mailbox = self._mailboxes.get(loop)
        if mailbox is None:
            self._mailboxes = {each: box for each, box in self._mailboxes.items() if not each.is_closed()}
            mailbox = self._mailboxes[loop] = _Mailbox(loop)
        return mailbox

    def _deliver(self) -> None:
        for mailbox in list(self._mailboxes.values()):
            mailbox.wake()


class _Mailbox:
    """What other threads want done on a loop, gathered until `wake`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread = threading.get_ident()  # made on the loop's own thread
        self._letters: deque[Callable[[], None]] = deque()

    def post(self, letter: Callable[[], None]) -> None:
        """Runs `letter` on the loop: at once where this is its thread, else after the next `wake`."""
        if threading.get_ident() == self._thread:
            letter()
        else:
            self._letters.append(letter)  # a deque may be appended to and emptied by two threads

    def wake(self) -> None:
        if not self._letters:
            return
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop is closed: nobody waits any more
            self._letters.clear()

    def _deliver(self) -> None:
        while self._letters:
            self._letters.popleft()()


def _settle(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)
