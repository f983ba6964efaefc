"""A front-end: TLS, HTTP, MCP, arguments, names, candidates, results; the engine is in another process.

Its connections outlive the engine: while there is none, calls are refused in a word, and when the next
one serves they are answered again.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import uvloop

from engine.wire import Patience, WireClient
from mcp_discovery.commands.common import Progress
from mcp_discovery.exits import OK
from mcp_discovery.processes.assignment import Assignment
from mcp_discovery.processes.child import Parent, ledger_of, stop_on_signals
from mcp_discovery.processes.listening import listeners_of
from mcp_discovery.processes.overview import child_report
from mcp_discovery.service import Service
from mcp_discovery.transport.serve import Listener, Listeners, raise_file_limit
from mcp_discovery.tuning import tune_interpreter

logger = logging.getLogger(__name__)

LAST_ANSWERS_S = 2.0
ENGINE_GONE = "the engine has ended and is started again"
PATIENCE = Patience(last_retry_s=0.25)  # a try costs little, and callers wait for the next engine


def run(assignment: Assignment, parent: Parent) -> int:
    """Serves until a signal; returns the exit code."""
    raise_file_limit()
    assert assignment.engine_socket is not None
    service = Service.build(
        assignment.config,
        ledger_of(assignment),
        warms=assignment.warms,
        has_engine=False,
        handover=assignment.engine_socket.parent / "catalogue",
    )
    listeners = listeners_of(assignment.config, service.app, assignment.sockets)
    return uvloop.run(_serve(assignment, parent, service, listeners))


async def _serve(assignment: Assignment, parent: Parent, service: Service, listeners: list[Listener]) -> int:
    assert assignment.engine_socket is not None
    stop, running = stop_on_signals(), Listeners(listeners)
    frontend = Frontend(service, parent, assignment.engine_socket, assignment.name)
    async with frontend.client, service.running():
        parent.listen(lambda: child_report(service.report(), None))
        await running.start()
        tune_interpreter()
        preparing = asyncio.create_task(frontend.prepare())
        try:
            await stop.wait()
        finally:
            preparing.cancel()
            await service.gate.drain(service.config.overload.drain_s)
            await running.stop(LAST_ANSWERS_S)
    logger.info("%s stopped: %s", assignment.name, service.accounting.counts().as_json())
    return OK


class Frontend:
    """What a front-end does beside its calls: it prepares its tools for each engine that comes."""

    def __init__(self, service: Service, parent: Parent, engine_socket: Path, name: str) -> None:
        self._service = service
        self._parent = parent
        self._changed = asyncio.Event()
        self.client = WireClient(
            engine_socket, name=name, shares_callers=False, patience=PATIENCE, on_change=self._on_change
        )

    def _on_change(self) -> None:
        """The gate says in words fit for any caller what the client says for the log."""
        if self.client.is_connected:
            self._service.gate.open(self.client)
        else:
            self._service.gate.close(ENGINE_GONE)
        self._changed.set()

    async def prepare(self) -> None:
        """Warms each new engine, whose cache is empty, or takes what another process computes for it."""
        known, warming = "", None
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                facts = self.client.facts
                if facts is None or facts.instance == known or not self.client.status().ready:
                    continue
                known = facts.instance
                if warming is not None:
                    warming.cancel()  # it was for the engine before
                self._service.new_engine(facts.extra.get("device", "cpu"))
                self._parent.tell_ready()
                warming = asyncio.create_task(self._warm())
        finally:
            if warming is not None:
                warming.cancel()

    async def _warm(self) -> None:
        try:
            await self._service.warm(Progress("warming up", "tools"))
        except Exception:  # calls are answered from a cold catalogue too, only later
            logger.exception("the warm-up stopped early")
