"""A client for programs without an event loop: the same client, on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from engine.client import Choose, EngineStatus
from engine.errors import EngineFault
from engine.request import Outcome, Rank, Request
from engine.wire.client import WireClient

T = TypeVar("T")


class BlockingClient:
    """`WireClient` whose calls wait. May be used from several threads at once.

    with BlockingClient(Path("/run/user/1000/engine/socket")) as client:
        outcome = client.run(Embed(tokens), deadline=time.monotonic() + 1.0)
    """

    def __init__(self, path: Path, *, name: str = "", timeout: float = 5.0) -> None:
        """`timeout`: seconds to wait for a connection on entering."""
        self._path = path
        self._name = name
        self._timeout = timeout
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="wire client", daemon=True)
        self._client: WireClient

    def __enter__(self) -> BlockingClient:
        """Raises EngineFault where no server can be reached."""
        self._thread.start()
        self._client = self._wait(self._open())
        if not self._wait(self._client.wait_connected(self._timeout)):
            reason = self._client.status().reason
            self.close()
            raise EngineFault(f"There is no engine at {self._path}: {reason}.")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, request: Request, *, deadline: float | None = None, caller: str = "") -> Outcome:
        """As `WireClient.run`, and waits."""
        return self._wait(self._client.run(request, deadline=deadline, caller=caller))

    def rank(
        self, request: Rank, choose: Choose, *, deadline: float | None = None, caller: str = ""
    ) -> Outcome:
        """As `WireClient.rank`, and waits. `choose` runs on the client's thread and must not call it."""
        return self._wait(self._client.rank(request, choose, deadline=deadline, caller=caller))

    def status(self) -> EngineStatus:
        """A snapshot of now. Raises EngineFault where none comes."""
        return self._wait(self._client.ask_status())

    def close(self) -> None:
        self._wait(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _open(self) -> WireClient:
        client = WireClient(self._path, name=self._name)
        await client.start()
        return client

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Leaving early, by Ctrl-C, takes the request back."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise
