"""The parts of a server put together, without sockets and without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mcp_discovery.certificates import Pki
from mcp_discovery.config import load
from mcp_discovery.discovery.live import Sources
from mcp_discovery.gate import Gate
from mcp_discovery.service import Service


def service(pki: Pki, discovery: Any) -> Service:
    config = load(environment={}, flags={"tls": {"cert": pki.server, "key": pki.server_key, "ca": pki.ca}})
    none: Any = None  # what a warm-up does not look at
    return Service(config, none, Sources(()), Gate("loading", 16), discovery, none)


@pytest.mark.parametrize(
    ("done", "total", "is_warm", "shown"),
    [(3, 3, True, "done, 3 tools"), (2, 3, False, "stopped at 2 of 3 tools"), (0, 0, True, "done, 0 tools")],
)
def test_a_warm_up_that_stopped_early_is_not_shown_as_done(
    pki: Pki, done: int, total: int, is_warm: bool, shown: str
) -> None:
    async def warm(progress: Callable[[int, int], None]) -> int:
        if total:
            progress(done, total)
        return done

    made = service(pki, SimpleNamespace(warm=warm))
    asyncio.run(made.warm())
    assert (made.is_warm, made.warm_up) == (is_warm, shown)
