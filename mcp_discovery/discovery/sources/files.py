"""Tool lists from files and folders.

Forms: JSON Lines with one tool and its `server` a line; a JSON list of the same; a `tools/list` result
object with `server`; an `mcp.json` whose servers carry their tool lists inline. A broken entry is kept
out and reported with its file and line or index; the rest is served.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcp_discovery.discovery.catalogue import Found, Loaded, Problem, Tool, distinct
from mcp_discovery.discovery.validate import suspicions, unacceptable

MAX_FILE_BYTES = 512 * 1024 * 1024
LINES = (".jsonl", ".ndjson")
SUFFIXES = (".json", *LINES)


@dataclass(frozen=True, slots=True)
class _Missing:
    """A server that the source names and that no tool list was read of."""

    server: str


_Item = Found | Problem | _Missing


def load(paths: Iterable[Path], *, inspect: bool = False) -> Loaded:
    """Tools of all `paths`, in order. Never raises for what a file holds.

    `inspect` also reports suspicious definitions, which are served.
    """
    found: list[Found] = []
    problems: list[Problem] = []
    missing: set[str] = set()
    for item in (item for path in paths for item in _read(path)):
        if isinstance(item, Problem):
            problems.append(item)
        elif isinstance(item, _Missing):
            missing.add(item.server)
        else:
            found.append(item)
            if inspect:
                problems += (
                    Problem(item.entry, f"{item.tool.id!r}: {sentence}", kept=True)
                    for sentence in suspicions(item.tool)
                )
    tools, repeated = distinct(found)
    missing -= {tool.server for tool in tools}
    return Loaded(tuple(tools), (*problems, *repeated), tuple(sorted(missing)))


def _read(path: Path) -> Iterator[_Item]:
    if not path.is_dir():
        yield from _read_file(path)
        return
    files = [file for file in sorted(path.iterdir()) if file.suffix.lower() in SUFFIXES and file.is_file()]
    if not files:
        yield Problem(str(path), f"the folder holds no {', '.join(SUFFIXES)} file.")
    for file in files:
        yield from _read_file(file)


def _read_file(path: Path) -> Iterator[_Item]:
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            yield Problem(str(path), f"the file takes {size:,} bytes; at most {MAX_FILE_BYTES:,} are read.")
            return
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        yield Problem(str(path), f"the file cannot be read: {error.strerror or error}.")
        return
    except UnicodeDecodeError as error:
        yield Problem(str(path), f"the file is not UTF-8 (byte {error.start:,}).")
        return
    if not text.strip():
        yield Problem(str(path), "the file is empty.")
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
            yield _entry(_parse(line), None, f"{path}:{number}")


def _from_document(text: str, path: str) -> Iterator[_Item]:
    value = _parse(text)
    if isinstance(value, ValueError):
        yield Problem(path, f"the file is not JSON: {value}.")
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            yield _entry(entry, None, f"{path}[{index}]")
    elif isinstance(value, dict) and "mcpServers" in value:
        yield from _from_servers(value["mcpServers"], path)
    elif isinstance(value, dict) and isinstance(value.get("result"), dict):
        yield from _from_listing({"server": value.get("server"), **value["result"]}, path)
    elif isinstance(value, dict) and "tools" in value:
        yield from _from_listing(value, path)
    elif isinstance(value, dict) and "inputSchema" in value:
        yield _entry(value, None, path)
    else:
        yield Problem(path, "the file holds neither a list of tools, a tools/list result nor an mcp.json.")


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
            yield _entry(entry, server, f"{path} tools[{index}]")


def _from_servers(servers: object, path: str) -> Iterator[_Item]:
    if not isinstance(servers, dict):
        yield Problem(path, '"mcpServers" must be an object of servers by name.')
        return
    live = [name for name, server in servers.items() if not (isinstance(server, dict) and "tools" in server)]
    for name, server in servers.items():
        if name not in live:
            yield from _from_listing({"tools": server["tools"], "server": name}, path)
    if live:
        names = ", ".join(repr(name)[:80] for name in live[:5]) + (" ..." if len(live) > 5 else "")
        yield Problem(
            path,
            f"live servers are not read yet ({names}); save each server's tools/list result to a file "
            "and give that file.",
        )
        yield from map(_Missing, live)


def _entry(entry: object, server: str | None, where: str) -> Found | Problem:
    if isinstance(entry, ValueError):
        return Problem(where, f"not JSON: {entry}.")
    if not isinstance(entry, dict):
        return Problem(where, "a tool must be an object.")
    definition = entry
    if server is None:
        definition = {key: value for key, value in entry.items() if key != "server"}
        server = entry.get("server")
    tool = Tool(server=server, name=entry.get("name"), definition=definition)  # type: ignore[arg-type]
    reason = unacceptable(tool)
    if reason is None:
        return Found(tool, where)
    known = f" (tool {tool.name!r:.80})" if isinstance(tool.name, str) and tool.name else ""
    return Problem(where, reason.removesuffix(".") + f"{known}.")


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
