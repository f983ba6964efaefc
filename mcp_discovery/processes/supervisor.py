"""The parent's loop: starts its children, passes signals on, starts again what failed, and says why it stops.

A child that asks for it in vain is not started again: a wrong setting stays wrong and a card that is
full stays full. Neither is one that never served: whoever has just started the server wants to know.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Callable, Sequence

from mcp_discovery.exits import ENGINE_FAILED, LOAD_REFUSED, OK, SIGNALLED, USAGE
from mcp_discovery.processes.assignment import Assignment
from mcp_discovery.processes.member import Member, how_it_died
from mcp_discovery.processes.restarts import Restarts

logger = logging.getLogger(__name__)

FINAL = (OK, USAGE, LOAD_REFUSED)  # exit codes of a child that is not started again
SAME_SIGNAL_S = 0.3  # `timeout` sends its signal to a process and to its group: that is one wish
LAST_WORDS_S = 5.0  # for the system to take a killed process apart
COMMAND = (sys.executable, "-m", "mcp_discovery.processes")


class Supervisor:
    """Runs members until a signal or until one cannot go on. Lives in one event loop, of the main thread."""

    def __init__(
        self,
        assignments: Sequence[Assignment],
        command: Sequence[str] = COMMAND,
        on_ready: Callable[[Member], None] = lambda member: None,
    ) -> None:
        """`command` starts a child; the number of its channel is added to it. `on_ready` hears of each child
        that serves."""
        self.members = [
            Member(assignment, Restarts(assignment.config.recovery), command, self)
            for assignment in assignments
        ]
        self._tell_ready = on_ready
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting: list[asyncio.TimerHandle] = []
        self._stop_code: int | None = None  # of the whole, once it stops
        self._passed_on = OK  # the exit code of a child that our signal to drain has killed
        self._signal: tuple[signal.Signals, float] | None = None

    @property
    def is_stopping(self) -> bool:
        return self._stop_code is not None

    async def run(self) -> int:
        """The exit code of the whole, once no child is left."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            for member in self.members:
                member.start()
            return await self._ended
        finally:
            self._kill()

    def on_ready(self, member: Member) -> None:
        self._tell_ready(member)

    # Ends.

    def _reap(self) -> None:
        """SIGCHLD: one or several children have ended."""
        for member in self.members:
            code = member.reap()
            if code is not None:
                self._on_end(member, code)
                member.buried()

    def _on_end(self, member: Member, code: int) -> None:
        if self._stop_code is not None:
            if code != self._passed_on:  # else it had nothing to drain yet
                self._stop_code = self._stop_code or code  # the first that is not 0 is that of the whole
            self._finish_if_alone()
        elif code in FINAL or not member.has_served:
            if member.told:
                print(f"mcp-discovery: {member.told}", file=sys.stderr)
            if member.restarts.total:
                logger.error("%s could not be started again; the server stops", member.name)
            self._stop(code)
        else:
            self._restart(member, member.told or how_it_died(code))

    def _restart(self, member: Member, why: str) -> None:
        delay = member.restarts.after(why, member.healthy_s)
        name, row = member.name, member.restarts.in_a_row
        if delay is None:
            logger.error("%s failed (%s) after %d restarts in a row; the server stops", name, why, row)
            self._stop(ENGINE_FAILED)
            return
        logger.warning("%s failed (%s); starting it again in %g s, restart %d", name, why, delay, row)
        self._waiting.append(asyncio.get_running_loop().call_later(delay, self._start_again, member))

    def _start_again(self, member: Member) -> None:
        try:
            member.start()
        except OSError as error:  # no process to be had
            self._restart(member, str(error))

    def _stop(self, code: int, number: signal.Signals = signal.SIGTERM) -> None:
        """Has every child drain with signal `number`; the whole ends with the last of them."""
        self._stop_code, self._passed_on = code, SIGNALLED + number
        while self._waiting:
            self._waiting.pop().cancel()
        for member in self.members:
            member.send_signal(number)
        self._finish_if_alone()

    def _finish_if_alone(self) -> None:
        if any(member.is_running for member in self.members) or self._ended.done():
            return
        self._ended.set_result(self._stop_code or OK)

    # Signals.

    def _on_signal(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self._signal is None:
            self._signal = number, now
            logger.info("%s: draining; a second signal exits at once", number.name)
            self._stop(self._stop_code or OK, number)
            return
        first, at = self._signal
        if number is first and now - at < SAME_SIGNAL_S:
            return
        logger.warning("%s again: exiting at once", number.name)
        if not self._ended.done():
            self._ended.set_result(SIGNALLED + number)

    def _kill(self) -> None:
        """Ends what is left, and waits until the system has: a card's memory comes back with that."""
        for member in self.members:
            member.send_signal(signal.SIGKILL)
        for member in self.members:
            member.wait(LAST_WORDS_S)
