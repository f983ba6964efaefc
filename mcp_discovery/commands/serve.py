"""`serve`: sockets, then the engine behind them; drains on the first signal, exits at once on the second."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import shlex
import signal
import socket
import ssl
import sys
from pathlib import Path

import uvloop
from starlette.types import ASGIApp

from engine.errors import ConfigError
from mcp_discovery.commands.common import Progress, settings, url_host
from mcp_discovery.config import Config
from mcp_discovery.observe import log
from mcp_discovery.service import Service
from mcp_discovery.transport.limits import ConnectionLimits
from mcp_discovery.transport.serve import (
    Listener,
    Listeners,
    bind_tcp,
    bind_unix,
    raise_file_limit,
)
from mcp_discovery.transport.tls import server_context
from mcp_discovery.tuning import tune_interpreter

logger = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "localhost", "::1")
SIGNALLED = 128  # + the signal's number: the exit code of a second signal
LAST_ANSWERS_S = 2.0  # for answers on their way once the engine has drained
EXAMPLE = "read a file from disk"


def run(arguments: argparse.Namespace) -> int:
    log.configure(debug=arguments.debug)
    config = settings(arguments)
    # What can be found wrong at once comes first: certificates, ports, then files, then the model.
    tls = _tls(config)
    with contextlib.ExitStack() as held:
        main, local, admin = _bind(config, held)
        raise_file_limit()
        service = Service.build(config)
        listeners = [_listener(config, "tls", service.app, main, tls)]
        if local is not None:
            listeners.append(_listener(config, "local", service.app, local))
        if admin is not None:
            listeners.append(_listener(config, "admin", service.admin_app(_admin_hosts(config)), admin))
        uvloop.run(_serve(config, service, listeners))
    return 0


def _tls(config: Config) -> ssl.SSLContext:
    table = config.tls
    return server_context(
        table.cert, table.key, ca=table.ca, client_certs=table.client_certs, min_version=table.min_version
    )


def _bind(
    config: Config, held: contextlib.ExitStack
) -> tuple[socket.socket, socket.socket | None, socket.socket | None]:
    """The sockets of the server, of local callers and of the admin; `held` lets go of them."""
    table = config.server
    main = held.enter_context(bind_tcp(table.host, table.port, key="--port", backlog=table.backlog))
    local = admin = None
    if table.uds is not None:
        local = held.enter_context(bind_unix(table.uds, table.backlog))
        held.callback(table.uds.unlink, missing_ok=True)
    address = _admin_address(table.admin)
    if address is not None:
        admin = held.enter_context(bind_tcp(*address, key="--admin"))
    return main, local, admin


def _admin_address(text: str) -> tuple[str, int] | None:
    """HOST:PORT, None where it is empty; raises `ConfigError`."""
    if not text:
        return None
    host, separator, port = text.rpartition(":")
    if not separator or not port.isdecimal() or int(port) > 65_535:
        raise ConfigError(f"server.admin must be HOST:PORT such as 127.0.0.1:9464, it is {text!r}")
    return host.strip("[]") or "127.0.0.1", int(port)


def _admin_hosts(config: Config) -> tuple[str, ...]:
    """Its own names on the loopback, where a web page could reach it through another; elsewhere any."""
    address = _admin_address(config.server.admin)
    return ("localhost", "127.0.0.1", "[::1]") if address and address[0] in LOOPBACK else ("*",)


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


async def _serve(config: Config, service: Service, listeners: list[Listener]) -> None:
    """Serves until a signal; raises what kept the engine from starting."""
    stop = _stop_on_signals()
    running = Listeners(listeners)
    async with service.running():
        await running.start()
        working = asyncio.create_task(_work(config, service, listeners))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
            await stopping
        finally:
            working.cancel()
            stopping.cancel()
            await service.drain()
            await running.stop(LAST_ANSWERS_S)
    logger.info("stopped: %s", service.accounting.counts().as_json())


async def _work(config: Config, service: Service, listeners: list[Listener]) -> None:
    """From a cold start to a warm server. It is ready before it is warm: a cold call only takes longer."""
    await service.start()
    tune_interpreter()
    _announce(config, service, listeners)
    try:
        await service.warm(Progress("warming up", "tools"))
    except Exception:  # calls are answered from a cold catalogue too, only later
        logger.exception("the warm-up stopped early")


def _stop_on_signals() -> asyncio.Event:
    """An event that the first SIGTERM or SIGINT sets; the second ends the process at once."""
    stop = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            logger.warning("%s again: exiting at once", number.name)
            os._exit(SIGNALLED + number)
        logger.info("%s: draining; a second signal exits at once", number.name)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stop


def _announce(config: Config, service: Service, listeners: list[Listener]) -> None:
    """The ready line, the authority's file and one command to try."""
    report = service.report()
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
    print(f"try:   {_this_program()} call --url {url}{trust} '{EXAMPLE}'")
    sys.stdout.flush()


def _this_program() -> str:
    """How this program was called, to call it again."""
    if Path(sys.argv[0]).suffix == ".py":
        return f"{shlex.quote(sys.executable)} -m mcp_discovery"
    return shlex.quote(sys.argv[0])
