"""Who may open the socket, and where it may be."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from pathlib import Path

import pytest

from engine.errors import EngineFault
from engine.request import Embed
from engine.wire import Patience, WireClient, WireServer
from engine.wire.listen import listen_at, peer
from engine.wire.messages import Error
from tests.engine.wire.doubles import FACTS, WAIT_S, ScriptedEngine, answer_to, go, serving, until


def test_the_socket_is_its_owners_alone_whatever_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "folder" / "socket"
    modes: list[int] = []
    bind = socket.socket.bind

    def bind_and_look(self: socket.socket, address: str) -> None:
        bind(self, address)
        modes.append(stat.S_IMODE(path.lstat().st_mode))

    monkeypatch.setattr(socket.socket, "bind", bind_and_look)
    before = os.umask(0)
    try:
        with listen_at(path):
            assert modes == [0o600]
            assert stat.S_IMODE(path.lstat().st_mode) == 0o600
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    finally:
        os.umask(before)


def test_a_socket_that_was_left_behind_is_replaced_and_one_in_use_is_not(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    listen_at(path).close()
    assert path.exists()
    with listen_at(path):
        with pytest.raises(EngineFault, match="Another process listens at"):
            listen_at(path)
        assert path.exists()


def test_paths_that_cannot_be_had_are_refused_in_a_sentence(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("mine")
    with pytest.raises(EngineFault, match="exists and is no socket"):
        listen_at(taken)
    assert taken.read_text() == "mine"
    with pytest.raises(EngineFault, match="longer than 107 bytes"):
        listen_at(tmp_path / ("x" * 120))
    with pytest.raises(EngineFault, match="Cannot listen at"):
        listen_at(taken / "socket")


def test_the_kernel_says_who_is_at_the_other_end() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        assert peer(ours) == (os.getpid(), os.getuid())


def test_another_user_is_not_served() -> None:
    async def test() -> None:
        async with serving(uids=frozenset({os.getuid() + 1})) as wire:
            raw = await wire.raw()
            raw.hello()
            (error,) = await raw.read_to_end()
            assert isinstance(error, Error)
            assert error.code == "not_allowed"
            await raw.close()
            async with WireClient(wire.path) as client:
                await until(lambda: f"Processes of user {os.getuid()}" in client.status().reason)

    go(test)


def test_a_server_of_another_user_is_not_trusted() -> None:
    async def test() -> None:
        async with serving() as wire, WireClient(wire.path, uids=frozenset({os.getuid() + 1})) as client:
            await until(lambda: "does not trust" in client.status().reason)
            assert not wire.engine.asked

    go(test)


def test_a_listening_socket_of_the_parent_outlives_its_servers(tmp_path: Path) -> None:
    async def test() -> None:
        path = tmp_path / "socket"
        with listen_at(path) as listener:
            async with WireClient(path, patience=Patience(first_retry_s=0.001)) as client:
                for _ in range(2):
                    server = WireServer()
                    await server.start(listener.dup())
                    server.open(ScriptedEngine(), FACTS)
                    assert await client.wait_connected(WAIT_S)
                    assert await client.run(Embed((1,))) == answer_to(Embed((1,)))
                    await server.close()
                    await until(lambda: not client.is_connected)

    go(test)


def test_a_closed_server_leaves_no_path_and_takes_no_other_servers(tmp_path: Path) -> None:
    async def test() -> None:
        path = tmp_path / "socket"
        server = WireServer()
        await server.start(path)
        await server.close()
        assert not path.exists()
        server = WireServer()
        await server.start(path)
        path.rename(tmp_path / "aside")
        other = listen_at(path)
        await server.close()
        assert path.exists()
        other.close()

    go(test)


def test_a_server_that_never_welcomes_is_given_up(tmp_path: Path) -> None:
    async def test() -> None:
        path = tmp_path / "socket"
        with listen_at(path):
            async with WireClient(path, patience=Patience(handshake_s=0.01)) as client:
                await until(lambda: "no welcome came" in client.status().reason)

    go(test)


def test_a_server_that_falls_silent_is_given_up(tmp_path: Path) -> None:
    """Its process was stopped: the kernel keeps the connection, nothing comes."""

    async def test() -> None:
        async with serving() as wire, wire.client(patience=Patience(silence_s=0.05)) as client:
            link = client._link
            assert link is not None
            link._silence_s = 0.05  # the welcome has raised it to what the server's pace allows
            link._tick()
            call = asyncio.create_task(client.run(Embed((1,))))
            assert await call == answer_to(Embed((1,)))
            await asyncio.wait_for(asyncio.wait({link.lost}), WAIT_S)
            assert "said nothing for 0.05 seconds" in link.reason

    go(test)
