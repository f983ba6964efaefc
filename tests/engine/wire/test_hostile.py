"""Whatever a client sends, its connection ends with one clear error and nothing else is touched."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import RefusalCode
from engine.request import Cancelled, Embed, Scored
from engine.wire import WireLimits
from engine.wire.connection import Connection, Service
from engine.wire.frames import HEADER, FrameReader
from engine.wire.messages import (
    PROTOCOL,
    AskEmbed,
    AskGenerate,
    AskRank,
    AskScore,
    AskStatus,
    Cancel,
    Define,
    Error,
    FromServer,
    HasFailed,
    Hello,
    Invalid,
    Message,
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
from tests.engine.wire.doubles import FACTS, ScriptedEngine, answer_to, framed, go, serving, until

HELLO = framed(Hello(PROTOCOL, (1,), "raw", False))
FINALS = (WasEmbedded, WasScored, WasGenerated, WasRefused, HasFailed, WasCancelled, Invalid)
UIDS = frozenset({os.getuid()})


class Transport(asyncio.Transport):
    """Keeps what is written; the kernel's other end only says who we are."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__({"socket": end})
        self.written = b""
        self.at_end = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.at_end, "written after the end"
        self.written += bytes(data)

    def write_eof(self) -> None:
        self.at_end = True

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        self.at_end = True

    def close(self) -> None:
        self.at_end = True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass


@contextmanager
def connected(engine: ScriptedEngine, **limits: Any) -> Iterator[tuple[Connection, Transport]]:
    """A server's connection without a loop between it and the test."""
    service = Service(WireLimits(**limits), UIDS, "", engine, FACTS)
    ends = socket.socketpair(socket.AF_UNIX)
    with ends[0], ends[1]:
        connection = Connection(service, 1)
        transport = Transport(ends[0])
        connection.connection_made(transport)
        yield connection, transport
        connection._writer.flush()
        connection.connection_lost(None)
        assert service.in_flight == 0
        assert not service.connections


def said(transport: Transport) -> list[FromServer]:
    frames = FrameReader(1 << 30).feed(transport.written)
    return [msgspec.msgpack.decode(frame, type=FromServer) for frame in frames]


async def feed(stream: bytes, cuts: list[int], **limits: Any) -> tuple[list[FromServer], ScriptedEngine]:
    engine = ScriptedEngine()
    with connected(engine, **limits) as (connection, transport):
        for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            connection.data_received(stream[start:end])
        failed = connection._ended
        if failed:
            assert transport.at_end
            assert not connection._live
    messages = said(transport)
    check(messages, engine, failed)
    return messages, engine


def check(messages: list[FromServer], engine: ScriptedEngine, failed: bool) -> None:
    """One error at most, and last; one end a request; nothing left in the engine."""
    errors = [message for message in messages if isinstance(message, Error)]
    assert len(errors) == failed
    if failed:
        assert messages[-1] is errors[0]
        assert errors[0].message.endswith(".")
    ends = [message.id for message in messages if isinstance(message, FINALS)]
    assert len(ends) == len(set(ends))
    assert all(asked.ended for asked in engine.asked)


INT = st.integers(-(1 << 63), (1 << 64) - 1) | st.integers(-2, 5)
INTS = st.lists(INT, max_size=4).map(tuple)
REFS = st.lists(INT | INTS, max_size=4).map(tuple)
SMALL = st.integers(0, 5)
DEADLINE = st.none() | st.floats()
MESSAGES: st.SearchStrategy[Message] = st.one_of(
    st.builds(Define, INT, INTS, INTS),
    st.builds(AskEmbed, SMALL, st.text(max_size=3), DEADLINE, INTS, INT),
    st.builds(AskScore, SMALL, st.just(""), DEADLINE, REFS, INTS, INT, INT, st.none() | INT),
    st.builds(AskRank, SMALL, st.just(""), DEADLINE, INTS, INT, INT, INTS, INT, INT, st.none() | INT),
    st.builds(AskGenerate, SMALL, st.just(""), DEADLINE, INTS, INT, INTS, st.floats(), INT, st.none(), INT),
    st.builds(Supply, SMALL, REFS),
    st.builds(Cancel, INT | SMALL),
    st.builds(AskStatus, INT),
    st.builds(Ping, INT),
    st.builds(Hello, st.text(max_size=3), INTS, st.text(max_size=3), st.booleans()),
)


@settings(max_examples=400, deadline=None)
@given(noise=st.binary(max_size=200), welcome=st.booleans(), data=st.data())
def test_noise_is_refused(noise: bytes, welcome: bool, data: st.DataObject) -> None:
    stream = (HELLO if welcome else b"") + noise
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=4)))
    go(lambda: feed(stream, cuts, max_frame=100), uv=False)


@settings(max_examples=400, deadline=None)
@given(body=st.binary(min_size=1, max_size=60))
def test_a_frame_of_noise_is_refused_or_is_a_message(body: bytes) -> None:
    messages, _ = go(lambda: feed(HELLO + HEADER.pack(len(body)) + body, []), uv=False)
    assert isinstance(messages[0], Welcome)


@settings(max_examples=400, deadline=None)
@given(messages=st.lists(MESSAGES, max_size=12), data=st.data())
def test_any_messages_in_any_order(messages: list[Message], data: st.DataObject) -> None:
    stream = HELLO + b"".join(map(framed, messages))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=4)))
    whole, _ = go(lambda: feed(stream, []), uv=False)
    parts, _ = go(lambda: feed(stream, cuts), uv=False)
    assert [type(message) for message in whole] == [type(message) for message in parts]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_conversation_with_one_byte_changed(data: st.DataObject) -> None:
    stream = bytearray(CONVERSATION)
    at = data.draw(st.integers(0, len(stream) - 1))
    stream[at] = data.draw(st.integers(0, 255))
    go(lambda: feed(bytes(stream), []), uv=False)


CONVERSATION = HELLO + b"".join(
    map(
        framed,
        [
            Define(0, (1, 2, 3)),
            AskEmbed(1, "a", 1e9, (1, 2), 0),
            AskRank(2, "b", None, (1,), 4, 8, (2,), 3, 4, None),
            Supply(2, (0, (7, 8))),
            AskScore(3, "c", None, (0, 0), (1,), 3, 4, 2),
            AskGenerate(4, "d", None, (1, 2), 3, (4,), 0.0, 0, None, 0),
            Cancel(4),
            AskStatus(5),
            Ping(6),
        ],
    )
)
KINDS = [Welcome, WasEmbedded, Vector, WasScored, WasScored, WasGenerated, Status, Pong]


def test_a_conversation_cut_at_every_byte() -> None:
    async def test() -> None:
        for cut in range(len(CONVERSATION) + 1):
            messages, engine = await feed(CONVERSATION, [cut])
            assert [type(message) for message in messages] == KINDS
            assert engine.asked[1].supplied == ((1, 2, 3), (7, 8))
            assert isinstance(messages[3], WasScored)
            outcome = answer_to(engine.asked[1].request, ((1, 2, 3), (7, 8)))
            assert isinstance(outcome, Scored)
            assert messages[3].probabilities == outcome.probabilities

    go(test)


def test_a_conversation_truncated_at_every_byte_answers_what_was_whole() -> None:
    async def test() -> None:
        for end in range(len(CONVERSATION)):
            messages, _ = await feed(CONVERSATION[:end], [])
            assert [type(message) for message in messages] == KINDS[: len(messages)]

    go(test)


def ask(id_: int, deadline: float | None = None) -> AskEmbed:
    return AskEmbed(id_, "", deadline, (1,), 0)


WRONG: dict[str, tuple[str, bytes]] = {
    "another protocol": ("unknown_protocol", framed(Hello("http", (1,), "", False))),
    "a version to come": ("unknown_version", framed(Hello(PROTOCOL, (2, 3), "", False))),
    "no version": ("unknown_version", framed(Hello(PROTOCOL, (), "", False))),
    "a request before the hello": ("unexpected_message", framed(ask(1))),
    "a long hello": ("frame_too_large", framed(Hello(PROTOCOL, (1,), "x" * 5000, False))),
    "http": ("frame_too_large", b"GET / HTTP/1.1\r\n\r\n"),
    "two hellos": ("unexpected_message", HELLO + HELLO),
    "an oversized frame": ("frame_too_large", HELLO + HEADER.pack((1 << 20) + 1)),
    "an empty frame": ("malformed_frame", HELLO + HEADER.pack(0)),
    "an unknown message": ("malformed_frame", HELLO + HEADER.pack(2) + b"\x91\x63"),
    "a map": ("malformed_frame", HELLO + HEADER.pack(1) + b"\x80"),
    "2 thousand million items": ("malformed_frame", HELLO + HEADER.pack(7) + b"\x92\x06\xdd\x7f\xff\xff\xff"),
    "deep nesting": ("malformed_frame", HELLO + HEADER.pack(100_003) + b"\x93\x07\x01" + b"\x91" * 100_000),
    "an item list of nothing": (
        "malformed_frame",
        HELLO + framed(AskGenerate(1, "", None, (1,), 1, (), 0.0, 0, [[], 1, [], 1], 0)),  # type: ignore[arg-type]
    ),
    "an id twice": ("bad_id", HELLO + framed(ask(1)) + framed(ask(1))),
    "an id that goes down": ("bad_id", HELLO + framed(ask(2)) + framed(ask(1))),
    "a deadline that is no number": ("bad_deadline", HELLO + framed(ask(1, float("nan")))),
    "a deadline without end": ("bad_deadline", HELLO + framed(ask(1, float("inf")))),
    "an unknown prefix": (
        "bad_prefix",
        HELLO + framed(AskScore(1, "", None, (5,), (1,), 1, 2, None)),
    ),
    "a prefix number out of range": ("bad_prefix", HELLO + framed(Define(1 << 20, (1,)))),
    "prefixes without end": ("bad_prefix", HELLO + framed(Define(0, (1,) * ((1 << 20) - 100))) * 2),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_frame_ends_its_connection_with_one_error(case: str) -> None:
    code, stream = WRONG[case]

    async def test() -> None:
        async with serving(by_itself=False) as wire, wire.client() as other:
            kept = asyncio.create_task(other.run(Embed((9,))))
            await wire.engine.arrived(1)
            raw = await wire.raw()
            raw.writer.write(stream)
            messages = await raw.read_to_end()
            errors = [message for message in messages if isinstance(message, Error)]
            assert [error.code for error in errors] == [code]
            assert messages[-1] is errors[0]
            await raw.close()
            await until(lambda: wire.server.connections == 1)
            first, *rest = wire.engine.asked
            assert all(asked.cancels == 1 for asked in rest)
            assert wire.server.in_flight == 1
            first.answer()
            assert await kept == answer_to(Embed((9,)))

    go(test)


def test_prefixes_that_are_not_due_end_the_connection() -> None:
    async def test() -> None:
        async with serving(by_itself=False) as wire:
            raw = await wire.raw()
            raw.hello()
            raw.send(AskRank(1, "", None, (1,), 4, 8, (2,), 3, 4, None))
            (asked,) = await wire.engine.arrived(1)
            raw.send(Supply(1, ()))
            messages = await raw.read_to_end()
            assert isinstance(messages[-1], Error)
            assert messages[-1].code == "unexpected_message"
            assert asked.cancels == 1
            await raw.close()

    go(test)


def test_what_comes_late_is_ignored() -> None:
    async def test() -> None:
        async with serving() as wire:
            raw = await wire.raw()
            raw.hello()
            raw.send(AskRank(1, "", None, (1,), 4, 8, (2,), 3, 4, None), Supply(1, ()))
            await raw.read_until(WasScored)
            raw.send(Supply(1, ()), Cancel(1), Cancel(77), Ping(3))
            assert (await raw.read_until(Pong)).number == 3
            await raw.close()

    go(test)


def test_the_server_keeps_its_window_where_the_client_does_not() -> None:
    async def test() -> None:
        async with serving(WireLimits(window=2), by_itself=False) as wire:
            raw = await wire.raw()
            raw.hello()
            raw.send(ask(1), ask(2), ask(3))
            refused = await raw.read_until(WasRefused)
            assert (refused.id, refused.code) == (3, RefusalCode.QUEUE_FULL)
            wire.engine.asked[0].end(Cancelled())
            assert (await raw.read_until(WasCancelled)).id == 1
            raw.send(ask(4))
            assert len(await wire.engine.arrived(3)) == 3
            await raw.close()

    go(test)


def test_a_client_that_does_not_read_is_dropped_alone() -> None:
    async def test() -> None:
        limits = WireLimits(write_buffer=1 << 16)
        async with serving(limits) as wire, wire.client() as other:
            raw = await wire.raw()
            raw.hello()
            await raw.read_until(Welcome)
            raw.writer.transport.pause_reading()
            for number in range(10_000):
                raw.send(AskGenerate(number, "", None, (1 << 40,) * 200, 1, (), 0.0, 0, None, 0))
                if not number % 50:
                    await asyncio.sleep(0)
                if wire.server.connections == 1:
                    break
            await until(lambda: wire.server.connections == 1)
            assert await other.run(Embed((9,))) == answer_to(Embed((9,)))
            raw.writer.transport.abort()

    go(test)


def test_a_client_that_says_nothing_is_dropped() -> None:
    async def test() -> None:
        async with serving(WireLimits(hello_s=0.01)) as wire:
            raw = await wire.raw()
            (error,) = await raw.read_to_end()
            assert isinstance(error, Error)
            assert error.code == "no_hello"
            await raw.close()

    go(test)


def test_connections_are_bounded() -> None:
    async def test() -> None:
        async with serving(WireLimits(connections=1)) as wire, wire.client():
            raw = await wire.raw()
            (error,) = await raw.read_to_end()
            assert isinstance(error, Error)
            assert error.code == "too_many_connections"
            await raw.close()

    go(test)
