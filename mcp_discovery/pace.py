"""How many calls begin in one turn of the event loop."""

from __future__ import annotations

import asyncio
from collections import deque


class Pace:
    """Lets a few calls begin in each turn of the loop, in the order they come.

    Of many that come together all would else be read, searched for and handed to the engine before the loop
    looks at its sockets again, and the engine would wait meanwhile for what the first of them have to
    answer it. Used from one event loop at a time.
    """

    def __init__(self, per_turn: int = 8) -> None:
        self._per_turn = per_turn
        self._loop: asyncio.AbstractEventLoop | None = None
        self._begun = 0  # in this turn
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def turn(self) -> None:
        """Returns at once, or in one of the next turns. May be cancelled."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # nothing that one has yet to call is ever called after its end
            self._loop, self._begun = loop, 0
            self._waiting.clear()
        if not self._begun:
            loop.call_soon(self._next)
        if self._begun < self._per_turn:  # nobody waits
            self._begun += 1
            return
        mine: asyncio.Future[None] = loop.create_future()
        self._waiting.append(mine)
        await mine

    def _next(self) -> None:
        """A turn begins: for those that have waited, and while it lasts for those that come."""
        self._begun = 0
        while self._waiting and self._begun < self._per_turn:
            first = self._waiting.popleft()
            if not first.done():  # it has not been cancelled
                first.set_result(None)
                self._begun += 1
        if self._begun:
            asyncio.get_running_loop().call_soon(self._next)
