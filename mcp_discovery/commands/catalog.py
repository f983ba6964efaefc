"""`catalog add | list | check`: what the sources hold, which servers answer, and what is wrong with them."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import anyio

from engine.errors import ConfigError
from mcp_discovery.commands.common import printable, settings, sorted_places, table
from mcp_discovery.config import DEFAULT_FILE
from mcp_discovery.discovery.catalogue import Catalogue, Found, Problem, ServerState
from mcp_discovery.discovery.live import Sources
from mcp_discovery.discovery.sources.files import remarks
from mcp_discovery.following import sources_of
from mcp_discovery.settings_file import with_catalogue

WRONG = 1


@dataclass(frozen=True)
class _Seen:
    catalogue: Catalogue
    states: tuple[ServerState, ...]
    problems: tuple[Problem, ...]

    @property
    def unreachable(self) -> list[ServerState]:
        return [state for state in self.states if state.presence != "listed"]


def run(arguments: argparse.Namespace) -> int:
    sources = sources_of(settings(arguments))
    with contextlib.nullcontext() if arguments.debug else _silence():  # all is printed below
        seen = _seen(sources, inspect=arguments.action == "check", wait_s=_patience(arguments))
    if arguments.json:
        print(json.dumps(_as_json(seen), indent=2, ensure_ascii=False))
    elif arguments.action == "check":
        _print_problems(seen)
    else:
        _print_tools(seen, with_tools=arguments.action == "list")
    if arguments.action == "add":
        return _add(arguments, seen)
    # `check` is for scripts too: entries that are not served and servers that do not answer make it fail.
    is_wrong = bool(seen.unreachable) or any(not problem.kept for problem in seen.problems)
    return WRONG if arguments.action == "check" and is_wrong else 0


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    logger = logging.getLogger("mcp_discovery.discovery")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _patience(arguments: argparse.Namespace) -> float:
    return 0.0 if arguments.offline else float(arguments.wait_s)


def _seen(sources: Sources, *, inspect: bool, wait_s: float) -> _Seen:
    """What the sources hold once every live server has answered or failed, or after `wait_s`."""
    catalogue = sources.load()
    if wait_s and any(state.presence != "listed" for state in catalogue.states):
        asyncio.run(_ask(sources, wait_s))
    catalogue = sources.current()
    found = (Found(tool, tool.id) for tool in catalogue.tools) if inspect else ()
    return _Seen(catalogue, tuple(sources.states()), (*sources.problems, *remarks(found)))


async def _ask(sources: Sources, wait_s: float) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(sources.run, lambda catalogue: None)
        with anyio.move_on_after(wait_s):
            await sources.tried()
        group.cancel_scope.cancel()


def _print_tools(seen: _Seen, *, with_tools: bool) -> None:
    if with_tools:
        rows = ((tool.server, tool.name, printable(tool.description)) for tool in seen.catalogue.tools)
        print(table(rows, ("server", "tool", "description")))
        print()
    rows_of_servers = (
        (state.server, state.presence, f"{state.tools:,}", _age(state), printable(state.error))
        for state in seen.states
    )
    print(table(rows_of_servers, ("server", "state", "tools", "listed", "error")))
    print(_summary(seen))


def _age(state: ServerState) -> str:
    return "never" if state.listed_at is None else f"{max(0.0, time.time() - state.listed_at):,.0f} s ago"


def _print_problems(seen: _Seen) -> None:
    for problem in seen.problems:
        kept = "served" if problem.kept else "left out"
        print(f"{kept}: {printable(str(problem))}")
    for state in seen.unreachable:
        print(f"{state.presence}: {printable(f'{state.server}: {state.error}')}.")
    left_out = sum(not problem.kept for problem in seen.problems)
    print(
        f"{_summary(seen)}; {left_out:,} entries left out, {len(seen.problems) - left_out:,} remarks, "
        f"{len(seen.unreachable):,} servers that do not answer"
    )


def _summary(seen: _Seen) -> str:
    catalogue = seen.catalogue
    return (
        f"{len(catalogue):,} tools of {len(catalogue.servers):,} servers, "
        f"{catalogue.listing_tokens:,} tokens to list, revision {catalogue.revision[:19]}"
    )


def _as_json(seen: _Seen) -> dict[str, object]:
    catalogue = seen.catalogue
    return {
        "revision": catalogue.revision,
        "tools": [tool.id for tool in catalogue.tools],
        "listing_tokens": catalogue.listing_tokens,
        "servers": {name: len(held) for name, held in catalogue.servers.items()},
        "servers_missing": list(catalogue.servers_missing),
        "servers_stale": list(catalogue.servers_stale),
        "states": [asdict(state) for state in seen.states],
        "problems": [
            {"entry": problem.entry, "sentence": problem.sentence, "served": problem.kept}
            for problem in seen.problems
        ],
    }


def _add(arguments: argparse.Namespace, seen: _Seen) -> int:
    """Puts the sources into the settings file, where they give or name anything."""
    if not seen.states:
        raise ConfigError("the sources hold no tool and name no server; nothing was added")
    paths, urls = sorted_places(arguments.catalog)
    file: Path = arguments.config or DEFAULT_FILE
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    added = with_catalogue(text, list(map(str, paths)), urls)
    if added == text:
        print(f"{file} names them already")
    else:
        file.write_text(added, encoding="utf-8")
        print(f"added to {file}")
    return 0
