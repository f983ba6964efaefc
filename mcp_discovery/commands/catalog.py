"""`catalog list | check`: what the tool lists hold, and what is wrong with them."""

from __future__ import annotations

import argparse
import json

from mcp_discovery.commands.common import printable, settings, table
from mcp_discovery.discovery.catalogue import Catalogue, Loaded
from mcp_discovery.discovery.sources import files

WRONG = 1


def run(arguments: argparse.Namespace) -> int:
    paths = settings(arguments).catalogue_paths()
    check = arguments.action == "check"
    loaded = files.load(paths, inspect=check)
    catalogue = Catalogue.of(loaded.tools, servers_missing=loaded.servers_missing)
    if arguments.json:
        print(json.dumps(_as_json(catalogue, loaded), indent=2, ensure_ascii=False))
    elif check:
        _print_problems(catalogue, loaded)
    else:
        rows = ((tool.server, tool.name, printable(tool.description)) for tool in catalogue.tools)
        print(table(rows, ("server", "tool", "description")))
        print(_summary(catalogue))
    # `check` is for scripts too: entries that are not served make it fail.
    return WRONG if check and any(not problem.kept for problem in loaded.problems) else 0


def _print_problems(catalogue: Catalogue, loaded: Loaded) -> None:
    for problem in loaded.problems:
        kept = "served" if problem.kept else "left out"
        print(f"{kept}: {printable(str(problem))}")
    left_out = sum(not problem.kept for problem in loaded.problems)
    print(
        f"{_summary(catalogue)}; {left_out:,} entries left out, {len(loaded.problems) - left_out:,} remarks"
    )


def _summary(catalogue: Catalogue) -> str:
    return (
        f"{len(catalogue):,} tools of {len(catalogue.servers):,} servers, revision {catalogue.revision[:19]}"
    )


def _as_json(catalogue: Catalogue, loaded: Loaded) -> dict[str, object]:
    return {
        "revision": catalogue.revision,
        "tools": [tool.id for tool in catalogue.tools],
        "servers": {name: len(held) for name, held in catalogue.servers.items()},
        "servers_missing": list(loaded.servers_missing),
        "problems": [
            {"entry": problem.entry, "sentence": problem.sentence, "served": problem.kept}
            for problem in loaded.problems
        ],
    }
