"""The wrapper that cancels, by hand-made ASGI: who hangs up is cancelled, and nobody else ever."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from mcp_discovery.transport.disconnect import ClientGone, cancel_on_disconnect, read_body

SCOPE: dict[str, Any] = {"type": "http", "headers": []}


class Client:
    """The server's side of one exchange: what the client sends, and its disconnect."""

    def __init__(self, *messages: Message) -> None:
        self._messages = list(messages)
        self.gone = asyncio.Event()
        self.sent: list[Message] = []

    async def receive(self) -> Message:
        if self._messages:
            return self._messages.pop(0)
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)
        if not message.get("more_body", message["type"] == "http.response.start"):
            self.gone.set()  # as servers do: a finished response reads as a disconnect


def chunk(body: bytes, more: bool) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


async def answer(send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"x"})


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def run(app: Any, client: Client) -> Any:
    return cancel_on_disconnect(app, SCOPE, b"body", client.receive, client.send)


def test_the_app_reads_its_body_once_and_then_only_the_disconnect() -> None:
    seen: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(await receive())
        waiting = asyncio.ensure_future(receive())
        await settle()
        assert not waiting.done()  # a body again would make who waits for the disconnect spin
        await answer(send)
        seen.append(await waiting)

    async def main() -> None:
        await run(app, Client())

    asyncio.run(asyncio.wait_for(main(), 10))
    assert seen == [chunk(b"body", False), {"type": "http.disconnect"}]


def test_hanging_up_cancels_the_app_and_not_the_server() -> None:
    ended: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def main() -> None:
        client = Client()
        task = asyncio.create_task(run(app, client))
        await settle()
        client.gone.set()
        await task  # returns: the cancellation was the app's alone
        assert task.cancelling() == 0

    asyncio.run(asyncio.wait_for(main(), 10))
    assert ended == ["cancelled"]


def test_a_cancellation_from_outside_goes_through() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        task = asyncio.create_task(run(app, Client()))
        await settle()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(main(), 10))


def test_what_an_app_does_after_its_answer_is_not_cancelled_by_it() -> None:
    finished: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send)
        await settle()
        finished.append("cleaned up")

    async def main() -> None:
        await run(app, Client())

    asyncio.run(asyncio.wait_for(main(), 10))
    assert finished == ["cleaned up"]


def test_a_fault_of_the_app_goes_through() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise LookupError("planted")

    async def main() -> None:
        await run(app, Client())

    with pytest.raises(LookupError):
        asyncio.run(main())


def test_a_body_is_read_whole_or_not_at_all() -> None:
    async def read(*messages: Message, limit: int = 10, length: bytes = b"") -> bytes | None:
        scope = {"headers": [(b"content-length", length)] if length else []}
        client = Client(*messages)
        client.gone.set()
        return await read_body(scope, client.receive, limit)

    async def main() -> None:
        assert await read(chunk(b"abc", True), chunk(b"", True), chunk(b"def", False)) == b"abcdef"
        assert await read(chunk(b"a" * 10, False)) == b"a" * 10
        assert await read(chunk(b"a" * 6, True), chunk(b"a" * 6, True)) is None
        assert await read(length=b"11") is None
        assert await read(chunk(b"a", False), length=b"nonsense") == b"a"
        with pytest.raises(ClientGone):
            await read(chunk(b"a", True))

    asyncio.run(main())
