"""The caller's end of the wire: an `EngineClient` whose engine is in another process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from engine.client import Choose, EngineStatus
from engine.request import Outcome, Rank, Request
from engine.wire.messages import EngineFacts


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds."""

    handshake_s: float = 2.0  # from connecting to the welcome
    first_retry_s: float = 0.05  # after a lost connection; doubles up to
    last_retry_s: float = 2.0
    silence_s: float = 30.0  # without a frame from the server, which pushes its status: it hangs
    grace_s: float = 0.25  # after a deadline, for the engine's own refusal to come


class WireClient:
    """`EngineClient` over one connection, which is made again whenever it is lost. Used from one event loop.

    async with WireClient(path, name="front-end 1") as client:
        await client.wait_connected(timeout=5.0)
        outcome = await client.run(Embed(tokens), deadline=time.monotonic() + 1.0)

    While there is no connection, requests are refused as not ready with the reason. Requests under way
    when it is lost end at once as `Failed("engine_lost", ...)`.
    """

    def __init__(
        self,
        path: Path,
        *,
        name: str = "",
        shares_callers: bool = False,
        patience: Patience | None = None,
        uids: frozenset[int] | None = None,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        """`name` stands in the server's log. `shares_callers`: a caller of this process is the same caller
        as one of that name on other connections (front-ends of one server), not its own. `on_change` is
        called when the connection, the engine's readiness or its facts changed. A server that runs as
        none of `uids` (None: this process's user, or root) is not trusted."""
        raise NotImplementedError

    @property
    def is_connected(self) -> bool: ...

    @property
    def facts(self) -> EngineFacts | None:
        """Of the engine at the other end; None while there is none."""
        ...

    @property
    def in_flight(self) -> int: ...

    @property
    def status_age_s(self) -> float:
        """How old the snapshot is that `status` gives, infinite where none has come yet."""
        ...

    async def __aenter__(self) -> WireClient: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def start(self) -> None:
        """Begins to connect, and does not wait for it."""

    async def close(self) -> None:
        """Ends the connection; what is under way ends as `Failed("engine_lost", ...)`."""

    async def wait_connected(self, timeout: float) -> bool:
        """Whether there is a connection within `timeout` seconds."""
        ...

    async def run(self, request: Request, *, deadline: float | None = None, caller: str = "") -> Outcome:
        """As `EngineClient.run`. Raises ValueError for a request that makes no sense or is too large for a
        frame, UndeclaredConstraint for a constraint other than `ItemList`."""
        ...

    async def rank(
        self, request: Rank, choose: Choose, *, deadline: float | None = None, caller: str = ""
    ) -> Outcome:
        """As `EngineClient.rank`; `choose` gets the vector as an array of float64."""
        ...

    def status(self) -> EngineStatus:
        """The last snapshot the server has pushed; never waits. Not ready while there is no connection."""
        ...

    async def ask_status(self, timeout: float = 5.0) -> EngineStatus:
        """A snapshot of now. Raises EngineFault where none comes."""
        ...

    async def ping(self, timeout: float = 5.0) -> float:
        """Round trip to the server's event loop in seconds. Raises EngineFault where nothing comes back."""
        ...
