"""Sockets are bound before anything is loaded, and what cannot be bound is one sentence."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
from pathlib import Path

import pytest

from engine.errors import ConfigError
from mcp_discovery.certificates import Pki
from mcp_discovery.transport.bind import bind_tcp, bind_unix
from mcp_discovery.transport.serve import raise_file_limit
from mcp_discovery.tuning import tune_interpreter
from tests.clients.raw import MODERN, call_message, connect, headers, request, request_bytes
from tests.transport.serving import WAIT_S, serving


def test_a_port_in_use_is_one_sentence() -> None:
    with bind_tcp("127.0.0.1", 0, key="--port") as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: the port is in use; .* --port"):
            bind_tcp("127.0.0.1", port, key="--port")


def test_an_address_that_is_not_ours_is_one_sentence() -> None:
    for host in ("192.0.2.1", "no.such.host.invalid"):
        with pytest.raises(ConfigError, match=f"cannot listen on {host}"):
            bind_tcp(host, 0, key="--host")


def test_a_dead_socket_file_is_replaced_and_a_live_one_respected(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with bind_unix(path) as live:
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(ConfigError, match="another server listens"):
            bind_unix(path)
        assert live.fileno() >= 0


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="is no socket"):
        bind_unix(path)
    assert path.read_text() == "mine"
    with pytest.raises(ConfigError, match="cannot listen on the Unix socket"):
        bind_unix(tmp_path / "missing" / "s")


def test_stopping_lets_a_running_call_end_within_its_grace(pki: Pki, tmp_path: Path) -> None:
    """The server stops while a call is held: past the grace the call is cancelled and counted."""
    with serving(pki, tmp_path / "s") as served:
        tls = connect(served.host, served.port, served.ca)
        tls.sendall(request_bytes(MODERN, call_message(MODERN, "hold"), served.host))
        assert served.tool.started.wait(WAIT_S)
    assert served.tool.cancelled.wait(WAIT_S)
    assert served.accounting.counts().cancelled == 1
    tls.close()
    with pytest.raises(OSError, match=r"refused|reset"):
        socket.create_connection((served.host, served.port), WAIT_S)


def test_many_clients_at_once_are_all_answered(pki: Pki, tmp_path: Path) -> None:
    statuses: list[int] = []
    with serving(pki, tmp_path / "s") as served:

        def client() -> None:
            for _ in range(4):
                body = call_message(MODERN, "x")
                reply = request(served.host, served.port, served.ca, body=body, fields=headers(MODERN))
                statuses.append(reply.status)

        threads = [threading.Thread(target=client) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        counts = served.run(served.accounting.counts)
    assert statuses == [200] * 64
    assert (counts.received, counts.answered, counts.in_flight) == (64, 64, 0)


def test_the_process_is_tuned_and_the_limit_of_files_only_rises() -> None:
    thresholds = gc.get_threshold()
    try:
        before = raise_file_limit()
        assert raise_file_limit() == before
        tune_interpreter()
        assert gc.get_threshold()[0] > thresholds[0]
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)


def test_a_listener_works_under_the_plain_event_loop(pki: Pki, tmp_path: Path) -> None:
    from mcp_discovery.transport.app import create_app
    from mcp_discovery.transport.serve import Listener, Listeners
    from mcp_discovery.transport.tls import server_context
    from tests.transport.serving import EchoTool

    async def main() -> int:
        app = create_app(EchoTool())
        tls = server_context(pki.server, pki.server_key)
        listener = Listener("tls", app, bind_tcp("127.0.0.1", 0, key="--port"), tls)
        host, port = listener.address
        async with app.router.lifespan_context(app):
            listeners = Listeners([listener])
            await listeners.start()
            body = call_message(MODERN, "x")
            reply = await asyncio.to_thread(
                request, host, port, pki.ca, "POST", "/mcp", body, headers(MODERN)
            )
            await listeners.stop(grace_s=1)
            return reply.status

    assert asyncio.run(main()) == 200
