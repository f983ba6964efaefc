"""Writes a generated section of docs/performance.md from a result of benchmarks.steady.

python -m benchmarks.steady_page [--result FILE] [--page docs/performance.md]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.ladder.limits import FULL
from benchmarks.marked import fill

BEGIN = "<!-- begin: python -m benchmarks.steady_page -->"
THREADS, ROOMS, FUNCTIONS, PLACES = 3, 9, 5, 4  # rows

Results = Mapping[str, Any]
"""The `results` of a file of `benchmarks.steady`."""


def section(results: Results, file: str) -> Iterator[str]:
    """For people, in Markdown: what was near its limit, who held the locks, and on what."""
    window, load = results["window"], results["load"]
    yield "### The whole server under load"
    yield ""
    yield (
        f"{results['clients']:,} clients in a closed loop, {results['frontends']} front-ends, "
        f"{results['device']}: {window['calls_per_s']:,} calls and {window['steps_per_s']:,} steps a second, "
        f"{window['calls_per_step']:,} calls a step, p50 {load['p50_ms'] or 0:,.0f} ms, {load['refused']:,} "
        f"refused, {load['failed']} failed "
        f"([{file}](../benchmarks/results/{file})). {limit(results)}"
    )
    yield from ("", *_processes(window["processes"]))
    for each in results["profiles"]:
        if "problem" in each:
            yield from ("", f"The profile of {each['process']} is not whole: {each['problem']}.")
    looked = [each for each in results["profiles"] if "threads" in each]
    if looked:
        yield from ("", *_threads(looked), "", *_rooms(looked), "", *_functions(looked))


def resources(results: Results) -> dict[str, float]:
    """Of each resource the share that is in use, 1 being all of it; the most used first."""
    window = results["window"]
    processes = window["processes"]
    found = {
        "the load's own processes (of the busiest's core)": results["driver"]["busiest_share"],
        "this machine's cores": window["machine_cores"] / results["cores"],
    }
    for each in results["profiles"]:
        if "problem" not in each:
            found[f"the interpreter lock of {each['process']}"] = each["lock_share"]
    if window["card_busy_percent"] is not None:
        found["the card (time with a kernel)"] = window["card_busy_percent"] / 100
    if frontends := [each["cores"] for each in processes if each["name"].startswith("front-end")]:
        found["the busiest front-end (of a core)"] = max(frontends)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def limit(results: Results) -> str:
    """Which resource limits, in a sentence, and how much of each other is in use."""
    used = resources(results)
    shares = "; ".join(f"{name} {share:.0%}" for name, share in used.items())
    first = next(iter(used))
    if used[first] >= FULL:
        return f"The limit is {first}. In use: {shares}."
    return f"No resource is at its limit. In use: {shares}."


def _processes(processes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Front-ends are alike: one row for all."""
    frontends = [each for each in processes if each["name"].startswith("front-end")]
    yield from ("| process | cores | CPU us a call |", "| --- | --- | --- |")
    for each in processes:
        if each not in frontends:
            yield f"| {each['name']} | {each['cores']:.2f} | {each['cpu_us_per_call']:,.0f} |"
    if frontends:
        cores, us = (sum(float(each[key]) for each in frontends) for key in ("cores", "cpu_us_per_call"))
        yield f"| {len(frontends)} front-ends together | {cores:.2f} | {us:,.0f} |"


def _threads(looked: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield from ("| thread | of a core | of the lock | is at, waiting too (of them holding the lock) |",)
    yield "| --- | --- | --- | --- |"
    for each in looked:
        for thread in each["threads"][:THREADS]:
            if not thread["cores"] + thread["lock"]:
                continue
            places = ", ".join(
                f"`{place['function']}` {place['share']:.0%} ({place['lock']:.0%})"
                for place in thread["places"][:PLACES]
            )
            name = f"{each['process']}: {thread['thread']}"
            yield f"| {name} | {thread['cores']:.0%} | {thread['lock']:.0%} | {places} |"


def _rooms(looked: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The rooms that hold some lock most, by the highest of the processes' shares."""
    names = [each["process"] for each in looked]
    rooms = [{room["room"]: room for room in each["rooms"]} for each in looked]
    highest = {
        name: max(float(of[name]["self"]) for of in rooms if name in of)
        for name in {n for of in rooms for n in of}
    }
    shown = sorted(highest, key=lambda name: (-highest[name], name))[:ROOMS]
    yield "| ms of the lock a second, itself / with all it calls | " + " | ".join(names) + " |"
    yield "| --- " * (len(names) + 1) + "|"
    for name in shown:
        cells = [
            f"{1e3 * of[name]['self']:,.0f} / {1e3 * of[name]['inclusive']:,.0f}" if name in of else "-"
            for of in rooms
        ]
        yield f"| {name} | {' | '.join(cells)} |"


def _functions(looked: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield from ("| process | top functions themselves | ms of the lock a second |", "| --- | --- | --- |")
    for each in looked:
        for function in each["functions"][:FUNCTIONS]:
            place = f"`{function['function']}` ({function['at']})"
            yield f"| {each['process']} | {place} | {1e3 * function['share']:,.0f} |"


def main() -> None:
    fill(__doc__, section, BEGIN, result="steady.json", page="performance.md")


if __name__ == "__main__":
    main()
