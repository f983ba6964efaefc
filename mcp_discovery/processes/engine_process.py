"""The engine's process: embeds, scores, admits and shares, for front-ends at the other end of a Unix socket.

It answers no caller itself, so its interpreter has little to do but step the engine and move frames.
"""

from __future__ import annotations

import asyncio
import logging
import uuid

import uvloop

from engine.engine import Engine
from engine.local import LocalClient
from engine.wire import EngineFacts, WireServer
from mcp_discovery.assemble import DiscoveryModel, runs_on_cpu
from mcp_discovery.config import Config
from mcp_discovery.exits import ENGINE_FAILED, OK
from mcp_discovery.processes.assignment import Assignment
from mcp_discovery.processes.child import Parent, stop_on_signals
from mcp_discovery.processes.host import EngineHost
from mcp_discovery.processes.overview import child_report
from mcp_discovery.transport.serve import raise_file_limit
from mcp_discovery.tuning import tune_interpreter

logger = logging.getLogger(__name__)

LAST_FRAMES_S = 2.0  # for answers on their way to front-ends once the engine has drained or failed


def run(assignment: Assignment, parent: Parent) -> int:
    """Serves until a signal or a fault; returns the exit code."""
    raise_file_limit()
    config = assignment.config
    model = DiscoveryModel.of(config.engine.model, config.engine.adapter)
    return uvloop.run(_serve(assignment, parent, model))


async def _serve(assignment: Assignment, parent: Parent, model: DiscoveryModel) -> int:
    """Raises what kept the engine from starting."""
    assert assignment.engine_socket is not None
    stop, server = stop_on_signals(), WireServer(reason="the model is being loaded")
    async with EngineHost(assignment.config, model) as host:
        parent.listen(lambda: child_report(None, host.report()))
        await server.start(assignment.engine_socket)
        starting = asyncio.create_task(host.start())
        stopping = asyncio.create_task(stop.wait())
        failing = asyncio.create_task(host.fault.wait())
        try:
            await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                engine = starting.result()
                server.open(LocalClient(engine), facts_of(engine, assignment.config))
                tune_interpreter()
                parent.tell_ready()
                await asyncio.wait((stopping, failing), return_when=asyncio.FIRST_COMPLETED)
            if failing.done():
                parent.tell_failed(engine.status().reason)
                server.shut(engine.status().reason)
            else:
                server.drain("the server is stopping")
        finally:
            for task in (starting, stopping, failing):
                task.cancel()
            await host.drain()
            await server.idle(LAST_FRAMES_S)
            await server.close()
    return ENGINE_FAILED if host.fault.is_set() else OK


def facts_of(engine: Engine, config: Config) -> EngineFacts:
    """What front-ends are told of an engine."""
    loaded = engine.loaded
    assert loaded is not None
    return EngineFacts(
        instance=uuid.uuid4().hex,
        page_tokens=config.engine.page_tokens,
        vocabulary=loaded.shape.vocabulary,
        context=loaded.shape.context,
        kernels=engine.status().kernels,
        model=loaded.model_sha256,
        adapter=loaded.adapter_sha256,
        extra={"device": "cpu" if runs_on_cpu(config.engine.device) else "cuda"},
    )
