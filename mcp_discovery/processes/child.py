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

from mcp_discovery.cli import guarded
from mcp_discovery.exits import ENGINE_FAILED, UNEXPECTED
from mcp_discovery.observe import log
from mcp_discovery.processes.assignment import Assignment

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
MODULES = {"server": "mcp_discovery.processes.server"}


class Parent:
    """The parent as its child sees it, at the other end of the channel."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def read_assignment(self) -> Assignment:
        with self._channel.makefile("rb") as lines:
            return Assignment.model_validate_json(lines.readline())

    def tell_ready(self) -> None:
        """Calls are answered from now on."""
        self._tell("ready", "")

    def tell_failed(self, reason: str) -> None:
        """Why this process is about to exit, in a few words."""
        self._tell("failed", reason)

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Ends the process when the parent has ended, where the system does not see to it."""
        loop.add_reader(self._channel, self._on_readable)

    def _on_readable(self) -> None:
        with contextlib.suppress(OSError):
            if self._channel.recv(4096):
                return
        os._exit(UNEXPECTED)

    def _tell(self, kind: str, text: str) -> None:
        with contextlib.suppress(OSError):  # it has just ended, and so shall we
            self._channel.sendall(json.dumps([kind, text]).encode() + b"\n")


def main(channel: int) -> int:
    """A child's whole life; returns its exit code."""
    # Until the work has begun a signal ends the process as any other: there is nothing to drain.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = Parent(socket.socket(fileno=channel))
    assignment = parent.read_assignment()
    die_with(assignment.parent)
    code = guarded(lambda: _work(assignment, parent), debug=assignment.debug)
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
    elsewhere `Parent.watch` sees to it as long as the event loop turns."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(UNEXPECTED)


def stop_on_signals() -> asyncio.Event:
    """An event that SIGTERM or SIGINT sets. More of them change nothing: a service manager signals every
    process of the service and the parent passes its own on. A second one is the parent's to act on."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop
