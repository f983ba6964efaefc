"""`serve`: binds the sockets, then has other processes serve behind them, and new ones where those fail."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shlex
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from engine.errors import ConfigError
from mcp_discovery.commands.common import settings, url_host
from mcp_discovery.config import Config
from mcp_discovery.observe import log
from mcp_discovery.observe.status import StatusReport
from mcp_discovery.processes.assignment import Assignment
from mcp_discovery.processes.layout import layout
from mcp_discovery.processes.member import Member
from mcp_discovery.processes.overview import Overview
from mcp_discovery.processes.supervisor import Supervisor
from mcp_discovery.transport.bind import bind_tcp, bind_unix
from mcp_discovery.transport.tls import context_of

EXAMPLE = "read a file from disk"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def run(arguments: argparse.Namespace) -> int:
    log.configure(debug=arguments.debug)
    config = settings(arguments)
    # What can be found wrong at once comes first: certificates, ports, then files, then the model.
    context_of(config.tls)
    with contextlib.ExitStack() as held:
        sockets = _bind(config, held)
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="mcp-discovery-")))
        assignments = layout(config, sockets, folder / "engine", debug=arguments.debug)
        return asyncio.run(_supervise(assignments, sockets))


async def _supervise(assignments: list[Assignment], sockets: Mapping[str, socket.socket]) -> int:
    """Runs the children, and beside them the admin's pages."""
    ready: asyncio.Queue[Member] = asyncio.Queue()
    supervisor = Supervisor(assignments, on_ready=ready.put_nowait)
    overview = Overview(supervisor)
    beside = [asyncio.create_task(_announce(assignments[0].config, sockets, overview, ready))]
    if "admin" in sockets:
        beside.append(asyncio.create_task(_show(overview, sockets["admin"])))
    try:
        return await supervisor.run()
    finally:
        for task in beside:
            task.cancel()
        await asyncio.wait(beside)


async def _show(overview: Overview, bound: socket.socket) -> None:
    """The admin's pages, here because they shall be seen when a child cannot show them."""
    # Late, so that the children start first: these imports take a while.
    from mcp_discovery.observe.admin import create_admin_app
    from mcp_discovery.transport.serve import Listener, Listeners

    # Its own names on the loopback, where a web page could reach it through another; elsewhere any.
    host = bound.getsockname()[0]
    hosts = ("localhost", "127.0.0.1", "[::1]") if host in LOOPBACK else ("*",)
    running = Listeners([Listener("admin", create_admin_app(overview.report, hosts), bound)])
    await running.start()
    try:
        await asyncio.Event().wait()
    finally:
        await running.stop(0.0)


async def _announce(
    config: Config, sockets: Mapping[str, socket.socket], overview: Overview, ready: asyncio.Queue[Member]
) -> None:
    """Says that the server is ready, once for each engine: whoever becomes ready last brings it about."""
    announced: int | None = None
    while True:
        await ready.get()
        report = await overview.report()
        engine = report.processes[0].pid
        if not report.not_ready and engine != announced:
            print(ready_lines(config, sockets, report), flush=True)
            announced = engine


def ready_lines(config: Config, sockets: Mapping[str, socket.socket], report: StatusReport) -> str:
    """The ready line, the authority's file and one command to try."""
    url = f"https://{_address(sockets['tls'])}/mcp"
    tools, servers = report.catalogue.tools, len(report.catalogue.servers)
    pages = f"{report.engine.pages.total:,} pages of {config.engine.page_tokens} tokens"
    lines = [f"ready: {url}  ({tools:,} tools of {servers:,} servers, {report.model}, {pages})"]
    trust = ""
    if config.tls.ca.is_file():
        lines.append(f"CA:    {config.tls.ca}")
        trust = f" --ca {shlex.quote(str(config.tls.ca))}"
    if config.server.uds is not None:
        lines.append(f"local: {config.server.uds}")
    if "admin" in sockets:
        lines.append(f"admin: http://{_address(sockets['admin'])}/status")
    lines.append(f"try:   {_this_program()} call --url {url}{trust} '{EXAMPLE}'")
    return "\n".join(lines)


def _address(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"{url_host(host)}:{port}"


def _bind(config: Config, held: contextlib.ExitStack) -> dict[str, socket.socket]:
    """The sockets of the server, of local callers and of the admin, by name; `held` lets go of them."""
    table = config.server
    main = bind_tcp(table.host, table.port, key="--port", backlog=table.backlog)
    sockets = {"tls": held.enter_context(main)}
    if table.uds is not None:
        sockets["local"] = held.enter_context(bind_unix(table.uds, table.backlog))
        held.callback(table.uds.unlink, missing_ok=True)
    address = _admin_address(table.admin)
    if address is not None:
        sockets["admin"] = held.enter_context(bind_tcp(*address, key="--admin"))
    return sockets


def _admin_address(text: str) -> tuple[str, int] | None:
    """HOST:PORT, None where it is empty; raises `ConfigError`."""
    if not text:
        return None
    host, separator, port = text.rpartition(":")
    if not separator or not port.isdecimal() or int(port) > 65_535:
        raise ConfigError(f"server.admin must be HOST:PORT such as 127.0.0.1:9464, it is {text!r}")
    return host.strip("[]") or "127.0.0.1", int(port)


def _this_program() -> str:
    """How this program was called, to call it again."""
    if Path(sys.argv[0]).suffix == ".py":
        return f"{shlex.quote(sys.executable)} -m mcp_discovery"
    return shlex.quote(sys.argv[0])
