"""`serve`: binds the sockets, then has another process serve behind them, and a new one where that fails."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shlex
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from engine.errors import ConfigError
from mcp_discovery.commands.common import settings
from mcp_discovery.config import Config
from mcp_discovery.observe import log
from mcp_discovery.processes.assignment import Assignment
from mcp_discovery.processes.restarts import Restarts
from mcp_discovery.processes.supervisor import Member, Supervisor
from mcp_discovery.transport.bind import bind_tcp, bind_unix
from mcp_discovery.transport.tls import context_of


def run(arguments: argparse.Namespace) -> int:
    log.configure(debug=arguments.debug)
    config = settings(arguments)
    # What can be found wrong at once comes first: certificates, ports, then files, then the model.
    context_of(config.tls)
    with contextlib.ExitStack() as held:
        sockets = _bind(config, held)
        return asyncio.run(_supervise(config, sockets, debug=arguments.debug))


async def _supervise(config: Config, sockets: Mapping[str, socket.socket], *, debug: bool) -> int:
    restarts = Restarts(config.recovery)
    numbers = {name: bound.fileno() for name, bound in sockets.items()}

    def assignment() -> Assignment:
        return Assignment(
            role="server",
            config=config,
            program=_this_program(),
            parent=os.getpid(),
            sockets=numbers,
            restarts=restarts.total,
            last_failure=restarts.last_failure,
            debug=debug,
        )

    server = Member("the serving process", restarts, assignment, list(numbers.values()))
    return await Supervisor([server]).run()


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
