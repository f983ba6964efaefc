"""The engine's end of the wire: serves an engine of this process on a Unix socket."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from engine.client import Submitter
from engine.wire.messages import EngineFacts


@dataclass(frozen=True, slots=True)
class WireLimits:
    """What one connection may take. The first four are told to the client in the welcome."""

    max_frame: int = 1 << 20  # bytes
    window: int = 4096  # requests in flight
    prefix_slots: int = 16_384  # prefixes remembered
    prefix_tokens: int = 1 << 20  # their tokens together
    write_buffer: int = 8 << 20  # bytes not read by the client, above which it is dropped
    connections: int = 64
    hello_s: float = 2.0  # from connecting to the first frame
    status_every_s: float = 0.5


class WireServer:
    """Serves a `Submitter` (`LocalClient(engine)`) to processes of this host. Used from one event loop.

    server = WireServer()
    await server.start(Path("/run/user/1000/engine/socket"))
    server.open(LocalClient(engine), facts)
    """

    def __init__(
        self,
        limits: WireLimits | None = None,
        *,
        uids: frozenset[int] | None = None,
        reason: str = "the engine is starting",
    ) -> None:
        """Only processes of `uids` (None: this process's own user) are served. Until `open`, requests are
        refused as not ready for `reason`."""
        raise NotImplementedError

    @property
    def connections(self) -> int: ...

    @property
    def in_flight(self) -> int:
        """Requests of all connections that have not ended."""
        ...

    async def start(self, where: Path | socket.socket) -> None:
        """Listens at a path (see `listen_at`) or on a listening socket that somebody else made.

        Raises EngineFault in one sentence where the path cannot be had.
        """

    def open(self, engine: Submitter, facts: EngineFacts) -> None:
        """Lets requests through to `engine` and tells every connection."""

    def shut(self, reason: str) -> None:
        """Refuses new requests as not ready for `reason`; those under way go on."""

    def drain(self, reason: str = "the engine is about to stop") -> None:
        """Announces that no new request is taken; those under way go on. For good."""

    async def idle(self, timeout: float) -> bool:
        """Waits until nothing is under way; False where that took longer than `timeout` seconds."""
        ...

    async def close(self) -> None:
        """Stops listening, writes what is left to write, ends every connection, cancels what is under way."""
