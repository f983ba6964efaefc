"""The serving process: TLS, MCP, discovery and the engine in one, behind sockets that its parent has bound.

It drains on the first signal. Where the device fails it answers what it owes and exits: what a card
does after a fault is not to be trusted, and only the process's end returns its memory for certain.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
import socket
import ssl
import sys
from collections.abc import Sequence

import uvloop
from starlette.types import ASGIApp

from mcp_discovery.commands.common import Progress, url_host
from mcp_discovery.config import Config
from mcp_discovery.exits import ENGINE_FAILED, OK
from mcp_discovery.processes.assignment import Assignment
from mcp_discovery.processes.child import Parent, stop_on_signals
from mcp_discovery.service import Service
from mcp_discovery.transport.limits import ConnectionLimits
from mcp_discovery.transport.serve import Listener, Listeners, raise_file_limit
from mcp_discovery.transport.tls import context_of
from mcp_discovery.tuning import tune_interpreter

logger = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "localhost", "::1")
LAST_ANSWERS_S = 2.0  # for answers on their way once the engine has drained or failed
EXAMPLE = "read a file from disk"


def run(assignment: Assignment, parent: Parent) -> int:
    """Serves until a signal or a fault; returns the exit code."""
    raise_file_limit()
    service = Service.build(assignment.config, assignment.restarts, assignment.last_failure)
    listeners = list(_listeners(assignment, service))
    return uvloop.run(_serve(assignment, parent, service, listeners))


def _listeners(assignment: Assignment, service: Service) -> Sequence[Listener]:
    config = assignment.config
    made = []
    for name, number in assignment.sockets.items():
        bound = socket.socket(fileno=number)
        bound.setblocking(False)
        if name == "admin":
            made.append(_listener(config, name, service.admin_app(_admin_hosts(bound)), bound))
        else:
            tls = context_of(config.tls) if name == "tls" else None
            made.append(_listener(config, name, service.app, bound, tls))
    return made


def _admin_hosts(bound: socket.socket) -> tuple[str, ...]:
    """Its own names on the loopback, where a web page could reach it through another; elsewhere any."""
    return ("localhost", "127.0.0.1", "[::1]") if bound.getsockname()[0] in LOOPBACK else ("*",)


def _listener(
    config: Config, name: str, app: ASGIApp, bound: socket.socket, tls: ssl.SSLContext | None = None
) -> Listener:
    table = config.server
    return Listener(
        name,
        app,
        bound,
        tls,
        limits=ConnectionLimits(table.header_timeout_s, table.body_timeout_s, table.max_header_bytes),
        handshake_timeout_s=table.handshake_timeout_s,
        keep_alive_s=table.keep_alive_s,
        backlog=table.backlog,
    )


async def _serve(assignment: Assignment, parent: Parent, service: Service, listeners: list[Listener]) -> int:
    """Raises what kept the engine from starting."""
    stop = stop_on_signals()
    parent.watch(asyncio.get_running_loop())
    running = Listeners(listeners)
    async with service.running():
        await running.start()
        working = asyncio.create_task(_work(assignment, parent, service, listeners))
        stopping = asyncio.create_task(stop.wait())
        failing = asyncio.create_task(service.fault.wait())
        try:
            await asyncio.wait((working, stopping, failing), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
            await asyncio.wait((stopping, failing), return_when=asyncio.FIRST_COMPLETED)
            if failing.done():
                parent.tell_failed(service.not_ready())
        finally:
            for task in (working, stopping, failing):
                task.cancel()
            await service.drain()
            await running.stop(LAST_ANSWERS_S)
    logger.info("stopped: %s", service.accounting.counts().as_json())
    return ENGINE_FAILED if service.fault.is_set() else OK


async def _work(assignment: Assignment, parent: Parent, service: Service, listeners: list[Listener]) -> None:
    """From a cold start to a warm server. It is ready before it is warm: a cold call only takes longer."""
    await service.start()
    tune_interpreter()
    parent.tell_ready()
    _announce(assignment, service, listeners)
    try:
        await service.warm(Progress("warming up", "tools"))
    except Exception:  # calls are answered from a cold catalogue too, only later
        logger.exception("the warm-up stopped early")


def _announce(assignment: Assignment, service: Service, listeners: list[Listener]) -> None:
    """The ready line, the authority's file and one command to try."""
    config, report = assignment.config, service.report()
    host, port = listeners[0].address
    url = f"https://{url_host(host)}:{port}/mcp"
    tools, servers = report.catalogue.tools, len(report.catalogue.servers)
    pages = f"{report.engine.pages.total:,} pages of {config.engine.page_tokens} tokens"
    print(f"ready: {url}  ({tools:,} tools of {servers:,} servers, {report.model}, {pages})")
    trust = ""
    if config.tls.ca.is_file():
        print(f"CA:    {config.tls.ca}")
        trust = f" --ca {shlex.quote(str(config.tls.ca))}"
    if config.server.uds is not None:
        print(f"local: {config.server.uds}")
    if listeners[-1].name == "admin":
        admin_host, admin_port = listeners[-1].address
        print(f"admin: http://{url_host(admin_host)}:{admin_port}/status")
    print(f"try:   {assignment.program} call --url {url}{trust} '{EXAMPLE}'")
    sys.stdout.flush()
