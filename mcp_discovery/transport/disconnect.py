"""A client that hangs up takes its request back.

ASGI tells of a disconnect only to who listens. `cancel_on_disconnect` listens while an app works on a
request whose body is already read, and cancels the app's task when the client is gone.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class ClientGone(Exception):
    """The client hung up while its body was read."""


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes | None:
    """The whole body, None where it is over `limit` bytes; raises `ClientGone`."""
    declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
    if declared.isdigit() and int(declared) > limit:
        return None
    chunks: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            return None
        chunks.append(chunk)
        more = message.get("more_body", False)
    return b"".join(chunks)


async def cancel_on_disconnect(app: ASGIApp, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
    """Runs `app` on a request whose `body` was read; a disconnect before the answer ends cancels it."""
    task = asyncio.current_task()
    assert task is not None
    over = asyncio.Event()  # the exchange: the client hung up, or has its whole answer
    hung_up = replayed = False

    async def watch() -> None:
        nonlocal hung_up
        while (await receive())["type"] != "http.disconnect":
            pass
        hung_up = True
        over.set()
        task.cancel()

    async def replay() -> Message:
        nonlocal replayed
        if not replayed:
            replayed = True
            return {"type": "http.request", "body": body, "more_body": False}
        # Never the body again: who waits for a disconnect would spin on it.
        await over.wait()
        return {"type": "http.disconnect"}

    async def watched_send(message: Message) -> None:
        await send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            # Servers report a finished response as a disconnect too; that one must cancel nothing.
            watcher.cancel()
            over.set()

    watcher = asyncio.ensure_future(watch())
    try:
        await app(scope, replay, watched_send)
    except asyncio.CancelledError:
        if not hung_up or task.uncancel() > 0:
            raise
    finally:
        watcher.cancel()
