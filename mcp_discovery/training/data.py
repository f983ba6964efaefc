"""Tool sets on disk: a catalogue, and requests labelled with the tools that serve them.

A set is a folder:

    catalogue.jsonl   one tool a line: {"server", "name", "description", "inputSchema"}
    queries.jsonl     one request a line: {"id", "query", "relevant": ["server/name", ...]};
                      optional "alt" {label: [key, ...]} and "also_ok" [key, ...]; optional file

The key of a tool is `server/name`, unique within its set.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mcp_discovery.discovery.catalogue import Tool


class DataError(ValueError):
    """A set that cannot be read; the message names the file and the line."""


@dataclass(frozen=True, slots=True)
class Query:
    id: str
    text: str
    relevant: tuple[str, ...]
    alt: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    also_ok: tuple[str, ...] = ()

    @property
    def acceptable(self) -> frozenset[str]:
        """Every key that must never serve as a wrong answer to this request."""
        others = [key for keys in self.alt.values() for key in keys]
        return frozenset((*self.relevant, *others, *self.also_ok))


@dataclass(frozen=True, slots=True)
class ToolSet:
    name: str
    tools: tuple[Tool, ...]
    queries: tuple[Query, ...] = ()


def find_sets(folders: Iterable[Path]) -> list[Path]:
    """The set folders among `folders`: each is a set itself or holds sets."""
    found: list[Path] = []
    for folder in folders:
        if (folder / "catalogue.jsonl").is_file():
            found.append(folder)
            continue
        inner = sorted(path.parent for path in folder.glob("*/catalogue.jsonl"))
        if not inner:
            raise DataError(f"{folder} is not a tool set: it has no catalogue.jsonl, nor does a folder in it")
        found.extend(inner)
    return found


def load_set(folder: Path) -> ToolSet:
    """Reads one set. Raises DataError where a line is not in the format or a label is unknown."""
    catalogue, labelled = folder / "catalogue.jsonl", folder / "queries.jsonl"
    tools = tuple(_tool(row, where) for row, where in _rows(catalogue))
    keys = {tool.id for tool in tools}
    if len(keys) < len(tools):
        raise DataError(f"{catalogue} names {len(tools) - len(keys)} tools twice: keep each key once")
    queries = tuple(_query(row, where, keys) for row, where in _rows(labelled)) if labelled.is_file() else ()
    return ToolSet(folder.name, tools, queries)


def _rows(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{where} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"{where} is not a JSON object")
        yield row, where


def _tool(row: dict[str, Any], where: str) -> Tool:
    server, name = row.get("server", ""), row.get("name")
    description, schema = row.get("description") or "", row.get("inputSchema") or {}
    if not isinstance(name, str) or not name:
        raise DataError(f'{where} has no "name"')
    if not isinstance(server, str) or not isinstance(description, str) or not isinstance(schema, dict):
        raise DataError(f'{where}: "server" and "description" must be strings, "inputSchema" an object')
    definition = {**row, "description": description, "inputSchema": schema}
    return Tool(server, name, definition)


def _query(row: dict[str, Any], where: str, keys: set[str]) -> Query:
    text, relevant = row.get("query"), row.get("relevant")
    if not isinstance(text, str) or not isinstance(relevant, list) or not relevant:
        raise DataError(f'{where} needs "query", a string, and "relevant", a list of tool keys')
    unknown = [key for key in relevant if key not in keys]
    if unknown:
        raise DataError(f"{where} names a tool that the catalogue does not have: {unknown[0]}")
    alt = {label: tuple(others) for label, others in (row.get("alt") or {}).items()}
    return Query(str(row.get("id", "")), text, tuple(relevant), alt, tuple(row.get("also_ok") or ()))


def split_set(each: ToolSet, share: float, seed: int) -> tuple[ToolSet, ToolSet]:
    """(to train on, held out): about `share` of the servers with their tools, or of the tools where there
    are fewer than ten servers. A request whose tools are on both sides is in neither."""
    by_tool = len({tool.server for tool in each.tools}) < 10
    units = sorted({tool.id if by_tool else tool.server for tool in each.tools})
    held = set(random.Random(f"{seed}/{each.name}").sample(units, max(round(len(units) * share), 1)))
    away = {tool.id for tool in each.tools if (tool.id if by_tool else tool.server) in held}
    return _part(each, {tool.id for tool in each.tools} - away), _part(each, away)


def _part(each: ToolSet, keys: set[str]) -> ToolSet:
    tools = tuple(tool for tool in each.tools if tool.id in keys)
    queries = tuple(
        replace(
            query,
            alt={label: tuple(key for key in others if key in keys) for label, others in query.alt.items()},
        )
        for query in each.queries
        if keys.issuperset(query.relevant)
    )
    return ToolSet(each.name, tools, queries)


def pooled(name: str, first: ToolSet, others: Iterable[ToolSet]) -> ToolSet:
    """The requests of `first` against its tools and those of `others`, each key once."""
    tools = {tool.id: tool for each in (first, *others) for tool in each.tools}
    tools |= {tool.id: tool for tool in first.tools}
    return ToolSet(name, tuple(tools.values()), first.queries)


def load_idle(path: Path) -> list[tuple[str, frozenset[str]]]:
    """Requests that nothing serves, each with the names of the sets it was written for."""
    found = []
    for row, where in _rows(path):
        text, names = row.get("query"), row.get("catalogues")
        if not isinstance(text, str) or not isinstance(names, list):
            raise DataError(f'{where} needs "query", a string, and "catalogues", a list of set names')
        found.append((text, frozenset(map(str, names))))
    return found
