"""One process follows the sources; the others of the same server take each catalogue from it.

Through a folder: `groups/HASH.json` hold the definitions of one server each, named by their content,
and `catalogue.json` says which of them make the present revision. A new revision writes the groups
that are new and then that one file, in one step; a reader keeps the groups it has read. So what crosses
is what has changed, a reader may start at any time, and an owner that is started again takes it all over.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import anyio
import anyio.to_thread

from mcp_discovery.discovery.catalogue import Catalogue, Problem, ServerState, Tool
from mcp_discovery.discovery.sources.stored import PARTIAL, replace_file

logger = logging.getLogger(__name__)

LOOK_S = 0.25  # between two looks for a new revision


class CatalogueSource(Protocol):
    """Where a process has its catalogues from."""

    @property
    def problems(self) -> Sequence[Problem]:
        """What is wrong with the entries of the present catalogue."""
        ...

    def load(self) -> Catalogue:
        """What is there at once. Blocks."""
        ...

    async def run(self, on_catalogue: Callable[[Catalogue], None]) -> None:
        """Gives each new catalogue, until it is cancelled."""
        ...

    def states(self) -> Sequence[ServerState]:
        """Where each server stands at this moment."""
        ...


class HandedOver:
    """The owner's side: the catalogues of `source`, left in a folder for others too."""

    def __init__(self, source: CatalogueSource, folder: Path) -> None:
        self._source = source
        self._folder = folder
        self._written: set[str] = set()

    @property
    def problems(self) -> Sequence[Problem]:
        return self._source.problems

    def states(self) -> Sequence[ServerState]:
        return self._source.states()

    def load(self) -> Catalogue:
        catalogue = self._source.load()
        self._leave(catalogue)
        return catalogue

    async def run(self, on_catalogue: Callable[[Catalogue], None]) -> None:
        newest: list[Catalogue] = []
        has_come = anyio.Event()

        def take(catalogue: Catalogue) -> None:
            newest[:] = [catalogue]
            has_come.set()
            on_catalogue(catalogue)

        async with anyio.create_task_group() as group:
            group.start_soon(self._source.run, take)
            while True:
                await has_come.wait()
                has_come = anyio.Event()
                await anyio.to_thread.run_sync(self._leave, newest[0])

    def _leave(self, catalogue: Catalogue) -> None:
        groups = self._folder / "groups"
        try:
            groups.mkdir(parents=True, exist_ok=True, mode=0o700)
            named = {server: _name(group) for server, group in catalogue.groups.items()}
            for server, group in catalogue.groups.items():
                if named[server] not in self._written:
                    definitions = [tool.definition for tool in group]
                    replace_file(groups / named[server], json.dumps(definitions).encode())
            content = {
                "groups": named,
                "indexed_at": catalogue.indexed_at,
                "states": [asdict(state) for state in catalogue.states],
                "problems": [asdict(problem) for problem in self.problems],
            }
            replace_file(self._folder / "catalogue.json", json.dumps(content).encode())
            self._written = set(named.values())
            self._sweep(groups)
        except OSError as error:
            logger.warning("the catalogue could not be handed to other processes: %s", error)

    def _sweep(self, groups: Path) -> None:
        """Removes what is of no use any more, also of an earlier owner that was killed as it wrote."""
        for file in (*groups.iterdir(), *self._folder.glob(f"{PARTIAL}*")):
            if file.name not in self._written:
                file.unlink(missing_ok=True)


class Received:
    """A follower's side: the catalogues that the owner leaves in `folder`."""

    def __init__(self, at_start: CatalogueSource, folder: Path, look_s: float = LOOK_S) -> None:
        """`at_start` is read once and not followed: until the owner has left something it has to do."""
        self._at_start = at_start
        self._folder = folder
        self._look_s = look_s
        self._seen: object = None
        self._catalogue = Catalogue.of(())
        self._names: dict[str, str] = {}  # of the groups of the present catalogue, by server
        self._problems: Sequence[Problem] = ()

    @property
    def problems(self) -> Sequence[Problem]:
        return self._problems

    def states(self) -> Sequence[ServerState]:
        return self._catalogue.states

    def load(self) -> Catalogue:
        found = self._look()
        if found is None:
            found = self._at_start.load()
            self._catalogue, self._problems = found, self._at_start.problems
        return found

    async def run(self, on_catalogue: Callable[[Catalogue], None]) -> None:
        while True:
            found = await anyio.to_thread.run_sync(self._look)
            if found is not None:
                on_catalogue(found)
            await anyio.sleep(self._look_s)

    def _look(self) -> Catalogue | None:
        """The catalogue that is there, where it is another than at the last look."""
        file = self._folder / "catalogue.json"
        try:
            about = file.stat()
            signature = (about.st_mtime_ns, about.st_ino, about.st_size)
            if signature == self._seen:
                return None
            catalogue = self._read(json.loads(file.read_bytes()))
        except FileNotFoundError:  # nothing yet, or replaced while it was read: the next look finds it
            return None
        except OSError as error:  # such as too many open files: what is known is served until the next look
            logger.warning("a new catalogue could not be taken over yet: %s", error)
            return None
        self._seen = signature
        return catalogue

    def _read(self, content: dict[str, Any]) -> Catalogue:
        names: dict[str, str] = content["groups"]
        groups = {
            server: self._catalogue.groups[server]
            if self._names.get(server) == name
            else _tools(server, self._folder / "groups" / name)
            for server, name in names.items()
        }
        states = [ServerState(**state) for state in content["states"]]
        self._catalogue = Catalogue.of_states(groups, states, content["indexed_at"])
        self._names = names
        self._problems = [Problem(**problem) for problem in content["problems"]]
        return self._catalogue


def _name(group: Sequence[Tool]) -> str:
    return hashlib.sha256(b"".join(tool.digest for tool in group)).hexdigest() + ".json"


def _tools(server: str, file: Path) -> tuple[Tool, ...]:
    definitions = json.loads(file.read_bytes())
    return tuple(Tool(server, definition["name"], definition) for definition in definitions)
