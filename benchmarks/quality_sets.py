"""The data of the quality benchmark: labelled sets, and requests that no tool of a catalogue serves."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from mcp_discovery.discovery.catalogue import Catalogue
from mcp_discovery.discovery.sources import files
from mcp_discovery.evaluate import LabelledSet

SEED = 13
DEMO = Path(__file__).resolve().parent.parent / "mcp_discovery" / "data" / "demo"
UNANSWERABLE = Path(__file__).parent / "data" / "unanswerable.jsonl"


@dataclass(frozen=True, slots=True)
class Unanswerable:
    """A request and the names of the catalogues that hold no tool for it."""

    id: str
    text: str
    catalogues: frozenset[str]


def labelled_folders(data: Iterable[Path]) -> list[Path]:
    """Folders that are labelled sets themselves, and those inside the others, by name."""
    found = []
    for folder in data:
        inside = [folder, *sorted(child for child in folder.iterdir() if child.is_dir())]
        found += [each for each in inside if (each / "queries.jsonl").is_file()]
    if not found:
        raise SystemExit("there is no labelled set (catalogue.jsonl and queries.jsonl) in --data")
    return found


def catalogue_size(name: str, folder: Path | None) -> int:
    """Tools of a labelled set, or of the demo catalogue."""
    if folder is not None:
        return len(Catalogue.of(LabelledSet.load(folder).tools).tools)
    return len(files.load([DEMO]).tools) if name == "demo" else 0


def sampled(folder: Path, limit: int | None) -> LabelledSet:
    """The set as `LabelledSet.load` has it, and of its queries a seeded sample where `limit` is less."""
    labelled = LabelledSet.load(folder)
    if limit is None or limit >= len(labelled.queries):
        return labelled
    return replace(labelled, queries=tuple(random.Random(SEED).sample(labelled.queries, limit)))


def unanswerable() -> list[Unanswerable]:
    lines = UNANSWERABLE.read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in lines if line.strip()]
    return [Unanswerable(entry["id"], entry["query"], frozenset(entry["catalogues"])) for entry in entries]
