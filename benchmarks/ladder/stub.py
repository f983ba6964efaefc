"""A server that answers every call with the same bytes: what the drivers reach when nothing else limits.

Several processes share one port, so that the stub is not the limit either.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import re
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import uvloop

from benchmarks.ladder.wire import Client, Endpoint, connect
from mcp_discovery.certificates import Pki, ensure
from mcp_discovery.transport.serve import raise_file_limit

_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)")
HEALTHY = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


class _Stub(asyncio.Protocol):
    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its type

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        found = _LENGTH.search(self._buffer, 0, end)
        if len(self._buffer) >= end + 4 + (int(found[1]) if found else 0):
            self._buffer.clear()
            self._transport.write(self._answer if found else HEALTHY)


def _serve(port: int, pki: Pki, answer: bytes) -> None:
    async def forever() -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(pki.server, pki.server_key)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: _Stub(answer), "127.0.0.1", port, ssl=context, reuse_port=True, backlog=4096
        )
        await server.serve_forever()

    raise_file_limit()
    uvloop.run(forever())


@contextmanager
def stub(folder: Path, body: bytes, processes: int) -> Iterator[Endpoint]:
    """Stub processes that answer with `body`, their certificates in `folder`."""
    pki = Pki(folder)
    ensure(pki)
    head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\ncontent-type: application/json\r\n\r\n"
    spawn = multiprocessing.get_context("spawn")
    with socket.socket() as held:  # keeps the port for the processes, without listening on it
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        started = [
            spawn.Process(target=_serve, args=(port, pki, head.encode() + body), daemon=True)
            for _ in range(processes)
        ]
        for process in started:
            process.start()
        endpoint = Endpoint("127.0.0.1", port, "/mcp", pki.ca)
        try:
            asyncio.run(_await(endpoint, processes))
            yield endpoint
        finally:
            for process in started:
                process.terminate()
                process.join(10.0)


async def _await(endpoint: Endpoint, processes: int, most_s: float = 60.0) -> None:
    """Until the stub accepts connections; the kernel spreads them over those processes that listen."""
    deadline = asyncio.get_running_loop().time() + most_s
    while True:
        try:
            (await connect(endpoint, endpoint.context())).close()
            await asyncio.sleep(0.5)  # the others started at the same moment
            return
        except OSError:
            if asyncio.get_running_loop().time() > deadline:
                raise
            await asyncio.sleep(0.1)


class _Keeper:
    """Owns a client for one answer."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def answered(self, client: Client, ok: bool, body: bytes) -> None:
        self.answer.set_result(body)

    def lost(self, client: Client, reason: str) -> None:
        if not self.answer.done():
            self.answer.set_exception(ConnectionError(reason))


async def one_answer(endpoint: Endpoint, query: str) -> bytes:
    """The body of one call to the real server; raises OSError."""
    client = await connect(endpoint, endpoint.context())
    client.owner = keeper = _Keeper()
    client.ask(endpoint.call({"query": query}))
    try:
        return await keeper.answer
    finally:
        client.close()
