"""Logging: one line an event, on stderr, readable by people. No query text and no secret at `info`."""

from __future__ import annotations

import logging
import sys
import time
from typing import TextIO

_QUIET = ("mcp", "uvicorn", "asyncio", "httpx2", "httpcore2")


class OneLine(logging.Formatter):
    """`2026-01-31T12:00:00Z info server: text`; what a traceback holds follows on its own lines."""

    converter = staticmethod(time.gmtime)

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(level)s %(room)s: %(message)s", "%Y-%m-%dT%H:%M:%SZ")

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.level = record.levelname.lower()
        record.room = record.name.removeprefix("mcp_discovery.")
        # A line feed inside a message would let a caller write lines of his own.
        record.message = record.message.replace("\r", "\\r").replace("\n", "\\n")
        return super().formatMessage(record)


def configure(*, debug: bool = False, stream: TextIO | None = None) -> None:
    """Sends every logger's records to `stream` (stderr) in this form; libraries speak from warnings on."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(OneLine())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if debug else logging.INFO)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.DEBUG if debug else logging.WARNING)
