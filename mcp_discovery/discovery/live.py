"""The catalogue that follows its sources: files, folders, the servers of an `mcp.json`, servers by URL.

`Sources` owns every session, child process and file watch, and gives each new catalogue to one
subscriber. It may live in a process of its own: a catalogue is made of plain values.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from mcp_discovery.discovery.catalogue import Catalogue, Problem, ServerState
from mcp_discovery.discovery.sources import files
from mcp_discovery.discovery.sources.parts import Merger, Part, states_of
from mcp_discovery.discovery.sources.server import LiveServer, Timing, Turns, unreachable
from mcp_discovery.discovery.sources.session import quiet_client
from mcp_discovery.discovery.sources.specs import Http, Spec, Unreachable, of_url, parse_all
from mcp_discovery.discovery.sources.stored import ListStore

logger = logging.getLogger(__name__)

WATCH_S = 1.0  # between two looks at the files
GATHER_S = 0.1  # that changes are gathered for, before a catalogue is made of them

OnCatalogue = Callable[[Catalogue], None]


@dataclass(frozen=True)
class _File:
    """A file as it was read last."""

    signature: object
    part: Part
    servers: tuple[Spec | Unreachable, ...]


class Sources:
    """All sources of one catalogue. `load` once, then `run` in an event loop."""

    def __init__(
        self,
        paths: Sequence[Path],
        urls: Sequence[str] = (),
        *,
        store: ListStore | None = None,
        timing: Timing | None = None,
        environment: Mapping[str, str] | None = None,
        watch_s: float = WATCH_S,
        gather_s: float = GATHER_S,
    ) -> None:
        """`store` None keeps no lists on disk; `environment` None is this process's own."""
        self._paths = tuple(paths)
        self._environment = os.environ if environment is None else environment
        self._urls = tuple(of_url(url, self._environment) for url in urls)
        self._store = store
        self._timing = timing or Timing()
        self._watch_s = watch_s
        self._gather_s = gather_s
        self._files: dict[Path, _File] = {}
        self._servers: dict[str, LiveServer] = {}  # by the spec's entry
        self._scopes: dict[str, anyio.CancelScope] = {}
        self._merger = Merger()
        self._turns = Turns(self._timing.at_once, self._timing.patience_s)
        self._http_turns = Turns(self._timing.http_at_once, self._timing.http_patience_s)
        self._judging = anyio.CapacityLimiter(1)
        self._has_changed = anyio.Event()
        self.catalogue = Catalogue.of(())

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What is wrong with the entries of the present catalogue."""
        return self._merger.problems

    def load(self) -> Catalogue:
        """What is there without asking a server: files, and the lists kept of live servers. Blocks."""
        self._files = self._read_files()
        for spec in self._specs():
            server = self._servers[spec.entry] = self._server(spec)
            server.recall()
        return self.current()

    async def run(self, on_catalogue: OnCatalogue) -> None:
        """Follows the sources until it is cancelled; `on_catalogue` gets each new catalogue, in this loop.

        Sessions and child processes end before it returns.
        """
        with quiet_client():
            async with anyio.create_task_group() as group:
                for server in self._servers.values():
                    group.start_soon(self._run_server, server)
                group.start_soon(self._watch, group)
                await self._publish(on_catalogue)

    def current(self) -> Catalogue:
        """A catalogue of what the sources say at this moment, published or not; while they do not run."""
        self.catalogue = self._merger.catalogue(self._parts())
        return self.catalogue

    async def tried(self) -> None:
        """Returns once every live server has given its tools or failed to."""
        for server in list(self._servers.values()):
            await server.has_been_tried.wait()

    def states(self) -> list[ServerState]:
        """Where each server stands at this moment, later than what the catalogue says."""
        return states_of(self._parts())

    # --- live servers -------------------------------------------------------------------------

    def _server(self, spec: Spec) -> LiveServer:
        turns = self._http_turns if isinstance(spec.endpoint, Http) else self._turns
        return LiveServer(spec, turns, self._judging, self._change, timing=self._timing, store=self._store)

    def _change(self) -> None:
        self._has_changed.set()

    async def _run_server(self, server: LiveServer) -> None:
        with anyio.CancelScope() as scope:
            self._scopes[server.spec.entry] = scope
            await server.run()

    def _specs(self) -> Iterator[Spec]:
        return (spec for spec in self._configured() if isinstance(spec, Spec))

    def _configured(self) -> Iterator[Spec | Unreachable]:
        for file in self._files.values():
            yield from file.servers
        yield from self._urls

    async def _replace_servers(self, group: TaskGroup) -> None:
        """Ends the servers that are no longer configured as they run, and starts the new ones."""
        wanted = {spec.entry: spec for spec in self._specs()}
        for entry in [entry for entry, server in self._servers.items() if wanted.get(entry) != server.spec]:
            del self._servers[entry]
            self._scopes.pop(entry).cancel()
        for entry in [entry for entry in wanted if entry not in self._servers]:
            server = self._server(wanted[entry])
            await anyio.to_thread.run_sync(server.recall)
            self._servers[entry] = server
            group.start_soon(self._run_server, server)

    # --- files --------------------------------------------------------------------------------

    async def _watch(self, group: TaskGroup) -> None:
        while True:
            await anyio.sleep(self._watch_s)
            read = await anyio.to_thread.run_sync(self._read_files)
            if list(read.items()) != list(self._files.items()):
                self._files = read
                await self._replace_servers(group)
                self._change()

    def _read_files(self) -> dict[Path, _File]:
        """All files; one that has not changed since it was read is not read again."""
        read: dict[Path, _File] = {}
        for file in (file for path in self._paths for file in files.files_at(path)):
            signature = _signature(file)
            known = self._files.get(file)
            same = known is not None and known.signature == signature
            read[file] = known if same and known is not None else self._read_file(file, signature, known)
        return read

    def _read_file(self, file: Path, signature: object, known: _File | None) -> _File:
        content = files.read(file)
        if content.is_readable or known is None:
            part = Part.of_file(str(file), content.found, content.problems, time.time())
            return _File(signature, part, tuple(parse_all(content.live or {}, str(file), self._environment)))
        # Half-written or broken by an edit: what it held before is served until it can be read again.
        error = content.problems[0].sentence.removesuffix(".")
        part = replace(known.part, problems=content.problems, presence="stale", error=error)
        return _File(signature, part, known.servers)

    # --- catalogues ---------------------------------------------------------------------------

    def _parts(self) -> list[Part]:
        parts: list[Part] = []
        for file in self._files.values():
            parts += (file.part, *map(self._part, file.servers))
        return [*parts, *map(self._part, self._urls)]

    def _part(self, server: Spec | Unreachable) -> Part:
        if isinstance(server, Unreachable):
            return unreachable(server)
        running = self._servers.get(server.entry)
        return Part(server.entry) if running is None else running.part

    async def _publish(self, on_catalogue: OnCatalogue) -> None:
        while True:
            await self._has_changed.wait()
            await anyio.sleep(self._gather_s)
            self._has_changed = anyio.Event()
            parts = self._parts()
            self.catalogue = await anyio.to_thread.run_sync(self._merger.catalogue, parts)
            on_catalogue(self.catalogue)


def _signature(file: Path) -> object:
    """What differs when a file has changed; two reads within its clock's tick may not be told apart."""
    try:
        about = file.stat()
    except OSError as error:
        return error.errno
    return about.st_mtime_ns, about.st_size, about.st_ino, about.st_mode
