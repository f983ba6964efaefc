"""The shapes of load over a set of connected clients: a closed loop, a burst, Poisson arrivals.

What happens while a call is under way is a handful of Python lines; answers are kept as bytes and judged
after the run.
"""

from __future__ import annotations

import asyncio
import random
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks.ladder.answers import TAIL, retry_after_s, status_of
from benchmarks.ladder.wire import Client


class Prepared(NamedTuple):
    """A request made ahead."""

    kind: str
    query: int  # its line in the file of queries, -1 for a made-up one
    data: bytes


NO_REQUEST = Prepared("none", -1, b"")
"""Of a connection that was lost while its client had asked nothing; it counts as a call that failed."""


class Raw(NamedTuple):
    """A call that ended, before its answer is read."""

    request: Prepared
    due: float
    sent: float
    ended: float
    status: str
    reason: str
    tail: bytes
    body: bytes  # b"" unless bodies are kept


@dataclass
class Load(ABC):
    """What the shapes share. Lives in a running loop. The first failure stops it: nothing new is sent."""

    clients: Sequence[Client]
    requests: Iterator[Prepared]
    seconds: float
    keep_bodies: bool = False
    most_s: float = 300.0
    patience_s: float = 30.0
    ended: list[Raw] = field(default_factory=list)
    stopped: float = 0.0  # when nothing new was sent any more; 0.0 before

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._pending: dict[Client, tuple[Prepared, float]] = {}
        self._stopping, self._over = asyncio.Event(), asyncio.Event()
        self._until = 0.0
        for client in self.clients:
            client.owner = self
            client.calls = 0

    async def run(self, begin: float) -> None:
        """Starts at `begin`; returns when every call has ended, or has had no answer for `patience_s`."""
        await asyncio.sleep(max(0.0, begin - time.monotonic()))
        self._until = begin + self.seconds
        limit = self._loop.call_later(self.most_s, self.stop)
        self.start(begin)
        await self._stopping.wait()
        limit.cancel()
        try:
            await asyncio.wait_for(self._over.wait(), self.patience_s)
        except TimeoutError:
            for client in list(self._pending):
                self._fail(client, f"no answer within {self.patience_s:.0f} s")
        for client in self.clients:
            client.owner = None

    @abstractmethod
    def start(self, begin: float) -> None:
        """Sends what is due at `begin`."""

    @abstractmethod
    def after(self, client: Client, raw: Raw) -> None:
        """A client is free again."""

    def is_over(self) -> bool:
        return bool(self.stopped) and not self._pending

    def send(self, client: Client, due: float | None = None) -> None:
        request = next(self.requests)
        client.ask(request.data)
        self._pending[client] = (request, client.sent if due is None else due)

    def stop(self) -> None:
        if not self.stopped:
            self.stopped = time.monotonic()
            self._stopping.set()
        if self.is_over():
            self._over.set()

    def answered(self, client: Client, ok: bool, body: bytes) -> None:
        now = time.monotonic()
        request, due = self._pending.pop(client)
        status = status_of(body) if ok else ""
        reason = "" if status else f"an answer without a result: {body[:200]!r}"
        kept = body if self.keep_bodies else b""
        raw = Raw(request, due, client.sent, now, status or "failed", reason, body[-TAIL:], kept)
        self.ended.append(raw)
        client.calls += 1
        if raw.status in ("failed", "invalid"):
            self.stop()
        self.after(client, raw)
        if self.is_over():
            self._over.set()

    def lost(self, client: Client, reason: str) -> None:
        if client in self._pending:
            self._fail(client, reason)
        elif not self.stopped:  # else the load would end early and look as if all had gone well
            now = time.monotonic()
            self.ended.append(Raw(NO_REQUEST, now, now, now, "failed", f"between calls, {reason}", b"", b""))
        self.stop()

    def _fail(self, client: Client, reason: str) -> None:
        request, due = self._pending.pop(client)
        self.ended.append(Raw(request, due, client.sent, time.monotonic(), "failed", reason, b"", b""))


@dataclass
class ClosedLoop(Load):
    """Each client asks again once it is answered, until the time is over and each has had `calls` answers.
    A refused client first waits as long as the refusal says."""

    calls: int = 5

    def start(self, begin: float) -> None:
        self._behind = len(self.clients)
        for client in self.clients:
            self.send(client)

    def after(self, client: Client, raw: Raw) -> None:
        self._behind -= client.calls == self.calls
        if self._behind <= 0 and raw.ended >= self._until:
            self.stop()
        if self.stopped:
            return
        if raw.status == "refused":
            self._loop.call_later(retry_after_s(raw.tail), self._again, client)
        else:
            self.send(client)

    def _again(self, client: Client) -> None:
        if not self.stopped and not client.closed:
            self.send(client)


@dataclass
class Burst(Load):
    """Each client asks once, all at the same moment."""

    def start(self, begin: float) -> None:
        for client in self.clients:
            self.send(client)
        self.stop()

    def after(self, client: Client, raw: Raw) -> None:
        """One call each."""


@dataclass
class OpenLoop(Load):
    """Poisson arrivals of `rate` a second, each on a client that is free. An arrival that finds none waits
    for one, and its latency counts from its arrival; one that still waits at the end is never sent."""

    rate: float = 1.0
    seed: int = 0
    arrivals: int = 0

    def start(self, begin: float) -> None:
        self._random = random.Random(self.seed)
        self._idle = deque(self.clients)
        self._backlog: deque[float] = deque()
        self._next = begin + self._random.expovariate(self.rate)
        self._tick()

    def _tick(self) -> None:
        now = time.monotonic()
        while self._next <= now and self._next < self._until and not self.stopped:
            self.arrivals += 1
            if self._idle:
                self.send(self._idle.popleft(), self._next)
            else:
                self._backlog.append(self._next)
            self._next += self._random.expovariate(self.rate)
        if self._next >= self._until or self.stopped:
            self.stop()
        else:
            self._loop.call_later(self._next - now, self._tick)

    def after(self, client: Client, raw: Raw) -> None:
        if self._backlog and not self.stopped:
            self.send(client, self._backlog.popleft())
        else:
            self._idle.append(client)

    def lost(self, client: Client, reason: str) -> None:
        if client in self._idle:
            self._idle.remove(client)
        super().lost(client, reason)
