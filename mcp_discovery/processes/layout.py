"""Which processes a server has, and what each of them does."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from mcp_discovery.config import Config
from mcp_discovery.processes.assignment import Assignment


def layout(
    config: Config, sockets: Mapping[str, socket.socket], engine_socket: Path, *, debug: bool = False
) -> list[Assignment]:
    """One process for everything, or from two front-ends on one for the engine and one for each of them.

    `sockets` are bound, by listener; the admin's stays with the parent.
    """
    if config.server.frontends > 1:
        return apart(config, sockets, engine_socket, debug=debug)
    return [
        Assignment(
            role="server",
            name="the serving process",
            config=config,
            parent=os.getpid(),
            sockets=_numbers(sockets),
            debug=debug,
        )
    ]


def apart(
    config: Config, sockets: Mapping[str, socket.socket], engine_socket: Path, *, debug: bool = False
) -> list[Assignment]:
    """A process for the engine and `server.frontends` others. The first of them warms the engine."""
    engine = Assignment(
        role="engine",
        name="the engine process",
        config=config,
        parent=os.getpid(),
        engine_socket=engine_socket,
        debug=debug,
    )
    numbers = _numbers(sockets)
    return [
        engine,
        *(
            engine.model_copy(
                update={
                    "role": "frontend",
                    "name": f"front-end {number}",
                    "sockets": numbers,
                    "warms": number == 1,
                }
            )
            for number in range(1, config.server.frontends + 1)
        ),
    ]


def _numbers(sockets: Mapping[str, socket.socket]) -> dict[str, int]:
    return {name: bound.fileno() for name, bound in sockets.items() if name != "admin"}
