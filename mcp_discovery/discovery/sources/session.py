"""One session with one live MCP server: its tools as it sends them, and word of their change.

The official client does the protocol. It would also validate every definition of a list and fail the
whole list for one of them, so the tools are taken out of each answer before the client reads it: each
is judged alone afterwards, and reaches the catalogue with every field that the server gave.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import cache
from typing import Any

import anyio
import httpx2
import mcp_types as types
from mcp.client import Client
from mcp.client.session import IncomingMessage
from mcp.client.stdio import StdioServerParameters, get_default_environment, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.client.subscriptions import ListenNotSupportedError, SubscriptionLost
from mcp.shared.exceptions import MCPError
from mcp.shared.message import SessionMessage

from mcp_discovery import __version__
from mcp_discovery.discovery.sources.child import Stderr, command_of, stderr_pipe
from mcp_discovery.discovery.sources.specs import Http, Spec, Stdio

MAX_PAGES = 1000
MAX_TOOLS = 20_000  # of one server
HTTP_TIMEOUT_S = 30.0
STREAM_TIMEOUT_S = 300.0  # of silence on a stream of events
LISTEN_TIMEOUT_S = 10.0  # for a server's word that it will tell of changes
CLIENT_LOGGERS = (
    "mcp.client.client",
    "mcp.client.session",
    "mcp.client.stdio",
    "mcp.client.streamable_http",
    "mcp.os.posix.utilities",
    "mcp.shared.jsonrpc_dispatcher",
    "httpx2",
    "httpcore2",
)

Transport = AbstractAsyncContextManager[tuple[Any, Any]]


class SessionFailed(Exception):
    """A server cannot be reached or does not give its tools; the message is one sentence without its full
    stop and without secrets."""


@contextlib.contextmanager
def quiet_client() -> Iterator[None]:
    """Keeps the client's own loggers silent: they write whole messages, URLs and headers, and a server
    that fails is told of by us."""
    loggers = [logging.getLogger(name) for name in CLIENT_LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


class Session:
    """An open session with a server."""

    def __init__(self, client: Client, answers: _Answers, news: asyncio.Event) -> None:
        self._client = client
        self._answers = answers
        self._news = news
        tools = client.server_capabilities.tools
        self.tells_of_changes = bool(tools is not None and tools.list_changed)

    @property
    def has_ended(self) -> bool:
        return self._answers.have_ended

    async def tools(self, timeout_s: float) -> list[Any]:
        """The definitions of all pages, in order. What changes from now on is news."""
        self._news.clear()
        found: list[Any] = []
        cursor: str | None = None
        seen: set[str] = set()
        with anyio.fail_after(timeout_s):
            for _ in range(MAX_PAGES):
                page = await self._client.list_tools(cursor=cursor)
                found += self._answers.take()
                cursor = page.next_cursor
                if cursor is None:
                    return found
                if cursor in seen:
                    raise SessionFailed("its list of tools leads back to a page already read")
                seen.add(cursor)
                if len(found) > MAX_TOOLS:
                    raise SessionFailed(f"it lists more than {MAX_TOOLS:,} tools")
        raise SessionFailed(f"its list of tools does not end within {MAX_PAGES:,} pages")

    async def wait(self, timeout_s: float) -> None:
        """Returns on news: the tools may have changed or the session has ended; else after `timeout_s`."""
        with anyio.move_on_after(timeout_s):
            await self._news.wait()

    async def listen(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Turns a 2026 server's events into news for as long as it sends them; older ones send unasked."""
        try:
            async with contextlib.AsyncExitStack() as stack:
                with anyio.fail_after(LISTEN_TIMEOUT_S):
                    events = await stack.enter_async_context(self._client.listen(tools_list_changed=True))
                self.tells_of_changes = bool(events.honored.tools_list_changed)
                task_status.started()
                async for _ in events:
                    self._news.set()
            raise SubscriptionLost("the server has closed its stream of events")
        except ListenNotSupportedError:
            task_status.started()
        except (MCPError, TimeoutError):
            self.tells_of_changes = False
            task_status.started()
        except SubscriptionLost:
            # What was missed is found by asking; who asks opens a new session where this one is dead.
            self.tells_of_changes = False
            with contextlib.suppress(RuntimeError):  # it may have started before
                task_status.started()
            self._news.set()


class _Answers:
    """The stream of a server's messages, less the tools of its lists, which `take` gives as they came."""

    def __init__(self, stream: Any, news: asyncio.Event) -> None:
        self._stream = stream
        self._news = news
        self._tools: list[Any] = []
        self.have_ended = False

    def take(self) -> list[Any]:
        """The tools of the answer read last. Lists are asked for one at a time."""
        tools, self._tools = self._tools, []
        return tools

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __aiter__(self) -> _Answers:
        return self

    async def __anext__(self) -> Any:
        try:
            return self._stripped(await self._stream.__anext__())
        except StopAsyncIteration:
            self._end()
            raise

    async def receive(self) -> Any:
        try:
            return self._stripped(await self._stream.receive())
        except (anyio.EndOfStream, anyio.ClosedResourceError):
            self._end()
            raise

    async def __aenter__(self) -> _Answers:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *exc_info: Any) -> Any:
        return await self._stream.__aexit__(*exc_info)

    def _end(self) -> None:
        self.have_ended = True
        self._news.set()

    def _stripped(self, item: Any) -> Any:
        if isinstance(item, SessionMessage) and isinstance(item.message, types.JSONRPCResponse):
            result = item.message.result
            if isinstance(result.get("tools"), list):
                self._tools = result["tools"]
                result["tools"] = []
        return item


@asynccontextmanager
async def _stripping(transport: Transport, news: asyncio.Event, held: list[_Answers]) -> AsyncIterator[Any]:
    """`transport` with its reading side as `_Answers`, which is put into `held`."""
    async with transport as (read, write):
        held.append(_Answers(read, news))
        yield held[0], write


@asynccontextmanager
async def open_session(spec: Spec, timeout_s: float) -> AsyncIterator[Session]:
    """A session with `spec`'s server, once it has answered. Raises SessionFailed for whatever goes wrong,
    inside the block too."""
    trouble = _Trouble(spec)
    try:
        async with _connected(trouble, spec, timeout_s) as session, anyio.create_task_group() as group:
            await group.start(_listen, session)
            yield session
            group.cancel_scope.cancel()
    except Exception as error:  # noqa: BLE001 - whatever a foreign server causes, the others go on
        raise SessionFailed(spec.redact(trouble.sentence(error))) from None


async def _listen(session: Session, *, task_status: anyio.abc.TaskStatus[None]) -> None:
    await session.listen(task_status=task_status)


@asynccontextmanager
async def _connected(trouble: _Trouble, spec: Spec, timeout_s: float) -> AsyncIterator[Session]:
    news = asyncio.Event()

    async def on_message(message: IncomingMessage) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            news.set()

    held: list[_Answers] = []
    client = Client(
        _stripping(_transport(spec, trouble), news, held),
        read_timeout_seconds=timeout_s,
        message_handler=on_message,
        client_info=types.Implementation(name="mcp-discovery", version=__version__),
        cache=None,
    )
    with anyio.fail_after(timeout_s) as scope:
        async with client:
            scope.deadline = math.inf
            yield Session(client, held[0], news)


def _transport(spec: Spec, trouble: _Trouble) -> Transport:
    if isinstance(spec.endpoint, Http):
        return _http(spec.endpoint, trouble)
    return _stdio(spec.endpoint, trouble)


@asynccontextmanager
async def _stdio(endpoint: Stdio, trouble: _Trouble) -> AsyncIterator[tuple[Any, Any]]:
    path = endpoint.env.get("PATH", get_default_environment().get("PATH"))
    command, args = command_of(endpoint.command, endpoint.args, path)
    server = StdioServerParameters(command=command, args=args, env=dict(endpoint.env), cwd=endpoint.cwd)
    async with contextlib.AsyncExitStack() as stack:
        with stderr_pipe() as (reading, errlog):
            pipe = open(reading, "rb", buffering=0)  # noqa: SIM115 - closed by the event loop's transport
            watched, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: trouble.stderr, pipe)
            stack.callback(watched.close)
            # A start that is cancelled halfway would leave a process that nobody waits for.
            starting = stack.enter_context(anyio.CancelScope(shield=True))
            streams = await stack.enter_async_context(stdio_client(server, errlog=errlog))
            starting.shield = False
        yield streams


@cache
def _trusted() -> ssl.SSLContext:
    """The system's authorities. Reading them takes 50 ms, which hundreds of servers shall not pay each."""
    return httpx2.create_ssl_context()


@asynccontextmanager
async def _http(endpoint: Http, trouble: _Trouble) -> AsyncIterator[tuple[Any, Any]]:
    async with (
        httpx2.AsyncClient(
            headers=endpoint.headers,
            verify=_trusted(),
            timeout=httpx2.Timeout(HTTP_TIMEOUT_S, read=STREAM_TIMEOUT_S),
            event_hooks={"response": [trouble.on_response]},
        ) as client,
        streamable_http_client(endpoint.url, http_client=client) as streams,
    ):
        yield streams


class _Trouble:
    """What is known beside an exception when a session fails."""

    def __init__(self, spec: Spec) -> None:
        self.stderr = Stderr(spec.name, spec.redact)
        self._status = 0

    async def on_response(self, response: httpx2.Response) -> None:
        self._status = response.status_code

    def sentence(self, error: Exception) -> str:
        """`error` as a sentence that may still hold secrets."""
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        match error:
            case SessionFailed():
                return str(error)
            case TimeoutError():
                return "it did not answer in time"
            case FileNotFoundError() if error.errno is None:
                return str(error)
            case OSError():
                return f"it cannot be started: {error.strerror or error}"
            case httpx2.TransportError():
                return f"it cannot be reached ({str(error) or type(error).__name__:.100})"
            case MCPError(error=types.ErrorData(code=types.CONNECTION_CLOSED)):
                last = self.stderr.last
                return "it ended" + (f"; its last words were: {last}" if last else " and said nothing")
            case MCPError() if self._status >= 400:
                return f"it answered with HTTP status {self._status}"
        first = (str(error).splitlines() or [""])[0]
        return f"{type(error).__name__}: {first:.200}" if first else type(error).__name__
