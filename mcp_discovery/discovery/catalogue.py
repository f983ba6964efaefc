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
from typing import Any

Definition = Mapping[str, Any]


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

    @property
    def id(self) -> str:
        return f"{self.server}/{self.name}"

    @property
    def title(self) -> str | None:
        return self.definition.get("title")

    @property
    def description(self) -> str:
        return self.definition.get("description") or ""

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
    def digest(self) -> bytes:
        """SHA-256 of server and definition in canonical JSON."""
        return hashlib.sha256(canonical([self.server, self.definition])).digest()


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


@dataclass(frozen=True, eq=False)
class Catalogue:
    """An immutable snapshot of tools. Positions in `tools` identify a tool within one revision."""

    tools: tuple[Tool, ...]
    indexed_at: str  # RFC 3339, UTC
    servers_missing: tuple[str, ...] = ()
    positions: Mapping[str, int] = field(init=False, repr=False)
    servers: Mapping[str, tuple[int, ...]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        positions = {tool.id: position for position, tool in enumerate(self.tools)}
        if len(positions) != len(self.tools):
            raise ValueError("a catalogue needs distinct tool ids")
        servers: dict[str, list[int]] = {}
        for position, tool in enumerate(self.tools):
            servers.setdefault(tool.server, []).append(position)
        object.__setattr__(self, "positions", MappingProxyType(positions))
        object.__setattr__(
            self, "servers", MappingProxyType({name: tuple(held) for name, held in servers.items()})
        )

    @classmethod
    def of(
        cls, tools: Iterable[Tool], *, servers_missing: Sequence[str] = (), indexed_at: str | None = None
    ) -> Catalogue:
        """A catalogue of `tools`, in the order of server and name."""
        ordered = tuple(sorted(tools, key=lambda tool: (tool.server, tool.name)))
        now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        return cls(ordered, indexed_at or now, tuple(sorted(servers_missing)))

    @cached_property
    def revision(self) -> str:
        """SHA-256 over the digests of all tools in order."""
        return "sha256:" + hashlib.sha256(b"".join(tool.digest for tool in self.tools)).hexdigest()

    def get(self, id: str) -> Tool | None:
        position = self.positions.get(id)
        return None if position is None else self.tools[position]

    def __len__(self) -> int:
        return len(self.tools)
