"""A client whose server breaks the protocol gives the connection up, says why, and leaves no call waiting."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import Embed, Failed
from engine.wire import Patience, WireClient
from engine.wire.messages import (
    Error,
    Message,
    Opened,
    Pong,
    Snapshot,
    Status,
    Vector,
    WasCancelled,
    WasEmbedded,
    Welcome,
)
from engine.wire.refusals import no_engine
from tests.engine.wire.doubles import FACTS, RANK, WAIT_S, framed, go, until

SNAPSHOT = Snapshot.of(no_engine("a test"))


def welcome(version: int = 1, clock_ahead_s: float = 0.0) -> Welcome:
    clock = time.monotonic() + clock_ahead_s
    return Welcome(version, 1 << 20, 16, 8, 100, 1.0, clock, FACTS, SNAPSHOT)


@asynccontextmanager
async def told(first: bytes, then: bytes = b"") -> AsyncIterator[WireClient]:
    """A client of a server that says `first` to a hello and `then` to what comes next."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.write(first)
        if then:
            await reader.read(1 << 16)
            writer.write(then)
        await reader.read()
        writer.close()

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "socket"
        server = await asyncio.start_unix_server(serve, path)
        patience = Patience(WAIT_S, first_retry_s=WAIT_S, grace_s=0.0)  # one connection is enough
        try:
            async with WireClient(path, patience=patience) as client:
                yield client
        finally:
            server.close()


@pytest.mark.parametrize(
    ("greet", "reason"),
    [
        (lambda: welcome(version=2), "it speaks version 2 of the protocol, this client 1"),
        (lambda: welcome(clock_ahead_s=100.0), "both processes must run on one host"),
        (lambda: welcome(clock_ahead_s=-100.0), "both processes must run on one host"),
        (lambda: Error("unknown_version", "Run both alike."), "was refused: Run both alike"),
        (lambda: Opened(FACTS), "Opened cannot come now"),
    ],
)
def test_a_greeting_that_does_not_fit_is_not_accepted(greet: Callable[[], Message], reason: str) -> None:
    async def test() -> None:
        async with told(framed(greet())) as client:
            await until(lambda: reason in client.status().reason)
            assert not client.is_connected
            assert client.facts is None

    go(test, uv=False)


@pytest.mark.parametrize("noise", [b"\xff" * 40, b"\1\0\0\0\x80", b"\2\0\0\0\x91\x63", b"\0\0\0\0"])
def test_noise_from_a_server_ends_its_calls(noise: bytes) -> None:
    async def test() -> None:
        async with told(framed(welcome()), noise) as client:
            assert await client.wait_connected(WAIT_S)
            outcome = await client.run(Embed((1,)))
            assert isinstance(outcome, Failed)
            assert outcome.code == "engine_lost"
            assert "no message of version 1" in outcome.message
            assert not client.is_connected

    go(test, uv=False)


@settings(max_examples=60, deadline=None)
@given(noise=st.binary(min_size=1, max_size=60))
def test_any_noise_leaves_no_call_waiting(noise: bytes) -> None:
    async def test() -> None:
        async with told(framed(welcome()), noise + framed(Error("bad", "The end."))) as client:
            assert await client.wait_connected(WAIT_S)
            deadline = time.monotonic() + 0.01  # noise may announce a frame that never comes
            await client.run(Embed((1,)), deadline=deadline)
            await client.rank(RANK, lambda vector: (), deadline=deadline)

    go(test, uv=False)


def test_answers_that_nobody_waits_for_are_ignored() -> None:
    usage, timing = (1, 0, 0, 1), (0.0, 0.0)
    answers = [
        Vector(1, b"\0" * 8),  # of no rank
        Vector(77, b"\0" * 8),
        WasCancelled(78),
        Pong(79, True, ""),
        Status(80, SNAPSHOT),
        WasEmbedded(1, b"\0" * 8, usage, timing),
        WasEmbedded(1, b"\0" * 16, usage, timing),
    ]

    async def test() -> None:
        async with told(framed(welcome()), b"".join(map(framed, answers))) as client:
            assert await client.wait_connected(WAIT_S)
            outcome = await client.run(Embed((1,)))
            assert getattr(outcome, "vector", None) == (0.0,)
            assert client.in_flight == 0
            assert client.is_connected

    go(test, uv=False)
