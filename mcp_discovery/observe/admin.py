"""The admin listener's app: `/metrics`, `/status`, `/status.json`, `/accounting`. Reads, never changes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from mcp_discovery.observe.metrics import exposition
from mcp_discovery.observe.status import StatusReport, page

NO_STORE = {"cache-control": "no-store"}


def create_admin_app(
    report: Callable[[], Awaitable[StatusReport]], hosts: Sequence[str] = ("*",)
) -> Starlette:
    """The ASGI app. `hosts` are the Host headers accepted: a listener on the loopback accepts its own names
    alone, so that no web page reaches it through a name of its own."""

    async def show_metrics(request: Request) -> Response:
        return Response(exposition(await report()), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def show_page(request: Request) -> Response:
        return HTMLResponse(page(await report()), headers=NO_STORE)

    async def show_status(request: Request) -> Response:
        return JSONResponse((await report()).as_json(), headers=NO_STORE)

    async def show_accounting(request: Request) -> Response:
        now = await report()
        return JSONResponse({**now.counts.as_json(), "pages": asdict(now.engine.pages)}, headers=NO_STORE)

    async def root(request: Request) -> Response:
        return RedirectResponse("/status")

    return Starlette(
        routes=[
            Route("/", root),
            Route("/metrics", show_metrics),
            Route("/status", show_page),
            Route("/status.json", show_status),
            Route("/accounting", show_accounting),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)],
    )
