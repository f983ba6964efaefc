"""Keeping one live server's tools fresh: connect, list, wait for news, list again; after a failure, later."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import anyio
import anyio.to_thread

from mcp_discovery.discovery.catalogue import Found, Problem, Tool
from mcp_discovery.discovery.sources.entries import checked
from mcp_discovery.discovery.sources.parts import Part
from mcp_discovery.discovery.sources.session import Session, SessionFailed, open_session
from mcp_discovery.discovery.sources.specs import Spec, Unreachable
from mcp_discovery.discovery.sources.stored import ListStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Timing:
    """How servers are treated. All in seconds, but for the numbers of servers `at_once`."""

    at_once: int = 8  # child processes that are being started and listed for the first time
    patience_s: float = 3.0  # after which a slow one no longer keeps another from its turn
    http_at_once: int = 32  # the same of servers that run elsewhere
    http_patience_s: float = 1.0
    connect_timeout_s: float = 120.0  # a package runner may have to download the server
    list_timeout_s: float = 30.0
    refresh_s: float = 60.0  # between two lists of a server that does not tell of changes
    confirm_s: float = 600.0  # between two lists of one that does
    settle_s: float = 0.2  # that a run of changes is given to end
    first_delay_s: float = 0.5  # before the first new attempt, twice as long before each further one
    longest_delay_s: float = 60.0

    def delay(self, failures: int, random_: float) -> float:
        """Before the attempt after `failures` in a row; `random_`, 0 to 1, spreads it over half of that."""
        longest = min(self.longest_delay_s, self.first_delay_s * 2.0 ** min(failures, 30))
        return longest * (0.5 + 0.5 * random_)

    def failures_after(self, failures: int, served_s: float) -> int:
        """In a row, once a session has ended that served for so long. One that lists its tools and ends is
        a failure like any other: only after `longest_delay_s` of service the count begins anew."""
        return 0 if served_s >= self.longest_delay_s else failures + 1


class Turns:
    """At most so many starts at once. Who has not ended its turn after `patience_s` loses it: a slow
    server goes on, and delays nobody."""

    def __init__(self, at_once: int, patience_s: float) -> None:
        self._slots = anyio.Semaphore(at_once)
        self._patience_s = patience_s

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Callable[[], None]]:
        """Waits for a turn; what it yields ends it early."""
        await self._slots.acquire()
        has_ended = False

        def end() -> None:
            nonlocal has_ended
            if not has_ended:
                has_ended = True
                self._slots.release()

        late = asyncio.get_running_loop().call_later(self._patience_s, end)
        try:
            yield end
        finally:
            late.cancel()
            end()


class LiveServer:
    """One server of the catalogue. `part` is what it says at present."""

    def __init__(
        self,
        spec: Spec,
        turns: Turns,
        judging: anyio.CapacityLimiter,
        changed: Callable[[], None],
        *,
        timing: Timing,
        store: ListStore | None,
    ) -> None:
        """`changed` is called when `part` has changed; `judging` bounds the threads that check tools."""
        self.spec = spec
        self.part = Part(spec.entry, {spec.name: ()}, presence="missing", error="it has not answered yet")
        self._turns = turns
        self._judging = judging
        self._changed = changed
        self._timing = timing
        self._store = store
        self.has_been_tried = anyio.Event()

    def recall(self) -> None:
        """Takes the list that is kept on disk, as stale. Blocks; before `run`."""
        stored = None if self._store is None else self._store.read(self.spec)
        if stored is not None:
            part = judged(self.spec, stored.tools, self.part)
            self.part = replace(
                part,
                presence="stale",
                listed_at=stored.listed_at,
                error="it has not answered since the start",
            )

    async def run(self) -> None:
        """Until it is cancelled."""
        failures = 0
        while True:
            listed_at: float | None = None
            try:
                async with (
                    self._turns.turn() as end_turn,
                    open_session(self.spec, self._timing.connect_timeout_s) as session,
                ):
                    await self._list(session)
                    listed_at = time.monotonic()
                    end_turn()
                    await self._follow(session)
                sentence = "it has ended the session"
            except SessionFailed as error:
                sentence = str(error)
            served_s = 0.0 if listed_at is None else time.monotonic() - listed_at
            failures = self._timing.failures_after(failures, served_s)
            self._fail(sentence)
            self.has_been_tried.set()
            await anyio.sleep(self._timing.delay(failures, random.random()))

    async def _follow(self, session: Session) -> None:
        """Lists anew at each news, and at intervals, until the session ends."""
        timing = self._timing
        while True:
            await session.wait(timing.confirm_s if session.tells_of_changes else timing.refresh_s)
            if session.has_ended:
                return
            await anyio.sleep(timing.settle_s)
            await self._list(session)

    async def _list(self, session: Session) -> None:
        definitions = await session.tools(self._timing.list_timeout_s)
        previous = self.part
        part = await anyio.to_thread.run_sync(judged, self.spec, definitions, previous, limiter=self._judging)
        is_same = part.found is previous.found
        self.part = replace(part, presence="listed", listed_at=time.time(), error="")
        if not is_same or previous.presence != "listed":
            for problem in part.problems:
                logger.warning("catalogue: %s", problem)
            self._changed()
        if self._store is not None:
            if is_same:
                await anyio.to_thread.run_sync(self._store.confirm, self.spec)
            else:
                kept = [item.tool.definition for item in self.part.found[self.spec.name]]
                await anyio.to_thread.run_sync(self._store.write, self.spec, kept)
        self.has_been_tried.set()

    def _fail(self, sentence: str) -> None:
        previous = self.part
        is_known = previous.listed_at is not None
        self.part = replace(previous, presence="stale" if is_known else "missing", error=sentence)
        if (previous.presence, previous.error) != (self.part.presence, sentence):
            logger.warning("%s does not answer: %s", self.spec.name, sentence)
        if previous.presence != self.part.presence or previous.error != sentence:
            self._changed()


def unreachable(server: Unreachable) -> Part:
    """What is said of a server that cannot even be tried."""
    return Part(
        server.problem.entry,
        {server.name: ()},
        (server.problem,),
        presence="missing",
        error=server.problem.sentence.removesuffix("."),
    )


def judged(spec: Spec, definitions: Sequence[Any], previous: Part) -> Part:
    """The acceptable ones of `definitions`. What `previous` held with the same content is taken from
    there unjudged; where that is all, `found` is its very object."""
    known = {item.tool.name: item for item in previous.found.get(spec.name, ())}
    found: list[Found] = []
    problems: list[Problem] = []
    names: set[str] = set()
    for index, entry in enumerate(definitions):
        where = f"{spec.name} tools[{index}]"
        item = _unchanged(entry, known, spec.name) or checked(entry, spec.name, where)
        if isinstance(item, Problem):
            problems.append(item)
        elif item.tool.name in names:
            problems.append(Problem(where, f"{item.tool.id!r} is listed twice; the first one is served."))
        else:
            names.add(item.tool.name)
            found.append(item)
    held = previous.found.get(spec.name, ())
    if len(found) == len(held) and all(one is other for one, other in zip(found, held, strict=True)):
        return replace(previous, problems=tuple(problems))
    return replace(previous, found={spec.name: tuple(found)}, problems=tuple(problems))


def _unchanged(entry: Any, known: dict[str, Found], server: str) -> Found | None:
    name = entry.get("name") if isinstance(entry, dict) else None
    item = known.get(name) if isinstance(name, str) else None
    if item is None:
        return None
    try:
        return item if Tool(server, item.tool.name, entry).digest == item.tool.digest else None
    except (ValueError, RecursionError, TypeError):  # what JSON cannot carry is judged
        return None
