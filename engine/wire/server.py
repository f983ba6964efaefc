"""The engine's end of the wire: serves an engine of this process on a Unix socket."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from contextlib import suppress
from pathlib import Path

from engine.client import Submitter
from engine.wire.connection import Connection, Service, WireLimits
from engine.wire.listen import BACKLOG, listen_at
from engine.wire.messages import Draining, EngineFacts, Message, Opened, Snapshot, Status


class WireServer:
    """Serves a `Submitter` (`LocalClient(engine)`) to processes of this host. Used from one event loop.

    server = WireServer()
    await server.start(Path("/run/user/1000/engine/socket"))
    server.open(LocalClient(engine), facts)

    Whatever happens, `close` it: uvloop waits for ever at its end for a listener that is open.
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
        self._service = Service(limits or WireLimits(), uids or frozenset({os.getuid()}), reason)
        self._service.idle.set()
        self._numbers = itertools.count(1)
        self._listener: asyncio.Server | None = None
        self._path: tuple[Path, int] | None = None  # and the inode, to remove no other's
        self._ticker: asyncio.TimerHandle | None = None

    @property
    def connections(self) -> int:
        return len(self._service.connections)

    @property
    def in_flight(self) -> int:
        """Requests of all connections that have not ended."""
        return self._service.in_flight

    async def start(self, where: Path | socket.socket) -> None:
        """Listens at a path (see `listen_at`) or on a listening socket that somebody else made.

        Raises EngineFault in one sentence where the path cannot be had.
        """
        if isinstance(where, Path):
            listener = listen_at(where)
            self._path = (where, where.lstat().st_ino)
        else:
            listener = where
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_unix_server(self._connection, sock=listener, backlog=BACKLOG)
        self._tick()

    def open(self, engine: Submitter, facts: EngineFacts) -> None:
        """Lets requests through to `engine` and tells every connection."""
        self._service.engine, self._service.facts, self._service.reason = engine, facts, ""
        self._tell(Opened(facts))
        self.push_status()

    def shut(self, reason: str) -> None:
        """Refuses new requests as not ready for `reason`; those under way go on."""
        self._service.engine, self._service.reason = None, reason
        self.push_status()

    def drain(self, reason: str = "the engine is about to stop") -> None:
        """Announces that no new request is taken; those under way go on. For good."""
        self._service.draining = reason
        self._tell(Draining(reason))
        self.push_status()

    async def idle(self, timeout: float) -> bool:
        """Waits until nothing is under way; False where that took longer than `timeout` seconds."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._service.idle.wait(), timeout)
        return not self._service.in_flight

    async def close(self) -> None:
        """Stops listening, writes what is left to write, ends every connection, cancels what is under way."""
        if self._ticker is not None:
            self._ticker.cancel()
        if self._listener is not None:
            self._listener.close()
        if self._path is not None:
            path, inode = self._path
            with suppress(FileNotFoundError):
                if path.lstat().st_ino == inode:
                    path.unlink()
        connections = list(self._service.connections)
        for connection in connections:
            connection.close()
        await asyncio.gather(*(connection.closed for connection in connections))
        if self._listener is not None:
            await self._listener.wait_closed()

    def push_status(self) -> None:
        """Tells every connection now what it would be told by the clock."""
        if self._service.connections:
            self._tell(Status(0, Snapshot.of(self._service.status())))

    def _connection(self) -> Connection:
        return Connection(self._service, next(self._numbers))

    def _tell(self, message: Message) -> None:
        for connection in self._service.connections:
            if connection.is_welcome:
                connection.send(message)

    def _tick(self) -> None:
        self.push_status()
        self._ticker = asyncio.get_running_loop().call_later(self._service.limits.status_every_s, self._tick)
