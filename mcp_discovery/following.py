"""A server's discovery kept in step with its sources."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.to_thread

from mcp_discovery import model_store
from mcp_discovery.config import Config
from mcp_discovery.discovery.catalogue import Catalogue
from mcp_discovery.discovery.handover import CatalogueSource
from mcp_discovery.discovery.live import Sources
from mcp_discovery.discovery.select import Discovery
from mcp_discovery.discovery.sources.server import Timing
from mcp_discovery.discovery.sources.stored import ListStore

logger = logging.getLogger(__name__)


def sources_of(config: Config) -> Sources:
    """The sources that `[catalog]` names. Raises `ConfigError` where a path does not exist."""
    return Sources(
        config.catalogue_paths(),
        config.catalog.urls,
        store=ListStore(lists_folder()),
        timing=Timing(
            refresh_s=config.catalog.refresh_s,
            connect_timeout_s=config.catalog.connect_timeout_s,
        ),
    )


def lists_folder() -> Path:
    """Where the last good lists of live servers are kept, beside the models in the user's cache."""
    return model_store.cache_folder().parent / "lists"


class Follower:
    """Puts each new catalogue in place: indexed in a thread, then swapped in one assignment.

    While one is being indexed only the newest of those that come is kept. Used from one event loop.
    """

    def __init__(
        self, sources: CatalogueSource, discovery: Discovery, on_revision: Callable[[], None]
    ) -> None:
        """`on_revision` is called after each swap."""
        self._sources = sources
        self._discovery = discovery
        self._on_revision = on_revision
        self._newest: Catalogue | None = None
        self._has_come = asyncio.Event()

    async def run(self) -> None:
        """Until it is cancelled; the sources' sessions and child processes end with it."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._sources.run, self._take)
            while True:
                await self._has_come.wait()
                self._has_come.clear()
                catalogue, self._newest = self._newest, None
                if catalogue is not None:
                    await self._put_in_place(catalogue)

    def _take(self, catalogue: Catalogue) -> None:
        self._newest = catalogue
        self._has_come.set()

    async def _put_in_place(self, catalogue: Catalogue) -> None:
        before = self._discovery.snapshot.catalogue.revision
        self._discovery.replace(await anyio.to_thread.run_sync(self._discovery.index, catalogue))
        if catalogue.revision != before:
            logger.info(
                "catalogue %s: %d tools of %d servers",
                catalogue.revision[:19],
                len(catalogue),
                len(catalogue.servers),
            )
        self._on_revision()
