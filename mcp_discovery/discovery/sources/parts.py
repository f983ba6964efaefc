"""What each source says, and the one catalogue that it makes together.

A part is one file's tools, or one live server's. Parts are ordered as configured: where two define one
id differently, the earlier one's tool is served. A server whose parts have not changed keeps the very
group of tools that it had, whatever else changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mcp_discovery.discovery.catalogue import (
    Catalogue,
    Found,
    Presence,
    Problem,
    ServerState,
    Tool,
    distinct,
    now,
    sorted_group,
)

_RANK: dict[Presence, int] = {"listed": 0, "stale": 1, "missing": 2}


@dataclass(frozen=True, eq=False)
class Part:
    """What one source says, of each server it speaks for."""

    source: str
    found: Mapping[str, tuple[Found, ...]] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    presence: Presence = "listed"
    listed_at: float | None = None  # Unix seconds
    error: str = ""

    @classmethod
    def of_file(
        cls, source: str, found: Iterable[Found], problems: Sequence[Problem], read_at: float
    ) -> Part:
        servers: dict[str, list[Found]] = {}
        for item in found:
            servers.setdefault(item.tool.server, []).append(item)
        return cls(
            source,
            {server: tuple(items) for server, items in servers.items()},
            tuple(problems),
            listed_at=read_at,
        )

    def states(self) -> Iterable[ServerState]:
        for server, items in self.found.items():
            yield ServerState(server, self.source, self.presence, len(items), self.listed_at, self.error)


@dataclass(frozen=True, slots=True)
class _Group:
    parts: tuple[tuple[Found, ...], ...]
    tools: tuple[Tool, ...]
    problems: tuple[Problem, ...]


class Merger:
    """Parts to catalogues. Remembers the groups of the last one."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self.problems: tuple[Problem, ...] = ()
        """What is wrong with the parts of the last catalogue."""

    def catalogue(self, parts: Sequence[Part]) -> Catalogue:
        """The catalogue of `parts`, in their order."""
        by_server: dict[str, list[tuple[Found, ...]]] = {}
        for part in parts:
            for server, found in part.found.items():
                by_server.setdefault(server, []).append(found)
        self._groups = {server: self._group(server, tuple(held)) for server, held in by_server.items()}
        own = (problem for part in parts for problem in part.problems)
        self.problems = (*own, *(problem for group in self._groups.values() for problem in group.problems))
        tools, clashes = _without_clashes({server: group.tools for server, group in self._groups.items()})
        self.problems += clashes
        return Catalogue.of_states(tools, states_of(parts), now())

    def _group(self, server: str, parts: tuple[tuple[Found, ...], ...]) -> _Group:
        known = self._groups.get(server)
        if known is not None and list(map(id, known.parts)) == list(map(id, parts)):
            return known
        tools, problems = distinct(item for part in parts for item in part)
        return _Group(parts, sorted_group(tools), tuple(problems))


def _without_clashes(
    groups: Mapping[str, tuple[Tool, ...]],
) -> tuple[Mapping[str, tuple[Tool, ...]], tuple[Problem, ...]]:
    """`groups` with each id once: `a/b` with a tool `c` and `a` with a tool `b/c` would share one."""
    if not any("/" in server for server in groups):
        return groups, ()
    tools, problems = distinct(
        Found(tool, f"the tools of {server!r}") for server, group in groups.items() for tool in group
    )
    kept = set(map(id, tools))
    left = {
        server: group
        if all(id(tool) in kept for tool in group)
        else tuple(tool for tool in group if id(tool) in kept)
        for server, group in groups.items()
    }
    return left, tuple(problems)


def states_of(parts: Sequence[Part]) -> list[ServerState]:
    """One state a server: that of the part of it that stands worst, with the tools of all."""
    found: dict[str, ServerState] = {}
    for part in parts:
        for state in part.states():
            known = found.get(state.server)
            if known is not None:
                worst = max(known, state, key=lambda one: _RANK[one.presence])
                state = ServerState(
                    worst.server,
                    worst.source,
                    worst.presence,
                    known.tools + state.tools,
                    worst.listed_at,
                    worst.error,
                )
            found[state.server] = state
    return [found[server] for server in sorted(found)]
