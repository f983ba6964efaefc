"""Tools, and the immutable catalogue that one call sees from start to end.

A tool keeps its source's own definition object untouched, so that its name, schemas and annotations
leave as they came. A catalogue is sorted by server and tool name: the same set of tools has the same
order and the same revision whatever order its sources delivered.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

Definition = Mapping[str, Any]
BYTES_PER_TOKEN = 4


def canonical(value: object) -> bytes:
    """JSON with sorted keys, no white space and raw UTF-8.

    Raises ValueError (UnicodeEncodeError included) for what JSON or UTF-8 cannot carry.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


@dataclass(frozen=True, eq=False)
class Tool:
    """One tool of one server. Compared by identity; `digest` compares content."""

    server: str
    name: str
    definition: Definition

    @cached_property
    def id(self) -> str:
        return f"{self.server}/{self.name}"

    @property
    def title(self) -> str | None:
        return self.definition.get("title")

    @property
    def description(self) -> str:
        return self.definition.get("description") or ""

    @cached_property
    def description_line(self) -> str:
        """The description with its white space folded."""
        return " ".join(self.description.split())

    @property
    def input_schema(self) -> Mapping[str, Any]:
        schema: Mapping[str, Any] = self.definition["inputSchema"]
        return schema

    @property
    def output_schema(self) -> Mapping[str, Any] | None:
        return self.definition.get("outputSchema")

    @property
    def annotations(self) -> Mapping[str, Any] | None:
        return self.definition.get("annotations")

    @property
    def read_only(self) -> bool:
        return (self.annotations or {}).get("readOnlyHint") is True

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Names of the top-level parameters, in the schema's order."""
        properties = self.input_schema.get("properties")
        return tuple(properties) if isinstance(properties, Mapping) else ()

    @cached_property
    def details(self) -> tuple[tuple[str, str], ...]:
        """What a reader of text is shown of the definition: label and compact JSON of what is there."""
        parts = (
            ("input schema", self.input_schema),
            ("output schema", self.output_schema),
            ("annotations", self.annotations),
        )
        return tuple(
            (label, json.dumps(value, separators=(",", ":"), ensure_ascii=False))
            for label, value in parts
            if value
        )

    @cached_property
    def _hashed(self) -> tuple[bytes, int]:
        content = canonical(self.definition)
        return hashlib.sha256(content).digest(), len(content)

    @property
    def form(self) -> bytes:
        """SHA-256 of the definition in canonical JSON: the same for twins on other servers."""
        return self._hashed[0]

    @property
    def size(self) -> int:
        """Bytes of the definition in canonical JSON."""
        return self._hashed[1]

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the server's name in canonical JSON and the definition's `form`."""
        return hashlib.sha256(canonical(self.server) + self.form).digest()


@dataclass(frozen=True, slots=True)
class Problem:
    """Something about one entry of a source. `kept` entries are served all the same."""

    entry: str  # file and line, or file and index
    sentence: str
    kept: bool = False

    def __str__(self) -> str:
        return f"{self.entry}: {self.sentence}"


@dataclass(frozen=True, slots=True)
class Found:
    """A valid tool and where it was read."""

    tool: Tool
    entry: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the sources gave: distinct tools in source order, and what is wrong with the rest."""

    tools: tuple[Tool, ...] = ()
    problems: tuple[Problem, ...] = ()
    servers_missing: tuple[str, ...] = ()


def distinct(found: Iterable[Found]) -> tuple[list[Tool], list[Problem]]:
    """One tool an id: identical repeats collapse, of conflicting ones the first stays. Both are reported."""
    first: dict[str, Found] = {}
    problems: list[Problem] = []
    for item in found:
        known = first.setdefault(item.tool.id, item)
        if known is item:
            continue
        if known.tool.digest == item.tool.digest:
            sentence = f"{item.tool.id!r} repeats {known.entry} and counts once."
            problems.append(Problem(item.entry, sentence, kept=True))
        else:
            sentence = f"{item.tool.id!r} differs from the tool of that id at {known.entry}, which is served."
            problems.append(Problem(item.entry, sentence))
    return [item.tool for item in first.values()], problems


Presence = Literal["listed", "stale", "missing"]
"""`listed`: the server has given its tools and answers. `stale`: its last good list is served, and it does
not answer, or has not yet since the start. `missing`: its tools are not known."""


@dataclass(frozen=True, slots=True)
class ServerState:
    """Where one server of the catalogue stands. Plain values."""

    server: str
    source: str  # where it is configured
    presence: Presence = "listed"
    tools: int = 0
    listed_at: float | None = None  # Unix seconds of its last good list
    error: str = ""  # one sentence, why it is not `listed`


@dataclass(frozen=True, eq=False)
class Catalogue:
    """An immutable revision of all tools. Positions in `tools` identify a tool within one revision.

    `groups` are the tools of each server, sorted by name, in the order of the servers' names. A group
    that a new revision takes over unchanged stays the same object, so that what is derived from it can be
    kept.
    """

    groups: Mapping[str, tuple[Tool, ...]]
    indexed_at: str  # RFC 3339, UTC
    servers_missing: tuple[str, ...] = ()
    servers_stale: tuple[str, ...] = ()
    states: tuple[ServerState, ...] = ()
    tools: tuple[Tool, ...] = field(init=False, repr=False)
    servers: Mapping[str, range] = field(init=False, repr=False)
    """The positions of each server's tools."""
    positions: Mapping[str, int] = field(init=False, repr=False)
    """By id."""

    def __post_init__(self) -> None:
        tools: list[Tool] = []
        servers: dict[str, range] = {}
        for server, group in self.groups.items():
            servers[server] = range(len(tools), len(tools) + len(group))
            tools += group
        positions = {tool.id: position for position, tool in enumerate(tools)}
        if len(positions) != len(tools):
            raise ValueError("a catalogue needs distinct tool ids")
        object.__setattr__(self, "tools", tuple(tools))
        object.__setattr__(self, "positions", MappingProxyType(positions))
        object.__setattr__(self, "servers", MappingProxyType(servers))

    @classmethod
    def of(
        cls,
        tools: Iterable[Tool],
        *,
        servers_missing: Sequence[str] = (),
        servers_stale: Sequence[str] = (),
        indexed_at: str | None = None,
    ) -> Catalogue:
        """A catalogue of `tools`, in the order of server and name."""
        groups: dict[str, list[Tool]] = {}
        for tool in tools:
            groups.setdefault(tool.server, []).append(tool)
        return cls(
            {server: sorted_group(groups[server]) for server in sorted(groups)},
            indexed_at or now(),
            tuple(sorted(servers_missing)),
            tuple(sorted(servers_stale)),
        )

    @classmethod
    def of_states(
        cls, groups: Mapping[str, tuple[Tool, ...]], states: Sequence[ServerState], indexed_at: str
    ) -> Catalogue:
        """A catalogue of sorted `groups` of servers that stand as `states` say."""
        by_presence: dict[Presence, set[str]] = {"listed": set(), "stale": set(), "missing": set()}
        for state in states:
            by_presence[state.presence].add(state.server)
        known = {server: groups[server] for server in sorted(groups) if groups[server]}
        return cls(
            known,
            indexed_at,
            tuple(sorted(by_presence["missing"] - known.keys())),
            tuple(sorted(by_presence["stale"])),
            tuple(states),
        )

    @cached_property
    def revision(self) -> str:
        """SHA-256 over the digests of all tools in order."""
        return "sha256:" + hashlib.sha256(b"".join(tool.digest for tool in self.tools)).hexdigest()

    @cached_property
    def listing_tokens(self) -> int:
        """What an agent reads that lists every tool, at 4 bytes a token."""
        return sum(tool.size for tool in self.tools) // BYTES_PER_TOKEN

    def __len__(self) -> int:
        return len(self.tools)


def sorted_group(tools: Iterable[Tool]) -> tuple[Tool, ...]:
    """The tools of one server, by name."""
    return tuple(sorted(tools, key=lambda tool: tool.name))


def now() -> str:
    """This second, as RFC 3339 in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
