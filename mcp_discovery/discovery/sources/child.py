"""Child processes of stdio servers: they end with us, and what they say on stderr is bounded.

The client ends a child's whole process group when its session closes. Where we are killed and cannot,
Linux does: run as a program, this file asks for a signal at the parent's death, then becomes the
server. Elsewhere a server still sees its stdin close.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import shutil
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TextIO

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1  # prctl(2)
NO_COMMAND = 127
MAX_LINES = 200  # of one child that are logged
MAX_LINE = 300  # characters of a line
KEPT_LINES = 5


def command_of(command: str, args: Sequence[str], path: str | None) -> tuple[str, list[str]]:
    """What to start for `command`, looked up along `path`. Raises FileNotFoundError."""
    found = shutil.which(command, path=path)
    if found is None:
        raise FileNotFoundError(f"its command {command!r:.80} is not installed or not on the PATH")
    if sys.platform != "linux":
        return found, list(args)
    return sys.executable, ["-I", "-S", __file__, str(os.getpid()), found, *args]


class Stderr(asyncio.Protocol):
    """A child's stderr: the first lines go to the debug log, the last are kept, all are read."""

    def __init__(self, server: str, redact: Callable[[str], str]) -> None:
        self._server = server
        self._redact = redact
        self._logged = 0
        self._partial = b""
        self._last: deque[str] = deque(maxlen=KEPT_LINES)

    @property
    def last(self) -> str:
        """The last line that says something, without secrets; "" where none came."""
        return self._last[-1] if self._last else ""

    def data_received(self, data: bytes) -> None:
        *lines, rest = (self._partial + data).split(b"\n")
        # A line without end must not grow; a secret cut in two could not be recognised, so all goes.
        self._partial = rest if len(rest) <= 64 * MAX_LINE else b""
        for line in lines:
            self._line(line)

    def connection_lost(self, exc: Exception | None) -> None:
        self._line(self._partial)

    def _line(self, line: bytes) -> None:
        text = self._redact(line.decode(errors="replace")).strip()[:MAX_LINE]
        if not text:
            return
        self._last.append(text)
        self._logged += 1
        if self._logged <= MAX_LINES:
            logger.debug("%s: %s", self._server, text)
        elif self._logged == MAX_LINES + 1:
            logger.debug("%s: further lines of its stderr are not logged", self._server)


@contextmanager
def stderr_pipe() -> Iterator[tuple[int, TextIO]]:
    """The reading end and, open inside the block only, the end that a child writes to."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as errlog:
        yield reading, errlog


def become(parent: int, command: str, args: Sequence[str], environment: Mapping[str, str]) -> None:
    """Turns this process into `command`, which gets SIGTERM when `parent` dies. Linux only."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before it was watched
        sys.exit(0)
    try:
        os.execve(command, [command, *args], environment)
    except OSError as error:
        print(f"{command} cannot be started: {error.strerror}", file=sys.stderr)
        sys.exit(NO_COMMAND)


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2], sys.argv[3:], os.environ)
