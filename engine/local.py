"""The client of an engine in this process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from engine.client import Choose, EngineStatus
from engine.engine import Engine, RequestHandle
from engine.request import Outcome, Rank, Request, Tokens

T = TypeVar("T")


class LocalClient:
    """`EngineClient` and `Submitter` on an event loop. The engine's thread wakes the loop once for all that
    a step brought, not once for each request."""

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

    def submit(
        self,
        request: Request,
        *,
        deadline: float | None,
        caller: str,
        on_done: Callable[[Outcome], None],
        on_vector: Callable[[tuple[float, ...]], None] | None = None,
    ) -> LocalSubmission:
        loop = asyncio.get_running_loop()
        post = self._mailbox(loop).post
        submission = LocalSubmission(on_done)
        handle = self._engine.submit(
            request,
            deadline=deadline,
            caller=caller,
            on_done=lambda outcome: post(partial(submission.end, outcome)),
            on_vector=None if on_vector is None else lambda value: post(partial(on_vector, value)),
        )
        submission.started(loop, handle, deadline)
        return submission

    async def _run(
        self, request: Request, choose: Choose | None, deadline: float | None, caller: str
    ) -> Outcome:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Outcome] = loop.create_future()
        vector: asyncio.Future[tuple[float, ...]] = loop.create_future()
        submission = self.submit(
            request,
            deadline=deadline,
            caller=caller,
            on_done=partial(_settle, done),
            on_vector=partial(_settle, vector),
        )
        try:
            if choose is not None:
                await asyncio.wait((done, vector), return_when=asyncio.FIRST_COMPLETED)
                if not done.done():
                    submission.supply(tuple(choose(vector.result())))
            return await done
        finally:
            if not done.done() or done.cancelled():  # cancelling this task has cancelled the future
                submission.cancel()

    def _mailbox(self, loop: asyncio.AbstractEventLoop) -> _Mailbox:
        mailbox = self._mailboxes.get(loop)
        if mailbox is None:
            self._mailboxes = {each: box for each, box in self._mailboxes.items() if not each.is_closed()}
            mailbox = self._mailboxes[loop] = _Mailbox(loop, self._engine.give_way)
        return mailbox

    def _deliver(self) -> None:
        for mailbox in list(self._mailboxes.values()):
            mailbox.wake()


class LocalSubmission:
    """A `Submission` whose deadline is watched by the loop, so that nobody waits for a step to end."""

    def __init__(self, on_done: Callable[[Outcome], None]) -> None:
        self._on_done = on_done
        self._ended = False
        self._handle: RequestHandle | None = None
        self._timer: asyncio.TimerHandle | None = None

    def started(self, loop: asyncio.AbstractEventLoop, handle: RequestHandle, deadline: float | None) -> None:
        """The engine has taken the request, or has ended it already."""
        self._handle = handle
        if deadline is not None and not self._ended:
            self._timer = loop.call_later(deadline - time.monotonic(), handle.expire)

    def end(self, outcome: Outcome) -> None:
        self._ended = True
        self._stop_timer()
        self._on_done(outcome)

    def cancel(self) -> None:
        self._stop_timer()
        if self._handle is not None:
            self._handle.cancel()

    def supply(self, prefixes: tuple[Tokens, ...]) -> None:
        if self._handle is not None:
            self._handle.supply(prefixes)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class _Mailbox:
    """What other threads want done on a loop, gathered until `wake`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, give_way: Callable[[], None]) -> None:
        """`give_way` is called before each letter that was gathered."""
        self._loop = loop
        self._give_way = give_way
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
            self._give_way()
            self._letters.popleft()()


def _settle(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)
