"""`python -m benchmarks.ladder`: see benchmarks/ladder/options.py."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.ladder.options import parse
from benchmarks.ladder.parts import Part, Run
from benchmarks.ladder.start import Stage, stage
from benchmarks.report import FOLDER, write
from engine.errors import EngineError

NEIGHBOUR_ALONE_S = 3.0


def main() -> int:
    given = parse()
    stopped = []
    try:
        with stage(given) as found:
            for part in _parts(given, found):
                _write(given, found, part)
                if part.abort is not None:
                    stopped.append(part)
                    told = part.abort
                    print(f"ABORT {part.name} at {told.clients} clients: {told.condition}: {told.sentence}")
    except (ValueError, OSError, RuntimeError, EngineError) as error:
        print(f"benchmarks.ladder: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return 1 if stopped else 0


def _parts(given: argparse.Namespace, found: Stage) -> Iterator[Part]:
    """The parts asked for: the stub, then all others beside each state of the neighbour."""
    facts = found.facts
    run = Run(given, found.site, found.settings, facts.get("device") == "cuda", facts.get("ready_s"))
    if "stub" in given.parts:
        yield run.stub()
    for mode in given.modes if found.site.neighbour else [""]:
        alone = _set_neighbour(found, mode)
        if "ladder" in given.parts:
            yield run.ladder(mode, alone)
        if "burst" in given.parts:
            yield run.burst(mode, alone)
        if "mixed" in given.parts and (not mode or mode in given.mixed_modes):
            yield run.mixed(mode)


def _set_neighbour(found: Stage, mode: str) -> float | None:
    """Sets the neighbour's state; its p99 of a step beside our idle server, where it is busy."""
    neighbour = found.site.neighbour
    if neighbour is None:
        return None
    if mode == "idle":
        neighbour.idle()
        return None
    neighbour.busy()
    time.sleep(NEIGHBOUR_ALONE_S)
    alone = found.facts["neighbour_alone"] = neighbour.report()
    print(f"neighbour, while the server is idle: {alone}", flush=True)
    return float(alone["step_p99_ms"])


def _write(given: argparse.Namespace, found: Stage, part: Part) -> None:
    trace, site = found.site.trace, found.site
    results: dict[str, Any] = {**found.facts, **part.results, "drivers": site.drivers.count}
    if trace is not None and part.name != "stub":
        results["memory"] = trace.as_json(given.allowance_mib)
    top = {"rungs": part.rungs, "abort": part.abort.as_json() if part.abort else None}
    write("ladder", results, part.targets, out=_path(given, part.name), top=top)


def _path(given: argparse.Namespace, name: str) -> Path:
    if given.out is not None:
        return Path(given.out)
    return Path(given.out_dir or FOLDER / "results") / f"{name}.json"


if __name__ == "__main__":
    sys.exit(main())
