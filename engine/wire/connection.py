"""One connection of the server: what its client sent is checked, passed on, answered, and ended with it."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import msgspec

from engine.client import EngineStatus, Submission, Submitter
from engine.errors import Refusal, RefusalCode
from engine.request import Outcome
from engine.wire.convert import final_of, packed, request_of
from engine.wire.frames import ANSWER_BYTES, FrameReader, FrameWriter, ProtocolError
from engine.wire.listen import peer
from engine.wire.messages import (
    PROTOCOL,
    VERSION,
    Ask,
    AskEmbed,
    AskGenerate,
    AskRank,
    AskScore,
    AskStatus,
    Cancel,
    Define,
    Draining,
    EngineFacts,
    Error,
    FromClient,
    Hello,
    Invalid,
    Message,
    Ping,
    Pong,
    Snapshot,
    Status,
    Supply,
    Vector,
    Welcome,
)
from engine.wire.prefixes import KnownPrefixes
from engine.wire.refusals import no_engine, refuse

_log = logging.getLogger(__name__)
_DECODER = msgspec.msgpack.Decoder(FromClient)
_HELLO_BYTES = 4096
_LINGER_S = 1.0


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


@dataclass(slots=True)
class Service:
    """What all connections share: the engine, or why there is none, and who is connected."""

    limits: WireLimits
    uids: frozenset[int]
    reason: str  # why there is no engine
    engine: Submitter | None = None
    facts: EngineFacts | None = None
    draining: str = ""  # why no new request is taken
    connections: set[Connection] = field(default_factory=set)
    in_flight: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def status(self) -> EngineStatus:
        status = no_engine(self.reason) if self.engine is None else self.engine.status()
        if self.draining:
            return replace(status, ready=False, draining=True, reason=status.reason or self.draining)
        return status

    def refusal(self, code: RefusalCode, message: str) -> Refusal:
        """Of a request that does not come to the engine."""
        return refuse(self.status(), self.facts, code, message)

    def count(self, change: int) -> None:
        self.in_flight += change
        if self.in_flight:
            self.idle.clear()
        else:
            self.idle.set()


class Connection(asyncio.Protocol):
    """Ends with one `Error` frame at the first thing that breaks the protocol; other connections go on."""

    def __init__(self, service: Service, number: int) -> None:
        self._service = service
        self._number = number
        self._client = f"connection {number}"  # for the log
        self._callers = f"{number}:"  # before the client's own names of its callers
        self._reader = FrameReader(_HELLO_BYTES)
        limits = service.limits
        self._prefixes = KnownPrefixes(limits.prefix_slots, limits.prefix_tokens)
        self._live: dict[int, Submission | None] = {}  # None while the engine is being asked
        self._choosing: set[int] = set()  # rank requests whose prefixes are due
        self._last_id = -1
        self._ended = False
        self._timer: asyncio.TimerHandle | None = None
        self._takes: dict[type[Message], Callable[[Any], None]] = {Hello: self._hello}
        self._transport: asyncio.Transport
        self._writer: FrameWriter
        self._uid = -1
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_welcome(self) -> bool:
        """Whether the client has said hello and is served."""
        return not self._ended and Hello not in self._takes

    def send(self, message: Message) -> None:
        self._writer.send(message)

    def close(self) -> None:
        """Writes what is left to write and ends."""
        self._writer.flush()
        self._leave()
        self._ended = True
        self._transport.close()
        self._after(_LINGER_S, self._transport.abort)

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop has classes of its own
        service, limits = self._service, self._service.limits
        self._transport = transport
        self._writer = FrameWriter(transport, ANSWER_BYTES)
        transport.set_write_buffer_limits(high=limits.write_buffer)
        pid, self._uid = peer(transport.get_extra_info("socket"))
        self._client = f"connection {self._number} of process {pid}"
        service.connections.add(self)
        if self._uid not in service.uids:
            self._fail("not_allowed", f"Processes of user {self._uid} may not use this engine.")
        elif len(service.connections) > limits.connections:
            self._fail("too_many_connections", f"All {limits.connections} connections are in use.")
        else:
            self._after(limits.hello_s, self._drop_silent)

    def data_received(self, data: bytes) -> None:
        if self._ended:
            return
        try:
            for frame in self._reader.feed(data):
                message = _decode(frame)
                take = self._takes.get(type(message))
                if take is None:
                    raise ProtocolError("unexpected_message", f"{type(message).__name__} cannot come now.")
                take(message)
                if self._ended:
                    return
        except ProtocolError as error:
            self._fail(error.code, str(error))

    def pause_writing(self) -> None:
        """The client does not read, so it could not read an error either."""
        limit = self._service.limits.write_buffer
        _log.warning("%s is dropped: it has left more than %d bytes unread", self._client, limit)
        self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._ended and self._live:
            _log.info("%s is gone; its %d requests are cancelled", self._client, len(self._live))
        self._ended = True
        self._stop_timer()
        self._service.connections.discard(self)
        self._leave()
        self.closed.set_result(None)

    # What the client says.

    def _hello(self, hello: Hello) -> None:
        service, limits = self._service, self._service.limits
        if hello.protocol != PROTOCOL:
            raise ProtocolError("unknown_protocol", f"This is a socket of the protocol {PROTOCOL!r}.")
        if VERSION not in hello.versions:
            offered = ", ".join(map(str, hello.versions)) or "none"
            raise ProtocolError(
                "unknown_version",
                f"This engine speaks version {VERSION} of the protocol, the client offers {offered}; "
                "run both from the same release.",
            )
        self._stop_timer()
        if hello.shares_callers and self._uid == os.getuid():
            self._callers = ""
        self._client += f" ({hello.name!r})" if hello.name else ""
        self._reader.limit = limits.max_frame
        self._takes = {
            Define: self._prefixes.define,
            AskRank: self._ask,
            AskScore: self._ask,
            AskEmbed: self._ask,
            AskGenerate: self._ask,
            Supply: self._supply,
            Cancel: self._cancel,
            AskStatus: lambda ask: self.send(Status(ask.number, Snapshot.of(service.status()))),
            Ping: self._ping,
        }
        self.send(
            Welcome(
                VERSION,
                limits.max_frame,
                limits.window,
                limits.prefix_slots,
                limits.prefix_tokens,
                limits.status_every_s,
                time.monotonic(),
                service.facts,
                Snapshot.of(service.status()),
            )
        )
        if service.draining:
            self.send(Draining(service.draining))

    def _ask(self, ask: Ask) -> None:
        service, id_ = self._service, ask.id
        if id_ <= self._last_id:
            raise ProtocolError("bad_id", f"Request ids go up; {id_} came after {self._last_id}.")
        self._last_id = id_
        request = request_of(ask, self._prefixes.resolve)
        if ask.deadline is not None and not math.isfinite(ask.deadline):
            raise ProtocolError("bad_deadline", "A deadline is a finite number of seconds.")
        engine = self._engine_or_refusal()
        if isinstance(engine, Refusal):
            self.send(final_of(id_, engine))
            return
        self._live[id_] = None
        service.count(1)
        try:
            submission = engine.submit(
                request,
                deadline=ask.deadline,
                caller=self._callers + ask.caller,
                on_done=partial(self._done, id_),
                on_vector=partial(self._vector, id_) if isinstance(ask, AskRank) else None,
            )
        except ValueError as error:
            self._end_invalid(id_, error)
            return
        if id_ in self._live:
            self._live[id_] = submission

    def _engine_or_refusal(self) -> Submitter | Refusal:
        service = self._service
        if service.draining:
            message = f"The server takes no more calls: {service.draining}."
            return service.refusal(RefusalCode.DRAINING, message)
        if service.engine is None:
            return service.refusal(RefusalCode.NOT_READY, f"The server is not ready: {service.reason}.")
        if len(self._live) >= service.limits.window:
            message = f"The connection is busy with {len(self._live):,} requests."
            return service.refusal(RefusalCode.QUEUE_FULL, message)
        return service.engine

    def _supply(self, supply: Supply) -> None:
        id_ = supply.id
        prefixes = self._prefixes.resolve(supply.prefixes)
        submission = self._live.get(id_)
        if submission is None:
            return  # it has ended meanwhile
        if id_ not in self._choosing:
            raise ProtocolError("unexpected_message", f"No prefixes are due for request {id_}.")
        self._choosing.discard(id_)
        try:
            submission.supply(prefixes)
        except ValueError as error:
            self._end_invalid(id_, error)
            submission.cancel()

    def _cancel(self, cancel: Cancel) -> None:
        submission = self._live.get(cancel.id)
        if submission is not None:
            submission.cancel()

    def _ping(self, ping: Ping) -> None:
        status = self._service.status()
        self.send(Pong(ping.number, status.ready, status.reason))

    # What the engine says.

    def _vector(self, id_: int, vector: tuple[float, ...]) -> None:
        if id_ in self._live:
            self._choosing.add(id_)
            self.send(Vector(id_, packed(vector)))

    def _done(self, id_: int, outcome: Outcome) -> None:
        if self._forget(id_):
            self.send(final_of(id_, outcome))

    def _end_invalid(self, id_: int, error: ValueError) -> None:
        if self._forget(id_):
            self.send(Invalid(id_, str(error)))

    def _forget(self, id_: int) -> bool:
        """Whether a request has lived until now: every one gets exactly one last message."""
        if id_ not in self._live:
            return False
        del self._live[id_]
        self._choosing.discard(id_)
        self._service.count(-1)
        return True

    # Ends.

    def _leave(self) -> None:
        """Cancels what this connection has under way, and nothing else."""
        live, self._live = self._live, {}
        self._choosing.clear()
        self._service.count(-len(live))
        for submission in live.values():
            if submission is not None:
                submission.cancel()

    def _fail(self, code: str, message: str) -> None:
        """One error frame, then the end. What still comes in is read and thrown away for a moment: a
        socket closed with unread data would take the error frame from the client."""
        _log.warning("%s is ended: %s", self._client, message)
        self._leave()
        self._ended = True
        self._stop_timer()
        self.send(Error(code, message))
        self._writer.flush()
        if not self._transport.is_closing():
            self._transport.write_eof()
            self._after(_LINGER_S, self._transport.abort)

    def _drop_silent(self) -> None:
        self._fail("no_hello", f"No hello came within {self._service.limits.hello_s:g} seconds.")

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(seconds, call)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def _decode(frame: memoryview) -> FromClient:
    try:
        return _DECODER.decode(frame)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(
            "malformed_frame", f"A frame is no message of version {VERSION}: {error}."
        ) from error
