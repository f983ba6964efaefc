"""MCP over HTTP as one ASGI app: `/mcp`, `/healthz`, `/readyz`.

`/mcp` is Streamable HTTP without sessions, in every protocol revision of the SDK. A call is answered
as plain JSON; only where the caller asked for progress is it a stream. In both, a client that hangs
up cancels its call.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Protocol

import mcp_types as types
from mcp import MCPError
from mcp.server.caching import CacheHint
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from mcp_discovery import __version__
from mcp_discovery.observe.accounting import Accounting
from mcp_discovery.transport.direct import DirectCalls, Frame, Parsed, send_error, send_result
from mcp_discovery.transport.disconnect import ClientGone, cancel_on_disconnect, read_body
from mcp_discovery.transport.identity import Caller, caller_of

logger = logging.getLogger(__name__)

Context = ServerRequestContext[Any, Request]
MCP_PATH = "/mcp"
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
TOOL_LIST_TTL_MS = 60_000


class CallableTool(Protocol):
    """The tool as the transport sees it."""

    def definition(self, caller: Caller) -> types.Tool: ...

    async def call(
        self, arguments: dict[str, Any] | None, caller: Caller, begin: Callable[[], None]
    ) -> types.CallToolResult:
        """Calls `begin` once the arguments are known to be good, before the first await; of a call that is
        invalid never."""
        ...


def create_app(
    tool: CallableTool,
    *,
    accounting: Accounting | None = None,
    not_ready: Callable[[], str] = lambda: "",
    allowed_hosts: tuple[str, ...] = (),
    allowed_origins: tuple[str, ...] = (),
    max_body_bytes: int = 256 << 10,
    direct: bool = True,
) -> Starlette:
    """The ASGI app that serves `tool`.

    `not_ready` says why the server is not ready, "" when it is (`/readyz`). Hosts and origins are
    accepted besides those of this machine; `name:*` accepts any port. `direct` False leaves every call
    to the SDK.
    """
    calls = ToolCalls(tool, accounting or Accounting())
    server = _mcp_server(tool, calls)
    security = TransportSecuritySettings(
        allowed_hosts=[*allowed_hosts, *LOCAL_HOSTS, *(f"{host}:*" for host in LOCAL_HOSTS)],
        allowed_origins=[
            *allowed_origins,
            *(
                f"{scheme}://{host}{port}"
                for scheme in ("https", "http")
                for host in LOCAL_HOSTS
                for port in ("", ":*")
            ),
        ],
    )
    endpoint = McpEndpoint(server, security, max_body_bytes, calls if direct else None)

    async def healthz(request: Request) -> Response:
        return JSONResponse({"status": "up"})

    async def readyz(request: Request) -> Response:
        reason = not_ready()
        if reason:
            return JSONResponse({"status": "not ready", "reason": reason}, status_code=503)
        return JSONResponse({"status": "ready"})

    app = _App(
        endpoint,
        routes=[
            Route(MCP_PATH, endpoint),
            Route("/healthz", healthz),
            Route("/readyz", readyz),
        ],
        lifespan=lambda app: endpoint.run(),
    )
    # A redirect of `/mcp/` would name whatever host the request names, unchecked.
    app.router.redirect_slashes = False
    return app


class _App(Starlette):
    """A Starlette app whose `/mcp` is asked without its middleware and routing, which add nothing to it."""

    def __init__(self, endpoint: McpEndpoint, **options: Any) -> None:
        super().__init__(**options)
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == MCP_PATH and not scope.get("root_path"):
            await self._endpoint(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


class ToolCalls:
    """Calls of the tool, each accounted for."""

    def __init__(self, tool: CallableTool, accounting: Accounting) -> None:
        self._tool = tool
        self._accounting = accounting

    async def __call__(self, arguments: dict[str, Any] | None, caller: Caller) -> types.CallToolResult:
        """Raises MCPError, which says nothing of our inside, for a fault."""
        try:
            with self._accounting.call() as call:
                result = await self._tool.call(arguments, caller, call.begin)
                call.end(*outcome_of(result))
        except Exception as error:
            # The SDK would show the exception's text to a client of the older revisions.
            logger.exception("a call failed")
            raise MCPError(types.INTERNAL_ERROR, "Internal error") from error
        return result


def _mcp_server(tool: CallableTool, calls: ToolCalls) -> Server[Any]:
    """The SDK's low-level server with one tool on it."""

    async def list_tools(
        context: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[tool.definition(_caller(context))])

    async def call_tool(context: Context, params: types.CallToolRequestParams) -> types.CallToolResult:
        caller = _caller(context)
        if params.name != tool.definition(caller).name:
            raise MCPError(types.INVALID_PARAMS, f"Unknown tool: {params.name}")
        await context.session.report_progress(0, 1)
        result = await calls(params.arguments, caller)
        await context.session.report_progress(1, 1)
        return result

    server: Server[Any] = Server(
        "mcp-discovery",
        version=__version__,
        instructions="Call discover_tools with the task at hand to get the tools that serve it.",
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        # No argument is mirrored in a header, so no schema is needed to check headers against.
        get_tool_input_schema=lambda name: None,
        cache_hints={"tools/list": CacheHint(ttl_ms=TOOL_LIST_TTL_MS, scope="private")},
    )
    # The SDK's OpenTelemetry spans: a tenth of a call's cost, and the metrics here are our own.
    server.middleware.clear()
    return server


def _caller(context: Context) -> Caller:
    assert context.request is not None  # the HTTP transport always sets it
    return caller_of(context.request.scope)


def outcome_of(result: types.CallToolResult) -> tuple[str, str]:
    """Status and refusal code of a `discover_tools` result."""
    structured = result.structured_content or {}
    refusal = structured.get("refusal") or {}
    return structured.get("status", "failed"), refusal.get("code", "")


class McpEndpoint:
    """The ASGI app behind `/mcp`: method, size, JSON or stream, the SDK or past it, cancellation."""

    def __init__(
        self,
        server: Server[Any],
        security: TransportSecuritySettings,
        max_body_bytes: int,
        calls: ToolCalls | None = None,
    ) -> None:
        """`calls` answers what the SDK need not; None leaves it everything."""

        def manager(json_response: bool) -> StreamableHTTPSessionManager:
            return StreamableHTTPSessionManager(
                server,
                json_response=json_response,
                stateless=True,
                security_settings=security,
                max_request_body_size=max_body_bytes,
            )

        self._json = manager(json_response=True)
        self._stream = manager(json_response=False)
        self._max_body_bytes = max_body_bytes
        self._calls = calls
        self._direct = DirectCalls()

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """The lifespan: requests may come while it is entered."""
        async with self._json.run(), self._stream.run():
            yield

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            # No session, so nothing to stream by GET and nothing to end by DELETE.
            refusal = PlainTextResponse("only POST is served here\n", 405, headers={"allow": "POST"})
            await refusal(scope, receive, send)
            return
        try:
            body = await read_body(scope, receive, self._max_body_bytes)
        except ClientGone:
            return
        if body is None:
            limit = f"the body may have at most {self._max_body_bytes} bytes\n"
            await PlainTextResponse(limit, 413, headers={"connection": "close"})(scope, receive, send)
            return
        if body.lstrip()[:1] == b"[":
            await batch_refused()(scope, receive, send)
            return
        await cancel_on_disconnect(self._app_for(scope, body), scope, body, receive, send)

    def _app_for(self, scope: Scope, body: bytes) -> ASGIApp:
        """What answers this message."""
        if wants_progress(body) and accepts_stream(scope):
            return self._stream.handle_request
        parsed = self._direct.parse(scope, body)
        if parsed is None or self._calls is None:
            return self._json.handle_request
        frame = self._direct.frame(parsed)
        if frame is None:
            return partial(self._learn, parsed)
        return partial(self._answer, self._calls, parsed, frame)

    async def _learn(self, parsed: Parsed, scope: Scope, receive: Receive, send: Send) -> None:
        await self._json.handle_request(scope, receive, self._direct.learning(parsed, send))

    async def _answer(
        self, calls: ToolCalls, parsed: Parsed, frame: Frame, scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            result = await calls(parsed.arguments, caller_of(scope))
        except MCPError as fault:
            await send_error(frame, parsed.id, fault.error, send)
        else:
            await send_result(frame, parsed.id, result, send)


def batch_refused() -> Response:
    """What a JSON-RPC batch gets; the SDK would answer with the report of its validator."""
    message = "Batches are not served: send one JSON-RPC message in each request."
    error = {"code": types.INVALID_REQUEST, "message": message}
    return JSONResponse({"jsonrpc": "2.0", "id": None, "error": error}, status_code=400)


def wants_progress(body: bytes) -> bool:
    """Whether a JSON-RPC body carries `params._meta.progressToken`."""
    if b'"progressToken"' not in body:
        return False
    try:
        message = json.loads(body)
    except (ValueError, RecursionError):
        return False  # the SDK answers it with a parse error
    for key in ("params", "_meta"):
        message = message.get(key) if isinstance(message, Mapping) else None
    return isinstance(message, Mapping) and message.get("progressToken") is not None


def accepts_stream(scope: Scope) -> bool:
    """Whether the Accept header allows `text/event-stream`."""
    accepted = b",".join(value for name, value in scope["headers"] if name == b"accept")
    media_types = {part.partition(b";")[0].strip().lower() for part in accepted.split(b",")}
    return not media_types.isdisjoint((b"text/event-stream", b"text/*", b"*/*"))
