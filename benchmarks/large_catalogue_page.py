"""Writes a generated section of docs/catalogue.md from results of benchmarks.large_catalogue.

python -m benchmarks.large_catalogue_page [--results FOLDER] [--page docs/catalogue.md]

Every file `large-catalogue*.json` of the folder is a column.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.marked import replaced

FOLDER = Path(__file__).resolve().parent
BEGIN = "<!-- begin: python -m benchmarks.large_catalogue_page -->"
STAGES = {"words": "by words", "vectors": "by vectors", "engine": "engine"}

Files = Mapping[str, dict[str, Any]]
"""Results of `benchmarks.large_catalogue` by the stem of their file."""


def section(files: Files) -> Iterator[str]:
    """For people, in Markdown."""
    pool = next(iter(files.values()))["results"]["pool"]
    yield (
        f"All tools of the labelled and the unlabelled sets pooled: {pool['tools']:,} tools of "
        f"{pool['servers']:,} servers, {pool['definitions']:,} distinct definitions; one that several sets "
        "hold stands on several servers and is ranked once. Without a transport."
    )
    yield ""
    for name, each in files.items():
        yield f"- {_conditions(name, each)}"
    yield from ("", *_index(files), "", *_calls(files))
    yield ""
    for name, each in files.items():
        yield from _remarks(name, each["results"])


def _device(each: Mapping[str, Any]) -> str:
    machine = each["hardware"]
    if "cpu" in each["results"]["kernels"] or not machine["cards"]:
        return f"{machine['cpu']}, {machine['cores']} cores"
    return str(machine["cards"][0]).split(",")[0]


def _conditions(name: str, each: Mapping[str, Any]) -> str:
    told, loads = each["results"], each["hardware"]["load_average"]
    return (
        f"**{_device(each)}** ([{name}](../benchmarks/results/{name}.json), {each['at']}, commit "
        f"{each['commit'][:12]}): {told['kernels']}, {told['candidates']} candidates, {told['pages']:,} "
        f"pages; load average {loads[0]} at the end."
    )


def _index(files: Files) -> Iterator[str]:
    told = [each["results"] for each in files.values()]
    yield "| | " + " | ".join(_device(each) for each in files.values()) + " |"
    yield "| --- " * (len(told) + 1) + "|"
    rows = {
        "definitions read and checked": [f"{each['words']['read_s']:.1f} s" for each in told],
        "indexed by words, prefixes tokenised": [f"{each['words']['index_s']:.1f} s" for each in told],
        "engine loaded": [f"{each['words']['engine_ready_s']:.1f} s" for each in told],
        "first call answered, `degraded`": [f"{each['words']['answers_after_s']:.1f} s" for each in told],
        "all vectors": [_vectors(each["vectors"]) for each in told],
        "tools, tokens a second": [
            f"{each['vectors']['tools_per_s']:,} and {each['vectors']['tokens_per_s']:,}" for each in told
        ],
        "host memory of the definitions": [f"{each['memory_mib']['catalogue']:.0f} MiB" for each in told],
        "of the index": [f"{each['memory_mib']['index']:.0f} MiB" for each in told],
        "of the vectors": [f"{each['memory_mib']['vectors']:.0f} MiB" for each in told],
        "vectors on disk": [f"{each['vectors']['cache_mib']:.0f} MiB" for each in told],
    }
    for label, cells in rows.items():
        yield f"| {label} | " + " | ".join(cells) + " |"


def _vectors(told: Mapping[str, Any]) -> str:
    if told["computed"] == told["tools"]:
        return f"{told['all_s']:,.0f} s"
    return f"{told['all_s']:,.0f} s, extrapolated from {told['computed']:,} of {told['tools']:,} tools"


def _calls(files: Files) -> Iterator[str]:
    yield (
        "p50 / p99 in ms. A cold call finds hardly any page of its candidates, a warm one is the same again; "
        "where several ask at once, the cold queries are asked once each and the warm ones again and again. "
        "The engine's share is all that is left: wait, steps, the way there and back."
    )
    yield ""
    yield "| | calls | whole | " + " | ".join(STAGES.values()) + " | tokens cached | calls/s |"
    yield "| --- " * (5 + len(STAGES)) + "|"
    for each in files.values():
        for label, figures in _kinds(each["results"]):
            stages = " | ".join(_pair(figures["stages"][stage]) for stage in STAGES)
            rate = f"{figures['calls_per_s']:,}" if "calls_per_s" in figures else "-"
            yield (
                f"| {_device(each)}, {label} | {figures['calls']} | {_pair(figures)} | {stages} | "
                f"{figures['cached_share']:.0%} | {rate} |"
            )


def _kinds(told: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for kind in ("cold", "warm"):
        yield f"alone, {kind}", told["one_at_a_time"][kind]
    if "at_once" in told:
        for kind in ("cold", "warm"):
            yield f"{told['at_once']['callers']} at once, {kind}", told["at_once"][kind]


def _pair(values: Mapping[str, float]) -> str:
    return f"{values['p50_ms']:,.1f} / {values['p99_ms']:,.1f}"


def _remarks(name: str, told: Mapping[str, Any]) -> Iterator[str]:
    fewest = min(figures["calls"] for _, figures in _kinds(told))
    if fewest < 100:
        yield f"- {name}: of fewer than 100 calls the p99 is the slowest one."
    vectors = told["vectors"]
    if taken := vectors["tools"] - vectors["computed"] - vectors["missing"]:
        yield f"- {name}: the vectors of {taken:,} tools were taken from an earlier run before the calls."
    if vectors["missing"]:
        yield (
            f"- {name}: {vectors['missing']:,} tools had no vector when the calls were made: only the others "
            "can be found by theirs, so more calls share the same candidates."
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--results", type=Path, default=FOLDER / "results")
    parser.add_argument("--page", type=Path, default=FOLDER.parent / "docs" / "catalogue.md")
    given = parser.parse_args()
    found = sorted(given.results.glob("large-catalogue*.json"))
    if not found:
        raise SystemExit(f"there is no large-catalogue*.json in {given.results}")
    files = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in found}
    text = given.page.read_text(encoding="utf-8")
    given.page.write_text(replaced(text, section(files), BEGIN), encoding="utf-8")
    print(f"wrote {given.page}")


if __name__ == "__main__":
    main()
