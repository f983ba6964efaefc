"""The parent's loop: starts its children, passes signals on, starts again what failed, and says why it stops.

A child that asks for it in vain is not started again: a wrong setting stays wrong and a card that is
full stays full. Neither is one that never served: whoever has just started the server wants to know.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mcp_discovery.exits import ENGINE_FAILED, LOAD_REFUSED, OK, SIGNALLED, USAGE
from mcp_discovery.processes.assignment import Assignment
from mcp_discovery.processes.restarts import Restarts

logger = logging.getLogger(__name__)

FINAL = (OK, USAGE, LOAD_REFUSED)  # exit codes of a child that is not started again
SAME_SIGNAL_S = 0.3  # `timeout` sends its signal to a process and to its group: that is one wish
LAST_WORDS_S = 5.0  # for the system to take a killed process apart
COMMAND = (sys.executable, "-m", "mcp_discovery.processes")


@dataclass
class Member:
    """One process that is to run, whichever child runs it now."""

    name: str
    restarts: Restarts
    assignment: Callable[[], Assignment]
    inherits: Sequence[int]
    popen: subprocess.Popen[bytes] | None = None
    channel: socket.socket | None = None
    ready_at: float | None = None
    has_served: bool = False  # once, in whichever child
    told: str = ""  # what the child said of its failure
    unread: bytes = field(default=b"", repr=False)

    def healthy_s(self, now: float) -> float:
        return 0.0 if self.ready_at is None else now - self.ready_at


class Supervisor:
    """Runs members until a signal or until one cannot go on. Lives in one event loop, of the main thread."""

    def __init__(self, members: Sequence[Member], command: Sequence[str] = COMMAND) -> None:
        """`command` starts a child; the number of its channel is added to it."""
        self._members = members
        self._command = command
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting: list[asyncio.TimerHandle] = []
        self._stop_code: int | None = None  # of the whole, once it stops
        self._signal: tuple[signal.Signals, float] | None = None

    async def run(self) -> int:
        """The exit code of the whole, once no child is left."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            for member in self._members:
                self._start(member)
            return await self._ended
        finally:
            self._kill()

    # Starting.

    def _start(self, member: Member) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            member.popen = subprocess.Popen(
                [*self._command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), *member.inherits],
                process_group=0,  # the terminal's Ctrl-C comes to the parent alone, which passes it on
            )
        member.channel, member.ready_at, member.told, member.unread = ours, None, "", b""
        with contextlib.suppress(OSError):  # it has ended already, which SIGCHLD tells
            ours.sendall(member.assignment().model_dump_json().encode() + b"\n")
        ours.setblocking(False)
        asyncio.get_running_loop().add_reader(ours, self._listen, member)

    # What children tell.

    def _listen(self, member: Member) -> None:
        """Takes what a child has told; never waits."""
        channel = member.channel
        while channel is not None:
            try:
                chunk = channel.recv(65_536)
            except BlockingIOError:
                return
            except OSError:
                chunk = b""
            if not chunk:
                self._hang_up(member)
                return
            *lines, member.unread = (member.unread + chunk).split(b"\n")
            for line in lines:
                self._hear(member, *json.loads(line))

    def _hear(self, member: Member, kind: str, text: str) -> None:
        if kind == "ready":
            member.ready_at = time.monotonic()
            member.has_served = True
        elif kind == "failed":
            member.told = text

    def _hang_up(self, member: Member) -> None:
        if member.channel is not None:
            asyncio.get_running_loop().remove_reader(member.channel)
            member.channel.close()
            member.channel = None

    # Ends.

    def _reap(self) -> None:
        """SIGCHLD: one or several children have ended."""
        for member in self._members:
            code = None if member.popen is None else member.popen.poll()
            if code is not None:
                self._listen(member)  # its last words
                self._hang_up(member)
                member.popen = None
                self._on_end(member, code)

    def _on_end(self, member: Member, code: int) -> None:
        code = SIGNALLED - code if code < 0 else code
        if self._stop_code is not None:
            self._stop_code = self._stop_code or code  # the first that is not 0 is that of the whole
            self._finish_if_alone()
        elif code in FINAL or not member.has_served:
            if member.restarts.total:
                logger.error("%s could not be started again; the server stops", member.name)
            self._stop(code)
        else:
            self._restart(member, member.told or _died(code))

    def _restart(self, member: Member, why: str) -> None:
        delay = member.restarts.after(why, member.healthy_s(time.monotonic()))
        if delay is None:
            logger.error(
                "%s failed (%s) after %d restarts in a row; the server stops",
                member.name,
                why,
                member.restarts.in_a_row,
            )
            self._stop(ENGINE_FAILED)
            return
        logger.warning(
            "%s failed (%s); starting it again in %g s, restart %d",
            member.name,
            why,
            delay,
            member.restarts.in_a_row,
        )
        self._waiting.append(asyncio.get_running_loop().call_later(delay, self._start_again, member))

    def _start_again(self, member: Member) -> None:
        try:
            self._start(member)
        except OSError as error:  # no process to be had
            self._restart(member, str(error))

    def _stop(self, code: int, number: signal.Signals = signal.SIGTERM) -> None:
        """Has every child drain with signal `number`; the whole ends with the last of them."""
        self._stop_code = code
        while self._waiting:
            self._waiting.pop().cancel()
        for child in self._running():
            child.send_signal(number)
        self._finish_if_alone()

    def _finish_if_alone(self) -> None:
        if self._stop_code is not None and not self._running() and not self._ended.done():
            self._ended.set_result(self._stop_code)

    def _running(self) -> list[subprocess.Popen[bytes]]:
        return [member.popen for member in self._members if member.popen is not None]

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
        running = self._running()
        for child in running:
            child.kill()
        for child in running:
            child.wait(LAST_WORDS_S)


def _died(code: int) -> str:
    if code > SIGNALLED:
        return f"ended by {signal.Signals(code - SIGNALLED).name}"
    return f"exit code {code}"
