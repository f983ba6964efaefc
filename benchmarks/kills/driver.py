"""The process that drives the load: a closed loop on each connection, every call told apart by its id."""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import os
import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import uvloop

from benchmarks.ladder.answers import code_of, status_of
from benchmarks.ladder.wire import Client, Endpoint, connect

CLOSED, UNANSWERED = "connection closed", "unanswered"
PAUSE_S = 0.25  # after a refusal, a failure or an attempt to connect in vain
SPARE_S = 10.0  # beyond its timeout, before a call counts as unanswered


@dataclass(frozen=True, slots=True)
class Load:
    """What one driver does."""

    endpoint: Endpoint
    queries: Sequence[str]
    connections: int
    timeout_ms: int

    @property
    def bound_s(self) -> float:
        """Within which every call has to end."""
        return self.timeout_ms / 1000.0 + SPARE_S


class Ended(NamedTuple):
    """A call; moments are `time.monotonic()` seconds. `end` is a status, for a refusal or a failure with its
    code ("failed: engine_lost"), `CLOSED`, `UNANSWERED` or what came instead of a result."""

    connection: int  # its place among those of `Seen`
    sent: float
    ended: float
    end: str


class Held(NamedTuple):
    """A connection; `port` is of the client's end, and `lost` when the server's was found closed, None where
    it never was."""

    port: int
    opened: float
    lost: float | None = None


@dataclass(slots=True)
class Seen:
    """A whole load, or what there is of it. `strays` are answers to no call or to another one."""

    calls: list[Ended] = field(default_factory=list)
    connections: list[Held] = field(default_factory=list)
    strays: int = 0


class Conversation:
    """Owns a connection for its whole life; at most one call is open on it."""

    def __init__(self, client: Client) -> None:
        self.strays = 0
        self.lost_at: float | None = None
        self._client = client
        self._number = 0
        self._open: asyncio.Future[tuple[str, float]] | None = None
        client.owner = self

    async def ask(self, number: int, request: bytes, within_s: float) -> tuple[str, float, float]:
        """Sends the request, whose id is `number`: its end, and when it was sent and ended."""
        self._number, self._open = number, asyncio.get_running_loop().create_future()
        self._client.ask(request)
        try:
            end, ended = await asyncio.wait_for(self._open, within_s)
        except TimeoutError:
            end, ended = UNANSWERED, time.monotonic()
        self._open = None
        return end, self._client.sent, ended

    def answered(self, client: Client, ok: bool, body: bytes) -> None:
        end = end_of(ok, body, self._number)
        if end is None or self._open is None or self._open.done():
            self.strays += 1
        else:
            self._open.set_result((end, time.monotonic()))

    def lost(self, client: Client, reason: str) -> None:
        self.lost_at = time.monotonic()
        if self._open is not None and not self._open.done():
            self._open.set_result((CLOSED, self.lost_at))


def end_of(ok: bool, body: bytes, number: int) -> str | None:
    """How an answer ends the call with this id; None for the answer of another call."""
    status = status_of(body) if ok else ""
    if not status:
        return f"no result: {body[:80]!r}"
    if json.loads(body)["id"] != number:
        return None
    code = code_of(body)
    return f"{status}: {code}" if code else status


class Caller:
    """One client: asks again and again, and connects again where its connection has ended."""

    def __init__(self, load: Load, context: ssl.SSLContext, numbers: Iterator[int], seen: Seen) -> None:
        self._load = load
        self._context = context
        self._numbers = numbers
        self._seen = seen

    async def live(self, stop: asyncio.Event) -> None:
        """Nothing new after `stop`; returns once its last call has ended."""
        while not stop.is_set():
            try:
                client = await connect(self._load.endpoint, self._context, SPARE_S)
            except OSError:
                await asyncio.sleep(PAUSE_S)
                continue
            place, held = len(self._seen.connections), Held(client.port, time.monotonic())
            self._seen.connections.append(held)
            conversation = Conversation(client)
            while not stop.is_set() and not client.closed:
                if not await self._ask(conversation, place):
                    break
            self._seen.connections[place] = held._replace(lost=conversation.lost_at)
            self._seen.strays += conversation.strays
            client.close()

    async def _ask(self, conversation: Conversation, place: int) -> bool:
        """One call. False where the connection is of no more use."""
        number, load = next(self._numbers), self._load
        query = load.queries[number % len(load.queries)]
        request = load.endpoint.call({"query": query, "timeout_ms": load.timeout_ms}, number=number)
        end, sent, ended = await conversation.ask(number, request, load.bound_s)
        self._seen.calls.append(Ended(place, sent, ended, end))
        if end in (CLOSED, UNANSWERED):
            return False
        if end.startswith(("refused", "failed")):
            await asyncio.sleep(PAUSE_S)
        return True


async def _drive(orders: Connection, load: Load) -> Seen:
    """Until something is to be read from `orders`."""
    loop, stop, seen = asyncio.get_running_loop(), asyncio.Event(), Seen()

    def ordered() -> None:
        loop.remove_reader(orders.fileno())  # what is to be read stays there until the end
        stop.set()

    loop.add_reader(orders.fileno(), ordered)
    context, numbers = load.endpoint.context(), itertools.count(1)
    callers = [Caller(load, context, numbers, seen) for _ in range(load.connections)]
    try:
        async with asyncio.TaskGroup() as group:
            for caller in callers:
                group.create_task(caller.live(stop))
    finally:
        loop.remove_reader(orders.fileno())
        os.set_blocking(orders.fileno(), True)  # which the loop has undone
    return seen


def _main(orders: Connection, load: Load) -> None:
    """A driver process: runs one load from an order to the next, until its parent hangs up."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        while True:
            try:
                orders.recv()
                seen = runner.run(_drive(orders, load))
                orders.recv()
            except (EOFError, KeyboardInterrupt):
                return
            orders.send(seen)


class Driver:
    """The driver process as its parent sees it."""

    def __init__(self, orders: Connection, load: Load) -> None:
        self.load = load
        self._orders = orders

    def begin(self) -> None:
        self._orders.send(None)

    def end(self) -> Seen:
        """No new calls; all of the load, once its last call has ended. Raises RuntimeError where the driver
        does not come to its end."""
        self._orders.send(None)
        if not self._orders.poll(self.load.bound_s + SPARE_S):
            raise RuntimeError("the driver did not come to its end")
        seen = self._orders.recv()
        assert isinstance(seen, Seen)
        return seen


@contextmanager
def driving(load: Load) -> Iterator[Driver]:
    """A driver process, ended with the block."""
    spawn: Any = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_main, args=(there, load), daemon=True)
    process.start()
    there.close()
    try:
        yield Driver(here, load)
    finally:
        here.close()
        process.join(SPARE_S)
        if process.is_alive():
            process.kill()
