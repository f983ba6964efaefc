"""One process that is to run, whichever child runs it now: started, heard, asked, counted, mourned."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mcp_discovery.exits import SIGNALLED
from mcp_discovery.observe import ledger as ledgers
from mcp_discovery.observe.counts import Counts
from mcp_discovery.observe.ledger import Latencies, Ledger
from mcp_discovery.observe.status import ProcessReport
from mcp_discovery.processes.assignment import Assignment
from mcp_discovery.processes.restarts import Restarts

logger = logging.getLogger(__name__)

ANSWER_S = 2.0  # for a child to answer what it is asked
_CHUNK = 65_536


class Listener(Protocol):
    """Who hears what a child tells."""

    def on_ready(self, member: Member) -> None:
        """It serves."""


class Member:
    """`counts` and `latencies` are over all its children, of dead ones to their last call."""

    def __init__(
        self, assignment: Assignment, restarts: Restarts, command: Sequence[str], listener: Listener
    ) -> None:
        """`command` starts a child; the number of its channel is added to it. Each child gets the
        assignment, and where it answers calls a ledger of its own."""
        self.restarts = restarts
        self.has_served = False  # once, in whichever child
        self.told = ""  # what the child said of its failure
        self.report: Mapping[str, Any] | None = None  # the last that came
        self._assignment = assignment
        self._command = command
        self._listener = listener
        self._popen: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._unread = b""
        self._asked: asyncio.Future[None] | None = None
        self._ready_at: float | None = None
        self._listens = False
        self._ledger: Ledger | None = None
        self._past = Counts()
        self._past_latencies: dict[str, Latencies] = {}

    @property
    def name(self) -> str:
        return self._assignment.name

    @property
    def is_frontend(self) -> bool:
        return self._assignment.role == "frontend"

    @property
    def answers_calls(self) -> bool:
        return self._assignment.role != "engine"

    @property
    def is_running(self) -> bool:
        return self._popen is not None

    @property
    def serves(self) -> bool:
        return self._popen is not None and self._ready_at is not None

    @property
    def healthy_s(self) -> float:
        """How long the child has served."""
        return 0.0 if self._ready_at is None else time.monotonic() - self._ready_at

    # Its child.

    def start(self) -> None:
        """Raises OSError where there is no process to be had."""
        told = self._assignment
        inherits = [*told.sockets.values()]
        with contextlib.ExitStack() as held:
            if self.answers_calls:
                file = held.enter_context(tempfile.TemporaryFile())
                os.truncate(file.fileno(), ledgers.BYTES)
                self._ledger = Ledger.shared(file.fileno())
                told = told.model_copy(update={"ledger": file.fileno()})
                inherits.append(file.fileno())
            ours, theirs = socket.socketpair()
            held.enter_context(theirs)
            undo = held.enter_context(contextlib.ExitStack())
            undo.callback(ours.close)
            self._popen = subprocess.Popen(
                [*self._command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), *inherits],
                process_group=0,  # the terminal's Ctrl-C comes to the parent alone, which passes it on
            )
            undo.pop_all()
        self._channel, self._ready_at, self.told, self._unread = ours, None, "", b""
        self._listens = False
        if self.report is not None:
            self.report = {**self.report, "engine": None}  # that one is gone
        with contextlib.suppress(OSError):  # it has ended already, which SIGCHLD tells
            ours.sendall(told.model_dump_json().encode() + b"\n")
        ours.setblocking(False)
        asyncio.get_running_loop().add_reader(ours, self._listen)

    def send_signal(self, number: int) -> None:
        if self._popen is not None:
            self._popen.send_signal(number)

    def wait(self, timeout: float) -> None:
        """Until the child has ended, but no longer than `timeout` seconds."""
        if self._popen is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(timeout)

    def reap(self) -> int | None:
        """The exit code of a child that has just ended, 128 + n where signal n ended it; else None."""
        code = None if self._popen is None else self._popen.poll()
        if code is None:
            return None
        self._listen()  # its last words
        self._hang_up()
        self._popen = None
        if self._ledger is not None:
            self._past += self._ledger.last_counts()
            self._past_latencies = added(self._past_latencies, self._ledger.latencies())
            self._ledger = None
        return SIGNALLED - code if code < 0 else code

    def buried(self) -> None:
        """Its end has been dealt with."""
        self._ready_at = None

    # What it tells and is asked.

    async def ask(self) -> None:
        """Has `report` brought up to date; one that does not answer in time keeps its last one."""
        if self._channel is None or not self._listens:
            return
        if self._asked is None or self._asked.done():
            self._asked = asyncio.get_running_loop().create_future()
            try:
                self._channel.sendall(b'["report"]\n')
            except OSError:  # it has ended, or has not read for a long time
                return
        await asyncio.wait((self._asked,), timeout=ANSWER_S)

    def _listen(self) -> None:
        """Takes what the child has told; never waits."""
        while self._channel is not None:
            try:
                chunk = self._channel.recv(_CHUNK)
            except BlockingIOError:
                return
            except OSError:
                chunk = b""
            if not chunk:
                self._hang_up()
                return
            *lines, self._unread = (self._unread + chunk).split(b"\n")
            for message in map(_message, lines):
                if message is not None:
                    self._hear(*message)

    def _hear(self, kind: str, what: Any) -> None:
        if kind == "listens":
            self._listens = True
        elif kind == "ready":
            if self._ready_at is None:  # a front-end says so for each engine
                self._ready_at = time.monotonic()
            self.has_served = True
            self._listener.on_ready(self)
        elif kind == "failed":
            self.told = what
        elif kind == "report":
            self.report = what
            self._answer()

    def _hang_up(self) -> None:
        if self._channel is not None:
            asyncio.get_running_loop().remove_reader(self._channel)
            self._channel.close()
            self._channel = None
        self._answer()

    def _answer(self) -> None:
        if self._asked is not None and not self._asked.done():
            self._asked.set_result(None)

    # What its children have done.

    @property
    def counts(self) -> Counts:
        return self._past if self._ledger is None else self._past + self._ledger.counts()

    @property
    def latencies(self) -> Mapping[str, Latencies]:
        if self._ledger is None:
            return self._past_latencies
        return added(self._past_latencies, self._ledger.latencies())

    def process_report(self) -> ProcessReport:
        counts = self.counts
        return ProcessReport(
            name=self.name,
            pid=None if self._popen is None else self._popen.pid,
            serves=self.serves,
            restarts=self.restarts.total,
            last_failure=self.restarts.last_failure,
            received=counts.received,
            in_flight=counts.in_flight,
        )


def _message(line: bytes) -> tuple[str, Any] | None:
    """The (kind, what) of a line; None for an empty one, and for half of one, as of a child that gave up
    writing to a parent that did not read."""
    if not line:
        return None
    try:
        match json.loads(line):
            case [str(kind), what]:
                return kind, what
    except ValueError:
        pass
    logger.warning("half a line of %d bytes from a child is passed over", len(line))
    return None


def added(one: Mapping[str, Latencies], other: Mapping[str, Latencies]) -> dict[str, Latencies]:
    """Status by status."""
    total = dict(one)
    for status, held in other.items():
        total[status] = total[status] + held if status in total else held
    return total


def how_it_died(code: int) -> str:
    """In words, of a child that said nothing."""
    if code > SIGNALLED:
        return f"ended by {signal.Signals(code - SIGNALLED).name}"
    return f"exit code {code}"
