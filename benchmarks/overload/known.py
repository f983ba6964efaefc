"""The queries of a run in three sizes, and the answer that each gets alone.

    short   a query as people write it, 16 candidates
    wide    the same for 20 tools, so that 32 candidates are scored
    long    4,000 characters for 20 tools: 32 candidates with 256 tokens of query each

Answers alone come from `benchmarks.references`, in float32. They are computed once and kept in a file.
"""

from __future__ import annotations

import json
import multiprocessing
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.contamination import Answer, Reference, Tolerance, compare
from benchmarks.ladder import queries
from benchmarks.references import DEMO, Size, ask_in_sizes, key_of
from mcp_discovery.assemble import DiscoveryModel, usual_candidates
from mcp_discovery.discovery.catalogue import Catalogue
from mcp_discovery.discovery.sources import files

NARROW, WIDE = usual_candidates(True), 2 * usual_candidates(True)
SIZES = {"short": Size(NARROW, 10), "wide": Size(WIDE, 20)}
LIMITS = {"short": 5, "wide": 20, "long": 20}


@dataclass(frozen=True, slots=True)
class Known:
    """Queries by size; references by `SIZES` and the key of a text: "wide 0123..."."""

    texts: Mapping[str, Sequence[str]]
    references: Mapping[str, Reference]
    tolerance: Tolerance

    def arguments(self, size: str, number: int) -> dict[str, Any]:
        """Of a call with the query `number` of its size."""
        limit = {} if size == "short" else {"limit": LIMITS[size]}
        return {"query": self.texts[size][number], **limit}

    def differs(self, size: str, number: int, structured: Mapping[str, Any]) -> str | None:
        """What is wrong with an answer, "" where nothing is; None where its reference is not known."""
        candidates = "short" if size == "short" else "wide"
        reference = self.references.get(f"{candidates} {key_of(self.texts[size][number])}")
        if reference is None:
            return None
        return compare(reference, Answer.of(structured, LIMITS[size]), self.tolerance).sentence


def texts(short: int, long: int) -> dict[str, list[str]]:
    """So many different queries: real ones spread over the file, and long ones made of many."""
    real = queries.read(queries.QUERIES)
    some = real[:: max(1, len(real) // short)][:short]
    source = random.Random(1)
    return {
        "short": some,
        "wide": some,
        "long": [queries.long_query(real, source) for _ in range(long)],
    }


def known(short: int, long: int, file: Path, threads: int) -> Known:
    """With references out of `file`, to which those that are missing are added."""
    wanted = texts(short, long)
    model = DiscoveryModel.of(None)
    header = _header(model)
    held = _read(file, header)
    for own in (wanted["short"], wanted["long"]):
        missing = [text for text in own if f"wide {key_of(text)}" not in held]
        if missing:
            print(f"the answers to {len(missing)} queries are computed alone", flush=True)
            held |= _compute(missing, threads, file.with_suffix(".vectors"))
            file.write_text(json.dumps({"header": header, "answers": held}) + "\n", encoding="utf-8")
    return Known(wanted, {key: _reference(entry) for key, entry in held.items() if entry}, Tolerance())


def _compute(missing: Sequence[str], threads: int, vectors: Path) -> dict[str, Any]:
    """Of both numbers of candidates, in a process that ends with it: it takes as much memory as a server."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        sizes = list(SIZES.values())
        answers = pool.submit(ask_in_sizes, None, threads, vectors, missing, sizes).result()
    return {
        f"{name} {key_of(text)}": None if reference is None else _entry(reference)
        for text, references in zip(missing, answers, strict=True)
        for name, reference in zip(SIZES, references, strict=True)
    }


def _header(model: DiscoveryModel) -> dict[str, Any]:
    """What the answers depend on besides their queries."""
    adapter = model.adapter
    return {
        "model": model.sha256,
        "adapter": adapter.sha256 if adapter else "",
        "calibration": asdict(adapter.calibration) if adapter else None,
        "catalogue": Catalogue.of(files.load([DEMO]).tools).revision,
    }


def _read(file: Path, header: Mapping[str, Any]) -> dict[str, Any]:
    """The answers in the file; none where it was computed with another model or catalogue."""
    if not file.exists():
        return {}
    content = json.loads(file.read_text(encoding="utf-8"))
    return dict(content["answers"]) if content["header"] == dict(header) else {}


def _entry(reference: Reference) -> dict[str, Any]:
    return {**asdict(reference), "uncertain": sorted(reference.uncertain)}


def _reference(entry: Mapping[str, Any]) -> Reference:
    lists = {"tools": tuple(entry["tools"]), "scores": tuple(entry["scores"])}
    return Reference(**{**entry, **lists, "uncertain": frozenset(entry["uncertain"])})
