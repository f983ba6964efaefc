"""Writes docs/benchmarks.md from the result files.

    python -m benchmarks.page [--results DIR] [--out docs/benchmarks.md]

Every target of `targets.toml` stands beside the figures that result files have for it, hit or miss, also
those that nothing has measured yet. Run `benchmarks.pictures` first: the page shows what it drew.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
PAGE = FOLDER.parent / "docs" / "benchmarks.md"
NOT_TARGETS = {  # how something is measured, not what is promised of it
    "shape", "ladder", "burst.clients", "quality.unanswerable_queries", "overload.refusals_in_a_row",
    "catalogue.servers", "catalogue.tools",
}  # fmt: skip
PICTURES = {
    "ladder-throughput": "Answers a second by clients",
    "ladder-latency": "Latency by clients",
    "ladder-refusals": "Refusals by clients",
    "memory-under-load": "Memory over a run, against the plan",
    "burst": "A burst from connecting to the last answer",
}

Results = Mapping[str, dict[str, Any]]
"""Result files by name."""


@dataclass(frozen=True, slots=True)
class Figure:
    """What one result file says about a target."""

    target: dict[str, Any]
    file: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--results", type=Path, default=FOLDER / "results")
    parser.add_argument("--out", type=Path, default=PAGE)
    given = parser.parse_args()
    targets = tomllib.loads((FOLDER / "targets.toml").read_text(encoding="utf-8"))
    pictures = given.out.parent / "pictures"
    drawn = [name for name in PICTURES if (pictures / f"{name}.svg").exists()]
    text = "\n".join(page(targets, load(given.results), drawn))
    given.out.write_text(text, encoding="utf-8")
    print(f"wrote {given.out}")


def load(folder: Path) -> dict[str, dict[str, Any]]:
    """All result files that carry the common envelope."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(result, dict) and "benchmark" in result and "targets" in result:
            found[path.stem] = result
    return found


def page(targets: Mapping[str, Any], results: Results, drawn: Sequence[str]) -> Iterator[str]:
    """The page's lines."""
    yield "# Benchmarks"
    yield ""
    yield (
        "This page is generated from `benchmarks/results/*.json` by `python -m benchmarks.page`; nothing on "
        "it is written by hand. The targets stood in `benchmarks/targets.toml` before anything was measured."
    )
    yield ""
    yield from _target_table(targets, figures(results))
    ladder = {name: result for name, result in results.items() if result["benchmark"] == "ladder"}
    for name in drawn:
        yield from (f"![{PICTURES[name]}](pictures/{name}.svg)", "")
    yield from _loads(ladder)
    for result in results.values():
        if result["benchmark"] == "peers":
            yield from _peers(result)
    yield from _sources(results)


def figures(results: Results) -> dict[str, list[Figure]]:
    """All figures of each target, one for each file that has one."""
    found: dict[str, list[Figure]] = {}
    for name, result in results.items():
        for target in result["targets"]:
            found.setdefault(target["key"], []).append(Figure(target, name))
    return found


def _target_table(targets: Mapping[str, Any], found: Mapping[str, list[Figure]]) -> Iterator[str]:
    keys = [
        f"{table}.{key}"
        for table, values in targets.items()
        for key in values
        if table not in NOT_TARGETS and f"{table}.{key}" not in NOT_TARGETS
    ]
    measured = [key for key in keys if key in found]
    hits = sum(all(figure.target["hit"] for figure in found[key]) for key in measured)
    yield "## Targets"
    yield ""
    yield (
        f"{hits} hit in every file, {len(measured) - hits} missed in at least one, "
        f"{len(keys) - len(measured)} in no result file yet."
    )
    yield ""
    yield "| target | | asked | measured | | from |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for key in keys:
        table, _, name = key.partition(".")
        if key not in found:
            yield f"| `{key}` | | {targets[table][name]:,} | - | not measured | |"
        for figure in found.get(key, ()):
            told, verdict = figure.target, "hit" if figure.target["hit"] else "**miss**"
            yield (
                f"| `{key}` | {told['good']} | {told['target']:,} | {told['measured']:,} | {verdict} | "
                f"[{figure.file}](../benchmarks/results/{figure.file}.json) |"
            )
    yield ""


def _loads(ladder: Results) -> Iterator[str]:
    for name, result in ladder.items():
        yield f"## {name.replace('-', ', ').capitalize()}"
        yield ""
        yield from _conditions(result)
        columns = (
            "clients | answers/s | p50 ms | p99 ms | offered | answered | refused | failed | contaminated"
        )
        extra = "long | short p99 / alone | " if name.startswith("mixed") else ""
        yield f"| {extra}{columns} | peak MiB | limited by |"
        yield "| --- " * (11 + extra.count("|")) + "|"
        for rung in result["rungs"]:
            yield from _rung_row(rung, bool(extra))
        yield ""
        yield from _remarks(result)


def _conditions(result: dict[str, Any]) -> Iterator[str]:
    machine, told = result["hardware"], result["results"]
    where = ", ".join(machine["cards"]) or f"{machine['cpu']}, {machine['cores']} cores"
    yield f"`{result['command']}`  "
    settings = ", ".join(told.get("settings") or []) or "shipped defaults"
    yield (
        f"{result['at']}, commit {result['commit'][:12]}, {where}, {told.get('server', '')}; {settings}; "
        f"{told['drivers']} driver processes."
    )
    yield ""


def _rung_row(rung: dict[str, Any], mixed: bool) -> Iterator[str]:
    first = ""
    if mixed:
        verdict = rung["verdict"]
        ratio = "-" if verdict is None else f"{verdict['short_p99_ratio']} ({verdict['cause']})"
        first = f"{rung['long_share']:.0%} | {ratio} | "
    contaminated = "not compared" if rung["contaminated"] is None else rung["contaminated"]
    peak, limit = _shown(rung["memory_peak_mib"]), rung.get("limited_by") or "-"
    yield (
        f"| {first}{rung['clients']:,} | {rung['answers_per_s']:,} | {_shown(rung['p50_ms'])} | "
        f"{_shown(rung['p99_ms'])} | {rung['offered']:,} | {rung['answered']:,} | {rung['refused']:,} | "
        f"{rung['failed']} | {contaminated} | {peak} | {limit} |"
    )


def _remarks(result: dict[str, Any]) -> Iterator[str]:
    told = result["results"]
    if result["abort"]:
        abort = result["abort"]
        where = f"{abort['clients']:,} clients by its condition {abort['condition']}"
        yield f"**Stopped at {where}: {abort['reason']}.**"
        yield ""
    for note in told.get("without_gain", ()):
        yield f"- No gain: {note}."
    if "cold" in told:
        cold = told["cold"]
        yield (
            f"- The first row connects and asks at once: its last handshake ended after "
            f"{cold['last_handshake_s']} s (each p50 {cold['handshake_ms']['p50']} ms, p99 "
            f"{cold['handshake_ms']['p99']} ms). The others ask on connections that are open."
        )
    if told.get("neighbour_alone"):
        alone = told["neighbour_alone"]
        beside = [rung["neighbour"] for rung in result["rungs"] if rung["neighbour"]]
        worst = max((each["step_p99_ms"] or 0.0 for each in beside), default=0.0)
        yield (
            f"- The neighbour's step: p50 {alone['step_p50_ms']} ms, p99 {alone['step_p99_ms']} ms while the "
            f"server is idle, worst p99 {worst} ms under load."
        )
    yield ""


def _peers(found: dict[str, Any]) -> Iterator[str]:
    told, machine = found["results"], found["hardware"]
    yield "## A FastMCP server with BM25 search, same machine and run"
    yield ""
    yield (
        f"`{found['command']}`, {found['at']}, commit {found['commit'][:12]}, {machine['cpu']}, "
        f"{machine['cores']} cores (load average at the end {machine['load_average'][0]}). The demo "
        "catalogue, a closed loop, five tools an answer. Other work on the same cores lengthens latencies "
        "and lowers rates; CPU a call stays nearly as it is."
    )
    yield ""
    yield "| server | clients | calls/s | p50 ms | p99 ms | server CPU ms a call | bytes an answer |"
    yield "| --- " * 7 + "|"
    for name, rungs in told["load"].items():
        for rung in rungs:
            latency = rung["latency_ms"]
            yield (
                f"| {name} | {rung['clients']} | {rung['calls_per_s']:,} | {latency['p50']:,} | "
                f"{latency['p99']:,} | {rung['server_cpu_ms_per_call']:,} | {rung['bytes_per_answer']:,} |"
            )
    yield ""
    for name, each in told["unanswerable"].items():
        yield f"- {name} offers a tool for {each['offered']} of {each['asked']} requests that none serves."
    yield ""
    if told["quality"]:
        yield from _quality(told["quality"])


def _quality(sets: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    names = [key for key in next(iter(sets.values())) if key not in ("queries", "tools")]
    yield "| set | tools | queries | server | hit@1 | R@5 | nDCG@10 | C@10 |"
    yield "| --- " * 8 + "|"
    for label, each in sets.items():
        for name in names:
            values = " | ".join(f"{each[name][metric]:.3f}" for metric in ("hit@1", "R@5", "nDCG@10", "C@10"))
            yield f"| {label} | {each['tools']:,} | {each['queries']} | {name} | {values} |"
    yield ""


def _sources(results: Results) -> Iterator[str]:
    yield "## All result files"
    yield ""
    yield "| file | command | at | commit |"
    yield "| --- | --- | --- | --- |"
    for name, result in results.items():
        yield (
            f"| [{name}](../benchmarks/results/{name}.json) | `{result['command']}` | {result['at']} | "
            f"{result['commit'][:12]} |"
        )
    yield ""


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


if __name__ == "__main__":
    main()
