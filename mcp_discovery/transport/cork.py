"""What is written in one turn of the event loop leaves in one write, in the next.

uvicorn writes the head and the body of a response by themselves, and uvloop hands each to the system at
once: two system calls and two records of TLS for each response, and a client that is woken for a head.
"""

from __future__ import annotations

import asyncio
from typing import Any

MAX_HELD_BYTES = 64 << 10


class CorkedTransport(asyncio.WriteTransport):
    """A transport's writing side whose writes wait for the loop's next turn, or until `MAX_HELD_BYTES` wait:
    so that whoever writes on and on in one turn is told to pause, and memory stays bounded."""

    def __init__(self, transport: asyncio.WriteTransport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._held: list[bytes | bytearray | memoryview] = []
        self._held_bytes = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._held:
            self._loop.call_soon(self._flush)
        self._held.append(data)
        self._held_bytes += len(data)
        if self._held_bytes >= MAX_HELD_BYTES:
            self._flush()

    def close(self) -> None:
        """Closes once what was written has left."""
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        """What waits is not sent any more."""
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def _flush(self) -> None:
        if not self._held:
            return
        held, self._held, self._held_bytes = self._held, [], 0
        if not self._transport.is_closing():
            self._transport.write(held[0] if len(held) == 1 else b"".join(held))
