"""Both ends of the wire in one process, over an engine that does what a test tells it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import uvloop

from engine.client import EngineStatus, PageCounts
from engine.request import (
    Cancelled,
    Embed,
    Embedded,
    Generate,
    Generated,
    Outcome,
    Request,
    Score,
    Scored,
    Tokens,
)
from engine.request import Rank as RankRequest
from engine.wire import EngineFacts, Patience, WireClient, WireLimits, WireServer
from engine.wire.frames import HEADER, FrameReader
from engine.wire.messages import PROTOCOL, FromServer, Hello, Message

WAIT_S = 20.0
FACTS = EngineFacts("one", 16, 97, 512, "hash")
RANK = RankRequest(query=(1, 2), rows=8, prefix_tokens=64, suffix=(3, 4), positive=5, negative=6)
T = TypeVar("T")


def vector_of(tokens: Tokens) -> tuple[float, ...]:
    return tuple(0.1 * token for token in tokens)


def probability_of(prefix: Tokens, suffix: Tokens) -> float:
    return 0.001 * sum(prefix) + 0.003 * sum(suffix)


def answer_to(request: Request, prefixes: tuple[Tokens, ...] = ()) -> Outcome:
    """What depends on every token of the request alone."""
    match request:
        case Embed():
            return Embedded(vector_of(request.tokens))
        case Generate():
            return Generated(tuple(reversed(request.tokens)))
        case Score():
            return Scored(tuple(probability_of(prefix, request.suffix) for prefix in request.prefixes))
        case RankRequest():
            return Scored(tuple(probability_of(prefix, request.suffix) for prefix in prefixes))


@dataclass(eq=False)
class Asked:
    """A request that came to the engine. It ends once."""

    request: Request
    deadline: float | None
    caller: str
    on_done: Callable[[Outcome], None]
    on_vector: Callable[[tuple[float, ...]], None] | None
    ended: bool = False
    cancels: int = 0
    supplied: tuple[Tokens, ...] | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    answers_supply: bool = False

    def end(self, outcome: Outcome) -> None:
        if not self.ended:
            self.ended = True
            self.on_done(outcome)

    def answer(self) -> None:
        self.end(answer_to(self.request, self.supplied or ()))

    def send_vector(self) -> None:
        assert self.on_vector is not None
        assert isinstance(self.request, RankRequest)
        self.on_vector(vector_of(self.request.query))

    def cancel(self) -> None:
        self.cancels += 1
        self.end(Cancelled())
        self.changed.set()

    def supply(self, prefixes: tuple[Tokens, ...]) -> None:
        assert isinstance(self.request, RankRequest)
        if len(prefixes) > self.request.rows:
            raise ValueError(f"{len(prefixes)} prefixes are more than {self.request.rows}")
        self.supplied = prefixes
        self.changed.set()
        if self.answers_supply:
            self.answer()


class ScriptedEngine:
    """A `Submitter` that notes what comes. `by_itself`: it answers at once."""

    def __init__(self, *, by_itself: bool = True) -> None:
        self.by_itself = by_itself
        self.asked: list[Asked] = []
        self.pages = PageCounts(5, 2, 3, 10)
        self._arrived = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(
        self,
        request: Request,
        *,
        deadline: float | None,
        caller: str,
        on_done: Callable[[Outcome], None],
        on_vector: Callable[[tuple[float, ...]], None] | None = None,
    ) -> Asked:
        if isinstance(request, Embed) and not request.tokens:
            raise ValueError("tokens must not be empty")
        asked = Asked(request, deadline, caller, on_done, on_vector, answers_supply=self.by_itself)
        self.asked.append(asked)
        if self.by_itself:
            if on_vector is None:
                asked.answer()
            else:
                asked.send_vector()
        task = asyncio.get_running_loop().create_task(self._tell())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return asked

    async def arrived(self, count: int) -> list[Asked]:
        """Waits until as many requests have come."""
        async with self._arrived:
            await asyncio.wait_for(self._arrived.wait_for(lambda: len(self.asked) >= count), WAIT_S)
        return self.asked

    async def _tell(self) -> None:
        async with self._arrived:
            self._arrived.notify_all()

    def status(self) -> EngineStatus:
        waiting = sum(not asked.ended for asked in self.asked)
        return EngineStatus(True, False, "", self.pages, waiting, 0, 0, len(self.asked), 7.5, "scripted")


@dataclass
class Wire:
    """A server, its engine, and where it listens."""

    server: WireServer
    engine: ScriptedEngine
    path: Path

    @asynccontextmanager
    async def client(self, **options: Any) -> AsyncIterator[WireClient]:
        options.setdefault("patience", Patience(first_retry_s=0.001, last_retry_s=0.01))
        async with WireClient(self.path, **options) as client:
            assert await client.wait_connected(WAIT_S)
            yield client

    async def raw(self) -> Raw:
        reader, writer = await asyncio.open_unix_connection(self.path)
        return Raw(reader, writer)


@dataclass
class Raw:
    """A client that sends what it likes."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    frames: FrameReader = field(default_factory=lambda: FrameReader(1 << 26))
    received: list[FromServer] = field(default_factory=list)

    def send(self, *messages: Message) -> None:
        self.writer.write(b"".join(map(framed, messages)))

    def hello(self) -> None:
        self.send(Hello(PROTOCOL, (1,), "raw", False))

    async def read_until(self, kind: type[Message]) -> Any:
        """The next message of that kind; every message is kept in `received`."""
        while True:
            while self.received:
                message = self.received.pop(0)
                if isinstance(message, kind):
                    return message
            data = await asyncio.wait_for(self.reader.read(1 << 16), WAIT_S)
            assert data, f"the server closed before any {kind.__name__}"
            self.received += (
                msgspec.msgpack.decode(frame, type=FromServer) for frame in self.frames.feed(data)
            )

    async def read_to_end(self) -> list[FromServer]:
        """Everything until the server closes, which it must."""
        while data := await asyncio.wait_for(self.reader.read(1 << 16), WAIT_S):
            self.received += (
                msgspec.msgpack.decode(frame, type=FromServer) for frame in self.frames.feed(data)
            )
        return self.received

    async def close(self) -> None:
        self.writer.close()
        with suppress(ConnectionError):  # the server was first
            await self.writer.wait_closed()


def framed(message: Message) -> bytes:
    body = msgspec.msgpack.encode(message)
    return HEADER.pack(len(body)) + body


@asynccontextmanager
async def serving(
    limits: WireLimits | None = None, *, by_itself: bool = True, open_: bool = True, **options: Any
) -> AsyncIterator[Wire]:
    """A server over a scripted engine, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "socket"
        server = WireServer(limits, **options)
        await server.start(path)
        engine = ScriptedEngine(by_itself=by_itself)
        if open_:
            server.open(engine, FACTS)
        try:
            yield Wire(server, engine, path)
        finally:
            await server.close()


async def until(condition: Callable[[], bool]) -> None:
    """Lets the loop turn until `condition` holds."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0)


def go(test: Callable[[], Coroutine[Any, Any, T]], *, uv: bool = True) -> T:
    """Runs a test on asyncio's loop and, with `uv`, on uvloop's."""
    result = _run(test, asyncio.new_event_loop)
    return _run(test, uvloop.new_event_loop) if uv else result


def _run(test: Callable[[], Coroutine[Any, Any, T]], new_loop: Callable[[], asyncio.AbstractEventLoop]) -> T:
    """What the loop itself could not handle fails the test."""
    errors: list[dict[str, Any]] = []
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.get_loop().set_exception_handler(lambda loop, context: errors.append(context))
        result = runner.run(asyncio.wait_for(test(), 2 * WAIT_S))
    assert not errors, errors
    return result
