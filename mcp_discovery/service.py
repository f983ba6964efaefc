"""What answers calls, put together: catalogue, discovery, tool, ledger, app; the engine is behind a gate.

`Service.build` makes everything that is quick, so that listeners can open at once. Until the gate is
opened, and while the engine drains, calls are refused with a code that says so. `warm` computes the
tools' prefixes ahead of the calls that need them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from mcp_discovery.assemble import Choices, DiscoveryModel, usual_candidates
from mcp_discovery.certificates import describe
from mcp_discovery.config import Config
from mcp_discovery.discovery.handover import CatalogueSource, HandedOver, Received
from mcp_discovery.discovery.select import Discovery
from mcp_discovery.following import Follower, sources_of
from mcp_discovery.gate import Gate
from mcp_discovery.observe.accounting import Accounting
from mcp_discovery.observe.ledger import Ledger
from mcp_discovery.observe.rates import Rates
from mcp_discovery.observe.status import CatalogueReport, ServiceReport
from mcp_discovery.tool import DiscoverTool
from mcp_discovery.transport.app import create_app

logger = logging.getLogger(__name__)

MAX_PROBLEMS_SHOWN = 20
LOOK_EVERY_S = 2.0  # for vectors that another process has stored
NOT_BEGUN = "not begun"
Progress = Callable[[int, int], None]
"""(done, total)"""


@dataclass
class Service:
    """What answers calls, without its sockets. Lives in one event loop."""

    config: Config
    model: DiscoveryModel
    sources: CatalogueSource
    gate: Gate
    discovery: Discovery
    tool: DiscoverTool
    ledger: Ledger = field(default_factory=Ledger)
    warms: bool = True  # else another process does, and this one takes what it stores
    rates: Rates = field(default_factory=Rates)
    warm_up: str = NOT_BEGUN
    is_warm: bool = False

    def __post_init__(self) -> None:
        self._revised = asyncio.Event()
        self._warming = asyncio.Lock()
        self.accounting = Accounting(self._observe, self.ledger)
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
    def build(
        cls,
        config: Config,
        ledger: Ledger | None = None,
        *,
        warms: bool = True,
        has_engine: bool = True,
        handover: Path | None = None,
    ) -> Service:
        """Reads catalogue and tokenizer; raises `ConfigError` and `ModelError`. `ledger` counts the calls.
        Where the process is to have no engine, `new_engine` tells later what it runs on. Of several
        processes the one that warms follows the sources and leaves each catalogue in `handover`."""
        model = DiscoveryModel.of(config.engine.model, config.engine.adapter)
        sources: CatalogueSource = sources_of(config)
        if handover is not None:
            sources = HandedOver(sources, handover) if warms else Received(sources, handover)
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
            device=config.engine.device if has_engine else "cpu",
            page_tokens=config.engine.page_tokens,
        )
        tool = DiscoverTool(discovery)
        return cls(config, model, sources, gate, discovery, tool, ledger or Ledger(), warms)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The app's lifespan, and that of the sources; the gate is closed at its end."""
        async with self.app.router.lifespan_context(self.app):
            working = [asyncio.create_task(self._follow()), asyncio.create_task(self._rewarm())]
            try:
                yield
            finally:
                for task in working:
                    task.cancel()
                self.gate.close("the server has stopped")
                await asyncio.wait(working)

    def new_engine(self, device: str) -> None:
        """Another engine, in another process, runs on `device`: its cache is empty, and as many candidates
        are scored as suit it."""
        self.discovery.snapshot.chill()
        self.is_warm, self.warm_up = False, "begun"
        if self.config.discovery.candidates is None:
            candidates = usual_candidates(device == "cpu")
            self.discovery.settings = replace(self.discovery.settings, candidates=candidates)

    async def warm(self, progress: Progress | None = None) -> None:
        """Computes the tools' prefixes, as many as the pool can keep, while no call is under way. A process
        that does not warm waits until another has stored the vectors."""
        async with self._warming:
            if not self.warms:
                await self._recall()
                return
            await self._warm(progress)

    async def _recall(self) -> None:
        self.is_warm, self.warm_up = False, "waits for vectors that another process computes"
        while not await self.discovery.recall():
            await asyncio.sleep(LOOK_EVERY_S)
        self.is_warm, self.warm_up = True, "done"

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

    def report(self) -> ServiceReport:
        """What `/status` shows of it, now."""
        catalogue = self.discovery.snapshot.catalogue
        return ServiceReport(
            not_ready=self.not_ready(),
            model=self.discovery.model,
            warm_up=self.warm_up,
            is_warm=self.is_warm,
            catalogue=CatalogueReport(
                revision=catalogue.revision,
                indexed_at=catalogue.indexed_at,
                servers={name: len(held) for name, held in catalogue.servers.items()},
                missing=catalogue.servers_missing,
                states=self.sources.states(),
                listing_tokens=catalogue.listing_tokens,
                answers=self.tool.answers,
                answer_tokens=self.tool.answer_tokens,
                problems=[str(problem) for problem in self.sources.problems[:MAX_PROBLEMS_SHOWN]],
            ),
            rates=self.rates.per_second(),
            recent_ms=self.rates.recent_ms(),
        )

    def _observe(self, status: str, code: str, seconds: float) -> None:
        self.rates.observe(status, seconds)


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
