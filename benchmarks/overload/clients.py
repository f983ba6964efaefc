"""Clients that behave as they like: one call at a time on a connection of their own, some hang up."""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from benchmarks.ladder.answers import (
    ANSWERS,
    TAIL,
    Call,
    code_of,
    retry_after_s,
    status_of,
    structured,
    timing_of,
)
from benchmarks.ladder.wire import Client, Endpoint, connect
from benchmarks.overload.figures import wrong
from benchmarks.overload.known import Known

HUNG_UP = "hung up"
SPARE_S = 30.0  # beyond its timeout, before a call counts as never answered
LONGEST_WAIT_S = 5.0  # of a refused client, whatever the refusal says


class Reply(NamedTuple):
    """`ok` is HTTP 200; both moments are `time.monotonic()` seconds."""

    ok: bool
    body: bytes
    sent: float
    ended: float


class Exchange:
    """Owns a client for one answer."""

    def __init__(self) -> None:
        self._reply: asyncio.Future[tuple[bool, bytes]] = asyncio.get_running_loop().create_future()

    def answered(self, client: Client, ok: bool, body: bytes) -> None:
        if not self._reply.done():
            self._reply.set_result((ok, body))

    def lost(self, client: Client, reason: str) -> None:
        if not self._reply.done():
            self._reply.set_exception(ConnectionError(reason))

    async def of(self, client: Client, request: bytes, within_s: float) -> Reply:
        """Raises TimeoutError without an answer, ConnectionError where the server hung up."""
        client.owner = self
        client.ask(request)
        try:
            ok, body = await asyncio.wait_for(self._reply, within_s)
        finally:
            client.owner = None
        return Reply(ok, body, client.sent, time.monotonic())


async def exchange(client: Client, request: bytes, within_s: float = 60.0) -> Reply:
    """One request and its answer; see `Exchange.of` for what it raises."""
    return await Exchange().of(client, request, within_s)


@dataclass(frozen=True, slots=True)
class Habits:
    """What one client does. Shares of sizes sum up to 1."""

    sizes: dict[str, float]
    timeout_ms: tuple[int, int]  # of each call, drawn evenly
    hangs_up_s: tuple[float, float] | None = None  # after its request was sent, drawn evenly in its logarithm


@dataclass
class Record:
    """What all clients saw. `late_ms` is by how much each answer or refusal came after its timeout."""

    calls: list[Call] = field(default_factory=list)
    late_ms: list[float] = field(default_factory=list)
    wrong_figures: list[str] = field(default_factory=list)
    figures_checked: int = 0
    compared: int = 0
    unconnected: list[str] = field(default_factory=list)


@dataclass
class Person:
    """One client with its habits, from its first connection to its last answer."""

    endpoint: Endpoint
    context: ssl.SSLContext
    known: Known
    habits: Habits
    pages_total: int
    record: Record
    random: random.Random

    async def live(self, until: float) -> None:
        """Asks again and again; nothing new after `until`."""
        while time.monotonic() < until:
            try:
                client = await connect(self.endpoint, self.context)
            except OSError as error:
                self.record.unconnected.append(f"no connection: {error or type(error).__name__}")
                return
            try:
                while time.monotonic() < until and not client.closed:
                    if not await self._ask(client, until):
                        break
            finally:
                client.close()

    async def _ask(self, client: Client, until: float) -> bool:
        """One call. False where the connection is of no more use."""
        sizes = self.habits.sizes
        size = self.random.choices(list(sizes), list(sizes.values()))[0]
        number = self.random.randrange(len(self.known.texts[size]))
        timeout_ms = self.random.randint(*self.habits.timeout_ms)
        request = self.endpoint.call({**self.known.arguments(size, number), "timeout_ms": timeout_ms})
        patience, hangs_up = timeout_ms / 1000.0 + SPARE_S, self.habits.hangs_up_s
        if hangs_up is not None:
            low, high = hangs_up
            patience = low * (high / low) ** self.random.random()
        began = time.monotonic()
        try:
            reply = await exchange(client, request, patience)
        except TimeoutError:
            status = "failed" if hangs_up is None else HUNG_UP
            self._note(size, number, began, status, f"no answer within {patience:.0f} s")
            return False
        except ConnectionError as error:
            self._note(size, number, began, "failed", str(error))
            return False
        refused = self._read(size, number, timeout_ms, reply)
        if refused is not None:
            await asyncio.sleep(min(refused, LONGEST_WAIT_S, max(0.0, until - time.monotonic())))
        return True

    def _note(self, size: str, number: int, began: float, status: str, reason: str) -> None:
        nothing = (0.0, 0.0, 0.0, 0.0)
        self.record.calls.append(
            Call(size, number, began, began, time.monotonic(), status, "", reason, *nothing, None)
        )

    def _read(self, size: str, number: int, timeout_ms: int, reply: Reply) -> float | None:
        """Writes the answer down. Of a refusal the seconds that it asks to wait."""
        tail = reply.body[-TAIL:]
        status, code, reason, differs = status_of(reply.body) if reply.ok else "", "", "", None
        if status in ANSWERS:
            differs = self.known.differs(size, number, structured(reply.body))
            self.record.compared += differs is not None
        elif status == "refused":
            code = code_of(tail)
            self._check(structured(reply.body)["refusal"])
        else:
            code = code_of(tail) if status else ""
            reason = f"{status or 'no result'} {code}: {reply.body[:200]!r}"
            status = "failed"
        self.record.late_ms.append((reply.ended - reply.sent) * 1000.0 - timeout_ms)
        self.record.calls.append(
            Call(
                size,
                number,
                reply.sent,
                reply.sent,
                reply.ended,
                status,
                code,
                reason,
                *timing_of(tail),
                differs,
            )
        )
        return retry_after_s(tail) if status == "refused" else None

    def _check(self, refusal: dict[str, Any]) -> None:
        self.record.figures_checked += 1
        found = wrong(refusal, self.pages_total)
        if found:
            self.record.wrong_figures.append(found)


async def crowd(people: Sequence[Person], seconds: float, meanwhile: Callable[[], Any] | None = None) -> None:
    """All of them at once for `seconds`, and then to their last answers. `meanwhile` makes a coroutine that
    runs beside them."""
    until = time.monotonic() + seconds
    async with asyncio.TaskGroup() as group:
        for person in people:
            group.create_task(person.live(until))
        if meanwhile is not None:
            group.create_task(meanwhile())
