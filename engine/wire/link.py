"""One connection of a client: its requests under way, and what the server says of them."""

from __future__ import annotations

import asyncio
import os
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from engine.client import EngineStatus
from engine.request import Failed, Outcome, Rank, Request, Tokens
from engine.wire.convert import ask_of, outcome_of, unpacked
from engine.wire.frames import ANSWER_BYTES, FrameReader, FrameWriter, ProtocolError
from engine.wire.listen import peer
from engine.wire.messages import (
    PROTOCOL,
    VERSION,
    AskStatus,
    Cancel,
    Draining,
    EngineFacts,
    Error,
    FromServer,
    HasFailed,
    Hello,
    Invalid,
    Message,
    Opened,
    Ping,
    Pong,
    Status,
    Supply,
    Vector,
    WasCancelled,
    WasEmbedded,
    WasGenerated,
    WasRefused,
    WasScored,
    Welcome,
)
from engine.wire.prefixes import SentPrefixes

_DECODER = msgspec.msgpack.Decoder(FromServer)
_HELLO_BYTES = 4096  # what a server reads before it knows who speaks
_WRITE_BUFFER = 8 << 20
_CLOCK_S = 5.0  # between the server's writing of the welcome and our reading it

Answered = Outcome | Invalid
FINALS = (WasScored, WasEmbedded, WasGenerated, WasRefused, HasFailed, WasCancelled, Invalid)


@dataclass(frozen=True, slots=True)
class Greeting:
    """How a client introduces itself, and which users' servers it trusts."""

    name: str
    shares_callers: bool
    uids: frozenset[int]


class Call:
    """A request under way. It stays in the link's table until the server's last word on it, even if the
    caller has left before."""

    __slots__ = ("answered", "future", "id", "lacks_vector", "timer")

    def __init__(self, id_: int, loop: asyncio.AbstractEventLoop, lacks_vector: bool) -> None:
        self.id = id_
        self.lacks_vector = lacks_vector
        self.future: asyncio.Future[Answered | array[float]] = loop.create_future()
        self.answered: Answered | None = None
        self.timer: asyncio.TimerHandle | None = None

    def answer(self, answered: Answered) -> None:
        """The first answer counts."""
        if self.answered is None:
            self.answered = answered
            if not self.future.done():
                self.future.set_result(answered)


class Link(asyncio.Protocol):
    """From connecting to the loss of the connection; never made again."""

    def __init__(
        self,
        greeting: Greeting,
        silence_s: float,
        on_change: Callable[[], None],
        on_lost: Callable[[Link], None],
    ) -> None:
        """`on_lost` is called before the calls under way are told."""
        loop = asyncio.get_running_loop()
        self.welcomed: asyncio.Future[None] = loop.create_future()
        self.lost: asyncio.Future[None] = loop.create_future()
        self.reason = "the connection was closed"  # why it is lost
        self.facts: EngineFacts | None = None
        self.status: EngineStatus
        self.status_at = 0.0  # monotonic seconds
        self.draining = ""
        self.window = 0
        self.is_choked = False  # the server does not read what we write
        self.calls: dict[int, Call] = {}
        self._greeting = greeting
        self._on_change = on_change
        self._on_lost = on_lost
        self._silence_s = silence_s
        self._silent = 0  # quarters of `silence_s` in which nothing came
        self._ticker: asyncio.TimerHandle | None = None
        self._loop = loop
        self._next_id = 0
        self._questions: dict[int, asyncio.Future[Status | Pong]] = {}
        self._reader = FrameReader(ANSWER_BYTES)
        self._transport: asyncio.Transport
        self._writer: FrameWriter
        self._prefixes: SentPrefixes
        self._takes: dict[type[Message], Callable[[Any], None]] = {
            Welcome: self._welcome,
            Error: self._error,
        }

    @property
    def is_closed(self) -> bool:
        """Whether new requests are to be refused."""
        return bool(self.draining) or self.is_choked

    # What a client does.

    def ask(self, request: Request, deadline: float | None, caller: str) -> Call:
        """Sends a request. Raises what `ask_of` and `FrameWriter.send` raise; then nothing was asked."""
        self._next_id += 1
        call = Call(self._next_id, self._loop, isinstance(request, Rank))
        self._writer.send(ask_of(call.id, request, deadline, caller, self._prefixes.refs))
        self.calls[call.id] = call
        return call

    def supply(self, call: Call, prefixes: Sequence[Tokens]) -> None:
        """Sends the prefixes of a rank request; `call.future` is then that of its answer."""
        if call.answered is None:
            call.future = self._loop.create_future()
            self._writer.send(Supply(call.id, self._prefixes.refs(prefixes)))

    def withdraw(self, call: Call, answered: Answered) -> None:
        """The caller has `answered` instead of what the server would still say."""
        if call.answered is None:
            call.answer(answered)
            if call.id in self.calls:
                self._writer.send(Cancel(call.id))

    async def question(self, make: Callable[[int], AskStatus | Ping]) -> Status | Pong | None:
        """The answer to a status question or a ping, None where the connection is lost before."""
        self._next_id += 1
        number = self._next_id
        answer: asyncio.Future[Status | Pong] = self._loop.create_future()
        self._questions[number] = answer
        try:
            self._writer.send(make(number))
            await asyncio.wait((answer, self.lost), return_when=asyncio.FIRST_COMPLETED)
            return answer.result() if answer.done() else None
        finally:
            del self._questions[number]

    def end(self, reason: str) -> None:
        """Drops the connection for `reason`."""
        self.reason = reason
        self._transport.abort()

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop has classes of its own
        self._transport = transport
        transport.set_write_buffer_limits(high=_WRITE_BUFFER)
        self._writer = FrameWriter(transport, _HELLO_BYTES)
        _, uid = peer(transport.get_extra_info("socket"))
        greeting = self._greeting
        if uid not in greeting.uids:
            self.end(f"the server runs as user {uid}, whom this client does not trust")
            return
        self._writer.send(Hello(PROTOCOL, (VERSION,), greeting.name, greeting.shares_callers))
        self._tick()

    def pause_writing(self) -> None:
        self.is_choked = True

    def resume_writing(self) -> None:
        self.is_choked = False

    def data_received(self, data: bytes) -> None:
        self._silent = 0
        try:
            for frame in self._reader.feed(data):
                self._take(_DECODER.decode(frame))
        except (ProtocolError, msgspec.MsgspecError, RecursionError) as error:
            self.end(f"the server sent what is no message of version {VERSION} of the protocol ({error})")

    def connection_lost(self, error: Exception | None) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        self.lost.set_result(None)
        self._on_lost(self)
        failed = Failed("engine_lost", f"The connection to the engine was lost: {self.reason}.")
        calls, self.calls = self.calls, {}
        for call in calls.values():
            call.answer(failed)

    # What the server says.

    def _take(self, message: FromServer) -> None:
        take = self._takes.get(type(message))
        if take is None:
            raise ProtocolError("unexpected_message", f"{type(message).__name__} cannot come now")
        take(message)

    def _welcome(self, welcome: Welcome) -> None:
        if welcome.version != VERSION:
            self.end(f"it speaks version {welcome.version} of the protocol, this client {VERSION}")
            return
        apart = time.monotonic() - welcome.clock
        if not -1.0 < apart < _CLOCK_S:
            self.end(
                f"its clock is {abs(apart):.1f} seconds from ours; both processes must run on one host "
                "and in one time namespace"
            )
            return
        self.window = welcome.window
        self._silence_s = max(self._silence_s, 4 * welcome.status_every_s)
        self._writer.limit = welcome.max_frame
        self._prefixes = SentPrefixes(welcome.prefix_slots, welcome.prefix_tokens, self._writer.send)
        self.facts = welcome.facts
        self._note(welcome.status.as_status())
        self._takes = {
            **dict.fromkeys(FINALS, self._final),
            Vector: self._vector,
            Status: self._status,
            Pong: self._answer_question,
            Draining: self._drain,
            Opened: self._opened,
            Error: self._error,
        }
        self.welcomed.set_result(None)

    def _final(self, final: Any) -> None:
        call = self.calls.pop(final.id, None)
        if call is not None:
            call.answer(outcome_of(final))

    def _vector(self, vector: Vector) -> None:
        call = self.calls.get(vector.id)
        if call is not None and call.lacks_vector and not call.future.done():
            call.lacks_vector = False
            call.future.set_result(unpacked(vector.vector))

    def _status(self, status: Status) -> None:
        before = self.status
        self._note(status.status.as_status())
        self._answer_question(status)
        if (before.ready, before.reason) != (self.status.ready, self.status.reason):
            self._on_change()

    def _note(self, status: EngineStatus) -> None:
        self.status, self.status_at = status, time.monotonic()

    def _answer_question(self, answer: Status | Pong) -> None:
        question = self._questions.get(answer.number)
        if question is not None and not question.done():
            question.set_result(answer)

    def _drain(self, draining: Draining) -> None:
        self.draining = draining.reason
        self._on_change()

    def _opened(self, opened: Opened) -> None:
        self.facts = opened.facts
        self._on_change()

    def _error(self, error: Error) -> None:
        self.end(error.message.rstrip("."))

    def _tick(self) -> None:
        """Counts quarters, not seconds: a process that was stopped and goes on has missed but one."""
        if self._silent >= 4:
            self.end(f"it has said nothing for {self._silence_s:g} seconds")
            return
        self._silent += 1
        self._ticker = self._loop.call_later(self._silence_s / 4, self._tick)


def trusted_uids() -> frozenset[int]:
    """This process's user, and root."""
    return frozenset({os.getuid(), 0})
