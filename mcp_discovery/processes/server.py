"""The serving process: TLS, MCP, discovery and the engine in one, behind sockets that its parent has bound.

It drains on the first signal. Where the device fails it answers what it owes and exits: what a card
does after a fault is not to be trusted, and only the process's end returns its memory for certain.
"""

from __future__ import annotations

import asyncio
import logging

import uvloop

from engine.local import LocalClient
from mcp_discovery.commands.common import Progress
from mcp_discovery.exits import ENGINE_FAILED, OK
from mcp_discovery.processes.assignment import Assignment
from mcp_discovery.processes.child import Parent, ledger_of, stop_on_signals
from mcp_discovery.processes.host import EngineHost
from mcp_discovery.processes.listening import listeners_of
from mcp_discovery.processes.overview import child_report
from mcp_discovery.service import Service
from mcp_discovery.transport.serve import Listener, Listeners, raise_file_limit
from mcp_discovery.tuning import tune_interpreter

logger = logging.getLogger(__name__)

LAST_ANSWERS_S = 2.0  # for answers on their way once the engine has drained or failed


def run(assignment: Assignment, parent: Parent) -> int:
    """Serves until a signal or a fault; returns the exit code."""
    raise_file_limit()
    service = Service.build(assignment.config, ledger_of(assignment))
    listeners = listeners_of(assignment.config, service.app, assignment.sockets)
    return uvloop.run(_serve(parent, service, listeners))


async def _serve(parent: Parent, service: Service, listeners: list[Listener]) -> int:
    """Raises what kept the engine from starting."""
    stop, running = stop_on_signals(), Listeners(listeners)
    async with EngineHost(service.config, service.model) as host, service.running():
        parent.listen(lambda: child_report(service.report(), host.report()))
        await running.start()
        working = asyncio.create_task(_work(parent, service, host))
        stopping = asyncio.create_task(stop.wait())
        failing = asyncio.create_task(host.fault.wait())
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
            await host.drain()
            await running.stop(LAST_ANSWERS_S)
    logger.info("stopped: %s", service.accounting.counts().as_json())
    return ENGINE_FAILED if host.fault.is_set() else OK


async def _work(parent: Parent, service: Service, host: EngineHost) -> None:
    """From a cold start to a warm server. It is ready before it is warm: a cold call only takes longer."""
    service.gate.open(LocalClient(await host.start()))
    tune_interpreter()
    parent.tell_ready()
    try:
        await service.warm(Progress("warming up", "tools"))
    except Exception:  # calls are answered from a cold catalogue too, only later
        logger.exception("the warm-up stopped early")
