"""A child's side: what it is told, what it tells, and that it never outlives its parent."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import json
import logging
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

from mcp_discovery.cli import sentence_of
from mcp_discovery.exits import ENGINE_FAILED, UNEXPECTED
from mcp_discovery.observe import log
from mcp_discovery.observe.ledger import Ledger
from mcp_discovery.processes.assignment import Assignment

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
WRITE_S = 5.0  # for a parent that is stopped to go on reading
MODULES = {
    "server": "mcp_discovery.processes.server",
    "engine": "mcp_discovery.processes.engine_process",
    "frontend": "mcp_discovery.processes.frontend",
}
_CHUNK = 65_536


class Parent:
    """The parent as its child sees it, at the other end of the channel: lines of JSON, `[kind, what]`. Each
    begins with a line's end, as the one before may have been cut short."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def read_assignment(self) -> Assignment:
        """Waits for it, and ends the process where the parent has ended instead."""
        line = b""
        while not line.endswith(b"\n"):
            piece = self._channel.recv(_CHUNK, socket.MSG_PEEK)
            if not piece:
                os._exit(UNEXPECTED)
            line += self._channel.recv(piece.find(b"\n") + 1 or len(piece))
        return Assignment.model_validate_json(line)

    def listen(self, report: Callable[[], dict[str, Any]]) -> None:
        """From now on answers with `report` when it is asked. Ends the process when the parent has ended,
        where the system does not see to it."""
        self._report = report
        self._channel.settimeout(WRITE_S)
        asyncio.get_running_loop().add_reader(self._channel, self._on_readable)
        self._tell("listens", "")

    def tell_ready(self) -> None:
        """Calls are answered from now on."""
        self._tell("ready", "")

    def tell_failed(self, reason: str) -> None:
        """Why this process is about to exit: for the log a few words, for a user a sentence."""
        self._tell("failed", reason)

    def _on_readable(self) -> None:
        try:
            asked = self._channel.recv(_CHUNK)
        except TimeoutError:
            return
        except OSError:
            asked = b""
        if not asked:
            os._exit(UNEXPECTED)
        self._tell("report", self._report())  # one answer does for all that have asked

    def _tell(self, kind: str, what: object) -> None:
        with contextlib.suppress(OSError):  # it has just ended, and so shall we
            self._channel.sendall(b"\n" + json.dumps([kind, what]).encode() + b"\n")


def main(channel: int) -> int:
    """A child's whole life; returns its exit code."""
    # Until the work has begun a signal ends the process as any other: there is nothing to drain.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = Parent(socket.socket(fileno=channel))
    assignment = parent.read_assignment()
    die_with(assignment.parent)
    try:
        code = _work(assignment, parent)
    except Exception as error:  # noqa: BLE001 - the parent tells a user, once for all children that fail alike
        if assignment.debug:
            traceback.print_exc()
        sentence, code = sentence_of(error)
        parent.tell_failed(sentence)
    if code == ENGINE_FAILED:
        # Nothing that tidies up may run over a device that has failed: it could hang or abort.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _work(assignment: Assignment, parent: Parent) -> int:
    """Imports late: the packages of a role take seconds, and the parent's death must be seen before."""
    run = importlib.import_module(MODULES[assignment.role]).run
    log.configure(debug=assignment.debug)  # after the imports, some of which set levels of their own
    return int(run(assignment, parent))


def die_with(parent: int) -> None:
    """Has the system kill this process when its parent ends, however that comes about. Linux only;
    elsewhere `Parent.listen` sees to it as long as the event loop turns."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(UNEXPECTED)


def ledger_of(assignment: Assignment) -> Ledger:
    """That which the parent reads too."""
    if assignment.ledger is None:
        raise ValueError(f"{assignment.name} has been given no ledger")
    return Ledger.shared(assignment.ledger)


def stop_on_signals() -> asyncio.Event:
    """An event that SIGTERM or SIGINT sets. More of them change nothing: a service manager signals every
    process of the service and the parent passes its own on. A second one is the parent's to act on."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop
