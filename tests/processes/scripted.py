"""A child that does as it is told on its command line, and notes each of its starts in a file.

    python -m tests.processes.scripted FILE ACT... CHANNEL

The n-th start plays the n-th ACT, the last one ever after: `serve` until a signal, `deaf` to signals but
serving, `plain` as if it had not begun to listen to them, `fail` once it has served, `stammer` and fail,
`kill` itself in the middle of a line, or `exit:N` before it has served.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

from mcp_discovery.processes.child import Parent, die_with

STOPS = (signal.SIGTERM, signal.SIGINT)


def main() -> None:
    file, acts, channel = Path(sys.argv[1]), sys.argv[2:-1], socket.socket(fileno=int(sys.argv[-1]))
    parent = Parent(channel)
    assignment = parent.read_assignment()
    die_with(assignment.parent)
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    with file.open("a") as log:
        log.write(f"{os.getpid()}\n")
    act = acts[min(len(file.read_text().splitlines()), len(acts)) - 1]
    if act.startswith("exit:"):
        sys.exit(int(act[5:]))
    parent.tell_ready()
    if act == "stammer":
        channel.sendall(b'["report", {"service": 1}, "')  # as where a parent does not read for long
    if act in ("fail", "stammer"):
        parent.tell_failed("it was told to")
        sys.exit(70)
    if act == "kill":
        channel.sendall(b'["failed", "it')
        os.kill(os.getpid(), signal.SIGKILL)
    if act == "plain":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        signal.pause()
    if act == "deaf":
        signal.pause()  # for a signal that is not blocked
    signal.sigwait(STOPS)


if __name__ == "__main__":
    main()
