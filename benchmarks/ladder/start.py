"""Everything a load needs, started in order: neighbour, memory trace, server, drivers."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.ladder import host
from benchmarks.ladder.beside import Neighbour
from benchmarks.ladder.driver import Drivers, Settings
from benchmarks.ladder.rung import Site
from benchmarks.ladder.wire import Endpoint
from benchmarks.memory_trace import CardProbe, Probe, ProcessProbe, Trace
from benchmarks.serving import Server, serving


@dataclass(frozen=True, slots=True)
class Stage:
    """A site, and what is known of how it came to be."""

    site: Site
    settings: Settings
    facts: dict[str, Any]


@contextmanager
def stage(given: argparse.Namespace) -> Iterator[Stage]:
    """The site that the command line asks for; all that was started ends with it."""
    with ExitStack() as held:
        if given.start:
            yield _started(given, held)
        else:
            yield _running(given, held)


def _running(given: argparse.Namespace, held: ExitStack) -> Stage:
    endpoint = Endpoint.of(given.url, given.ca)
    settings = Settings(endpoint, given.queries, given.references, given.timeout_ms)
    drivers = held.enter_context(Drivers(settings, given.drivers))
    pid = given.server_pid
    probe = None if pid is None else ProcessProbe(lambda: host.resident_bytes(host.tree(pid)))
    trace = None if probe is None else held.enter_context(Trace(probe))
    return Stage(Site(drivers, given.admin, pid, trace), settings, {"server": given.url})


def _started(given: argparse.Namespace, held: ExitStack) -> Stage:
    on_card = given.device == "cuda" or (given.device == "auto" and _has_card())
    facts: dict[str, Any] = {"device": "cuda" if on_card else "cpu", "settings": given.set}
    neighbour = None
    if given.neighbour:
        leave = given.allowance_mib + given.margin_mib
        flags = ["--leave-mib", str(leave), "--duty", str(given.duty)]
        neighbour = held.enter_context(Neighbour(flags))
        facts["neighbour"] = neighbour.started
        print(f"neighbour: {neighbour.started}", flush=True)
    settings = dict(item.split("=", 1) for item in given.set)
    folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
    pids: list[int] = []
    probe: Probe = CardProbe() if on_card else ProcessProbe(lambda: _resident(pids))
    trace = held.enter_context(Trace(probe))
    trace.mark("start")
    server = held.enter_context(serving(folder, {"ENGINE__DEVICE": facts["device"], **settings}))
    pids.append(server.pid)
    facts |= {"server": server.announced, "ready_s": round(server.ready_s, 2)}
    facts["warm_after_ready_s"] = round(server.await_warm(), 1)
    print(f"server: ready in {server.ready_s:.1f} s {server.announced}", flush=True)
    driven = Settings(_endpoint(server), given.queries, given.references, given.timeout_ms)
    drivers = held.enter_context(Drivers(driven, given.drivers))
    return Stage(Site(drivers, server.admin, server.pid, trace, neighbour), driven, facts)


def _resident(pids: list[int]) -> int:
    return host.resident_bytes(host.tree(pids[0])) if pids else 0


def _endpoint(server: Server) -> Endpoint:
    return Endpoint(server.host, server.port, "/mcp", server.ca)


def _has_card() -> bool:
    from engine.cuda.nvml import read_card
    from engine.errors import EngineError

    try:
        read_card()
    except EngineError:
        return False
    return True
