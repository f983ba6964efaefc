"""Tool lists from files and folders.

Forms: JSON Lines with one tool and its `server` a line; a JSON list of the same; a `tools/list` result
object with `server`; an `mcp.json`, whose servers carry their tool lists inline or are live ones. A
broken entry is kept out and reported with its file and line or index; the rest is served.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcp_discovery.discovery.catalogue import Found, Loaded, Problem, distinct
from mcp_discovery.discovery.sources.entries import checked
from mcp_discovery.discovery.validate import suspicions

MAX_FILE_BYTES = 512 * 1024 * 1024
LINES = (".jsonl", ".ndjson")
SUFFIXES = (".json", *LINES)


@dataclass(frozen=True, slots=True)
class _Live:
    """A live server's entry of an `mcp.json`."""

    name: str
    entry: Any


@dataclass(frozen=True, slots=True)
class _Unreadable:
    """The file as a whole gives nothing."""

    problem: Problem


_Item = Found | Problem | _Live | _Unreadable


@dataclass(frozen=True, slots=True)
class Content:
    """What one file holds. `live` are the entries of servers to ask, by name, as configured."""

    found: tuple[Found, ...] = ()
    problems: tuple[Problem, ...] = ()
    live: Mapping[str, Any] | None = None
    is_readable: bool = True


def load(paths: Iterable[Path], *, inspect: bool = False) -> Loaded:
    """Tools of all `paths`, in order; live servers are not asked. Never raises for what a file holds.

    `inspect` also reports suspicious definitions, which are served.
    """
    found: list[Found] = []
    problems: list[Problem] = []
    missing: set[str] = set()
    for path in paths:
        for content in map(read, files_at(path)):
            found += content.found
            problems += content.problems
            missing.update(content.live or ())
    if inspect:
        problems += remarks(found)
    tools, repeated = distinct(found)
    missing -= {tool.server for tool in tools}
    return Loaded(tuple(tools), (*problems, *repeated), tuple(sorted(missing)))


def remarks(found: Iterable[Found]) -> Iterator[Problem]:
    """What is suspicious about tools that are served."""
    for item in found:
        for sentence in suspicions(item.tool):
            yield Problem(item.entry, f"{item.tool.id!r}: {sentence}", kept=True)


def files_at(path: Path) -> list[Path]:
    """The tool files of `path`, a file or a folder, by name. A path that gives none stands for itself:
    `read` says what is wrong with it."""
    try:
        if path.is_dir():
            return [
                file for file in sorted(path.iterdir()) if file.suffix.lower() in SUFFIXES and file.is_file()
            ] or [path]
    except OSError:
        pass
    return [path]


def read(path: Path) -> Content:
    """What the file at `path` holds."""
    found: list[Found] = []
    problems: list[Problem] = []
    live: dict[str, Any] = {}
    is_readable = True
    for item in _read_file(path):
        match item:
            case Found():
                found.append(item)
            case _Live():
                live[item.name] = item.entry
            case _Unreadable():
                is_readable = False
                problems.append(item.problem)
            case Problem():
                problems.append(item)
    return Content(tuple(found), tuple(problems), live, is_readable)


def _read_file(path: Path) -> Iterator[_Item]:
    def unreadable(sentence: str) -> _Unreadable:
        return _Unreadable(Problem(str(path), sentence))

    try:
        about = path.stat()
        if stat.S_ISDIR(about.st_mode):
            next(path.iterdir(), None)
            yield unreadable(f"the folder holds no {', '.join(SUFFIXES)} file.")
            return
        if not stat.S_ISREG(about.st_mode):  # opening a pipe or a device may wait for ever
            yield unreadable("this is neither a file nor a folder.")
            return
        if about.st_size > MAX_FILE_BYTES:
            yield unreadable(f"the file takes {about.st_size:,} bytes; at most {MAX_FILE_BYTES:,} are read.")
            return
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        yield unreadable(f"it cannot be read: {error.strerror or error}.")
        return
    except UnicodeDecodeError as error:
        yield unreadable(f"the file is not UTF-8 (byte {error.start:,}).")
        return
    if not text.strip():
        yield unreadable("the file is empty.")
    elif path.suffix.lower() in LINES or _is_lines(text):
        yield from _from_lines(text, str(path))
    else:
        yield from _from_document(text, str(path))


def _is_lines(text: str) -> bool:
    """Whether the first line is a JSON object by itself and more follows."""
    first, _, rest = text.strip().partition("\n")
    return bool(rest.strip()) and isinstance(_parse(first), dict)


def _from_lines(text: str, path: str) -> Iterator[_Item]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield checked(_parse(line), None, f"{path}:{number}")


def _from_document(text: str, path: str) -> Iterator[_Item]:
    value = _parse(text)
    if isinstance(value, ValueError):
        yield _Unreadable(Problem(path, f"the file is not JSON: {value}."))
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            yield checked(entry, None, f"{path}[{index}]")
    elif isinstance(value, dict) and (key := _servers_key(value)) is not None:
        yield from _from_servers(value[key], path, key)
    elif isinstance(value, dict) and isinstance(value.get("result"), dict):
        yield from _from_listing({"server": value.get("server"), **value["result"]}, path)
    elif isinstance(value, dict) and "tools" in value:
        yield from _from_listing(value, path)
    elif isinstance(value, dict) and "inputSchema" in value:
        yield checked(value, None, path)
    else:
        sentence = "the file holds neither a list of tools, a tools/list result nor an mcp.json."
        yield _Unreadable(Problem(path, sentence))


def _servers_key(value: Mapping[str, Any]) -> str | None:
    """Under which key an `mcp.json` lists its servers: desktop clients and editors differ."""
    if "mcpServers" in value:
        return "mcpServers"
    servers = value.get("servers")
    reached = isinstance(servers, dict) and all(
        isinstance(entry, dict) and ("command" in entry or "url" in entry) for entry in servers.values()
    )
    return "servers" if reached else None


def _from_listing(listing: Mapping[str, Any], path: str) -> Iterator[_Item]:
    server, tools = listing.get("server"), listing.get("tools")
    if not isinstance(server, str) or not server.strip():
        yield Problem(
            path, 'the tools/list result needs a "server" beside "tools" that says whose tools these are.'
        )
    elif not isinstance(tools, list):
        yield Problem(path, f'"tools" of server {server!r:.80} must be a list.')
    else:
        for index, entry in enumerate(tools):
            yield checked(entry, server, f"{path} tools[{index}]")


def _from_servers(servers: object, path: str, key: str) -> Iterator[_Item]:
    if not isinstance(servers, dict):
        yield Problem(path, f'"{key}" must be an object of servers by name.')
        return
    for name, server in servers.items():
        if isinstance(server, dict) and "tools" in server:
            yield from _from_listing({"tools": server["tools"], "server": name}, path)
        else:
            yield _Live(name, server)


def _parse(text: str) -> Any:
    """The value, or the ValueError that says why `text` is not JSON."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        return ValueError("it is nested too deeply")
    except ValueError as error:
        return error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
