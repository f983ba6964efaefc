"""The tools of all labelled sets as one catalogue, and queries drawn from all of them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

SEED = 17


def catalogue_files(data: Path) -> list[Path]:
    """The `catalogue.jsonl` of each set in `data`, at any depth, by path."""
    found = sorted(data.rglob("catalogue.jsonl"))
    if not found:
        raise SystemExit(f"there is no catalogue.jsonl in {data}")
    return found


def pooled(files: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """The entries of all files, the servers of each kept apart: one whose name an earlier file has too is
    called `name@set`, with the split where two splits have a set of that name.

    So a definition that several sets hold stands on several servers, as one program that is configured
    twice does, and is ranked once.
    """
    taken: set[str] = set()
    sets = [file.parent.name for file in files]
    for file in files:
        entries = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
        name = file.parent.name
        label = name if sets.count(name) == 1 else f"{file.parent.parent.name}-{name}"
        servers = {entry["server"] for entry in entries}
        renamed = {server: f"{server}@{label}" if server in taken else server for server in servers}
        taken.update(renamed.values())
        for entry in entries:
            yield {**entry, "server": renamed[entry["server"]]}


def write_pool(files: Sequence[Path], target: Path) -> None:
    """The pool as a tool list of JSON Lines."""
    with target.open("w", encoding="utf-8") as out:
        for entry in pooled(files):
            out.write(json.dumps(entry, ensure_ascii=False) + "\n")


def drawn_queries(data: Path, count: int) -> list[str]:
    """Up to `count` distinct queries, one of each set in turn, in an order that is always the same."""
    rows = []
    for file in sorted(data.rglob("queries.jsonl")):
        lines = file.read_text(encoding="utf-8").split("\n")
        texts = [json.loads(line)["query"] for line in lines if line.strip()]
        random.Random(SEED).shuffle(texts)
        rows.append(texts)
    if not rows:
        raise SystemExit(f"there is no queries.jsonl in {data}")
    turns = (texts[turn] for turn in range(max(map(len, rows))) for texts in rows if turn < len(texts))
    distinct = dict.fromkeys(turns)
    return [query for query, _ in zip(distinct, range(count), strict=False)]
