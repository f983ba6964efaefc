"""The engine of this process: loaded beside the event loop, watched for a fault, drained and closed."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType

from engine.client import no_engine
from engine.engine import Engine
from engine.errors import EngineError
from mcp_discovery.assemble import DiscoveryModel
from mcp_discovery.config import Config
from mcp_discovery.observe.status import EngineReport, PlanLine


class EngineHost:
    """async with EngineHost(config, model) as host: engine = await host.start()"""

    def __init__(self, config: Config, model: DiscoveryModel) -> None:
        self.fault = asyncio.Event()  # the device has failed: the process is to end
        self.engine: Engine | None = None
        self._config = config
        self._model = model
        self._creating: asyncio.Future[Engine] | None = None

    async def start(self) -> Engine:
        """Loads the engine, which proves itself by its canary; raises `EngineError`."""
        model = self._model
        self._creating = asyncio.ensure_future(
            asyncio.to_thread(Engine.create, self._config.engine_config(), model.path, model.adapter_path)
        )
        # A load cannot be interrupted: who is cancelled here leaves it to the end of the context.
        self.engine = await asyncio.shield(self._creating)
        loop = asyncio.get_running_loop()

        def tell() -> None:
            loop.call_soon_threadsafe(self.fault.set)

        self.engine.on_fault(tell)
        return self.engine

    async def drain(self) -> None:
        """Refuses what is new, lets what was admitted end for at most `overload.drain_s`."""
        if self.engine is not None:
            await asyncio.to_thread(self.engine.drain, self._config.overload.drain_s)

    def report(self) -> EngineReport:
        """What `/status` shows of it, now."""
        engine = self.engine
        if engine is None:
            return EngineReport(no_engine("the model is being loaded"), "not run yet")
        lines = () if engine.loaded is None else engine.loaded.plan.lines
        plan = [PlanLine(line.name, line.bytes, line.why) for line in lines]
        return EngineReport(engine.status(), "passed: " + engine.canary, plan)

    async def __aenter__(self) -> EngineHost:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the engine; every request left ends with it."""
        if self._creating is not None:
            with contextlib.suppress(EngineError):  # told by `start`
                await asyncio.to_thread((await self._creating).close)
