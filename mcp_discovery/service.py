"""The whole server's parts, put together: catalogue, engine, discovery, tool, ledger, apps.

`Service.build` makes everything that is quick, so that listeners can open at once. `start` loads the
engine, which proves itself by its canary; until then, and while it drains, calls are refused with a
code that says so. `warm` computes the tools' prefixes ahead of the calls that need them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from starlette.applications import Starlette

from engine.engine import Engine
from engine.errors import EngineError
from engine.local import LocalClient
from mcp_discovery import __version__
from mcp_discovery.assemble import Choices, DiscoveryModel
from mcp_discovery.certificates import describe
from mcp_discovery.config import Config
from mcp_discovery.discovery.live import Sources
from mcp_discovery.discovery.select import Discovery
from mcp_discovery.following import Follower, sources_of
from mcp_discovery.gate import Gate
from mcp_discovery.observe.accounting import Accounting
from mcp_discovery.observe.admin import create_admin_app
from mcp_discovery.observe.metrics import Metrics
from mcp_discovery.observe.rates import Rates
from mcp_discovery.observe.status import CatalogueReport, PlanLine, StatusReport
from mcp_discovery.tool import DiscoverTool
from mcp_discovery.transport.app import create_app

logger = logging.getLogger(__name__)

MAX_PROBLEMS_SHOWN = 20
NOT_BEGUN = "not begun"
Progress = Callable[[int, int], None]
"""(done, total)"""


@dataclass
class Service:
    """One server without its sockets. Lives in one event loop."""

    config: Config
    model: DiscoveryModel
    sources: Sources
    gate: Gate
    discovery: Discovery
    tool: DiscoverTool
    rates: Rates = field(default_factory=Rates)
    started: float = field(default_factory=time.monotonic)
    warm_up: str = NOT_BEGUN
    is_warm: bool = False
    engine: Engine | None = None
    restarts: int = 0
    last_failure: str = ""

    def __post_init__(self) -> None:
        self.fault = asyncio.Event()  # the device has failed: the process is to end
        self._revised = asyncio.Event()
        self._warming = asyncio.Lock()
        self._creating: asyncio.Future[Engine] | None = None
        self.accounting = Accounting(self._observe)
        self.metrics = Metrics(
            counts=self.accounting.counts,
            engine=self.gate.status,
            tools=lambda: len(self.discovery.snapshot.catalogue),
            restarts=self.restarts,
        )
        table = self.config.server
        self.app = create_app(
            self.tool,
            accounting=self.accounting,
            not_ready=self.not_ready,
            allowed_hosts=(*table.allowed_hosts, *_own_hosts(describe(self.config.tls.cert).names)),
            allowed_origins=table.allowed_origins,
            max_body_bytes=table.max_body_bytes,
        )

    @classmethod
    def build(cls, config: Config, restarts: int = 0, last_failure: str = "") -> Service:
        """Reads catalogue and tokenizer; raises `ConfigError` and `ModelError`.

        `restarts` says how often the process was started again, `last_failure` why the last time.
        """
        model = DiscoveryModel.of(config.engine.model, config.engine.adapter)
        sources = sources_of(config)
        catalogue = sources.load()
        for problem in sources.problems[:MAX_PROBLEMS_SHOWN]:
            logger.warning("catalogue: %s", problem)
        if len(sources.problems) > MAX_PROBLEMS_SHOWN:
            logger.warning(
                "catalogue: %d more; see `catalog check`", len(sources.problems) - MAX_PROBLEMS_SHOWN
            )
        gate = Gate("the model is being loaded", config.engine.page_tokens)
        discovery = model.discovery(
            gate,
            catalogue,
            choices(config),
            device=config.engine.device,
            page_tokens=config.engine.page_tokens,
        )
        tool = DiscoverTool(discovery)
        return cls(
            config, model, sources, gate, discovery, tool, restarts=restarts, last_failure=last_failure
        )

    def admin_app(self, hosts: Sequence[str]) -> Starlette:
        """The admin listener's app, for these Host headers."""
        return create_admin_app(self.report, self.metrics, hosts)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The app's lifespan, and that of the sources; the engine is closed at its end."""
        async with self.app.router.lifespan_context(self.app):
            working = [asyncio.create_task(self._follow()), asyncio.create_task(self._rewarm())]
            try:
                yield
            finally:
                for task in working:
                    task.cancel()
                await self.close()
                await asyncio.wait(working)

    async def start(self) -> None:
        """Loads the engine and lets calls through to it; raises `EngineError`."""
        self._creating = asyncio.ensure_future(
            asyncio.to_thread(
                Engine.create, self.config.engine_config(), self.model.path, self.model.adapter_path
            )
        )
        # A load cannot be interrupted: who is cancelled here leaves it to `close`.
        self.engine = await asyncio.shield(self._creating)
        loop = asyncio.get_running_loop()

        def tell() -> None:
            loop.call_soon_threadsafe(self.fault.set)

        self.engine.on_fault(tell)
        self.gate.open(LocalClient(self.engine))

    async def warm(self, progress: Progress | None = None) -> None:
        """Computes the tools' prefixes, as many as the pool can keep, while no call is under way."""
        async with self._warming:
            await self._warm(progress)

    async def _warm(self, progress: Progress | None) -> None:
        wanted = 0

        def show(done: int, total: int) -> None:
            nonlocal wanted
            wanted = total
            self.warm_up = f"{done:,} of {total:,} tools"
            if progress is not None:
                progress(done, total)

        count = await self.discovery.warm(show)
        if not wanted and self.is_warm:
            return  # nothing was new
        self.is_warm = count >= wanted
        self.warm_up = f"done, {count:,} tools" if self.is_warm else f"stopped at {self.warm_up}"

    async def _follow(self) -> None:
        try:
            await Follower(self.sources, self.discovery, self._revised.set).run()
        except Exception:  # what is known is served all the same
            logger.exception("the catalogue no longer follows its sources")

    async def _rewarm(self) -> None:
        """Computes what is new in later revisions, once the first warm-up has begun."""
        while True:
            await self._revised.wait()
            self._revised.clear()
            if self.warm_up != NOT_BEGUN:
                try:
                    await self.warm()
                except Exception:  # the next revision, or a call, computes it
                    logger.exception("a warm-up stopped early")

    def not_ready(self) -> str:
        """Why calls are refused, "" when they are not."""
        if self.gate.reason:
            return self.gate.reason
        status = self.gate.status()
        return "draining" if status.draining else status.reason

    async def drain(self) -> None:
        """Refuses what is new, lets what was admitted end for at most `overload.drain_s`."""
        if self.engine is not None:
            await asyncio.to_thread(self.engine.drain, self.config.overload.drain_s)

    async def close(self) -> None:
        """Ends the engine; every request left ends with it."""
        self.gate.close("the server has stopped")
        if self._creating is not None:
            with contextlib.suppress(EngineError):  # told by `start`
                await asyncio.to_thread((await self._creating).close)

    def report(self) -> StatusReport:
        """Everything that `/status` shows, now."""
        catalogue = self.discovery.snapshot.catalogue
        return StatusReport(
            version=__version__,
            uptime_s=time.monotonic() - self.started,
            not_ready=self.not_ready(),
            model=self.discovery.model,
            warm_up=self.warm_up,
            is_warm=self.is_warm,
            canary="passed: " + self.engine.canary if self.engine else "not run yet",
            counts=self.accounting.counts(),
            engine=self.gate.status(),
            catalogue=CatalogueReport(
                revision=catalogue.revision,
                indexed_at=catalogue.indexed_at,
                servers={name: len(held) for name, held in catalogue.servers.items()},
                missing=catalogue.servers_missing,
                problems=[str(problem) for problem in self.sources.problems[:MAX_PROBLEMS_SHOWN]],
            ),
            plan=self._plan(),
            rates=self.rates.per_second(),
            p50_ms=self.rates.quantile_ms(0.5),
            p99_ms=self.rates.quantile_ms(0.99),
            restarts=self.restarts,
            last_failure=self.last_failure,
        )

    def _plan(self) -> Sequence[PlanLine]:
        if self.engine is None or self.engine.loaded is None:
            return ()
        return [PlanLine(line.name, line.bytes, line.why) for line in self.engine.loaded.plan.lines]

    def _observe(self, status: str, code: str, seconds: float) -> None:
        self.rates.observe(status, seconds)
        self.metrics.observe(status, seconds)


def choices(config: Config) -> Choices:
    """What `[discovery]` says."""
    table = config.discovery
    return Choices(table.candidates, table.min_score, table.limit, table.selector)


def _own_hosts(names: Sequence[str]) -> Iterator[str]:
    """Host headers, on any port, for the names of a certificate: a client that trusts it used one."""
    for name in names:
        host = f"[{name}]" if ":" in name else name
        yield host
        yield f"{host}:*"
