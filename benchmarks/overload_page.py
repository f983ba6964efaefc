"""Writes the generated sections of docs/overload.md, of benchmarks.simulation and benchmarks.overload.

python -m benchmarks.overload_page [--simulation FILE] [--overload FILE] [--page docs/overload.md]

A section whose result is not there stays as it is.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.marked import replaced

FOLDER = Path(__file__).resolve().parent
SIMULATION = "<!-- begin: python -m benchmarks.overload_page (simulation) -->"
MEASURED = "<!-- begin: python -m benchmarks.overload_page (overload) -->"
ANSWERS = ("embedded", "generated", "scored")
DEVIATIONS = ("cancelled", "constraint_fault", "device_fault")

Result = Mapping[str, Any]
"""A whole result file."""


def about(result: Result, file: str) -> str:
    """Where, when and of what."""
    machine = result["hardware"]
    commit, changed, _ = result["commit"].partition("+")
    commit = commit[:12] + (" with changes" if changed else "")
    return (
        f"`{result['command']}`, {result['at']}, commit {commit}, {machine['cpu']}, "
        f"{machine['cores']} cores ([{file}](../benchmarks/results/{file}))."
    )


# The simulation.


def simulation(result: Result, file: str) -> Iterator[str]:
    """For people, in Markdown: one line a seed and one for all."""
    told, total = result["results"], result["results"]["all"]
    yield about(result, file)
    yield ""
    yield (
        f"{total['requests']:,} requests, {total['events']:,} events, **{len(told['violations'])} "
        f"violations**; {total['refusals_recomputed']:,} refusals recomputed, {total['pools_rebuilt']:,} "
        f"pools rebuilt; at most {total['most_passed']} admissions before a request whose turn was earlier; "
        f"{told['requests_per_s_per_core']:,} requests/s a core."
    )
    for sentence in told["violations"]:
        yield from ("", f"**Violation:** {sentence}")
    yield ""
    kinds = (name.replace("_", " ") for name in DEVIATIONS)
    yield from _head("seed", "requests", "answered", "refused", *kinds, "disturbances", "most passed", "hash")
    for seed, tally in [*told["seeds"].items(), ("all", total)]:
        yield "| " + " | ".join(_cells(seed, tally)) + " |"
    yield ""
    refused = {
        code: count for code, count in total["outcomes"].items() if code not in (*ANSWERS, *DEVIATIONS)
    }
    shown = ", ".join(
        f"{count:,} {code}" for code, count in sorted(refused.items(), key=lambda each: -each[1])
    )
    yield f"Refused: {shown or 'none'}."


def _cells(seed: str, tally: Mapping[str, Any]) -> Iterator[str]:
    outcomes = tally["outcomes"]
    yield seed
    yield f"{tally['requests']:,}"
    answered = sum(outcomes.get(name, 0) for name in ANSWERS)
    others = {name: outcomes.get(name, 0) for name in DEVIATIONS}
    yield f"{answered:,}"
    yield f"{sum(outcomes.values()) - answered - sum(others.values()):,}"
    yield from (f"{count:,}" for count in others.values())
    yield f"{sum(tally['disturbances'].values()):,}"
    yield str(tally["most_passed"])
    yield f"`{tally['digest'][:12]}`"


# What was measured.


def overload(result: Result, file: str) -> Iterator[str]:
    """For people, in Markdown: the targets, then each part."""
    yield about(result, file)
    yield ""
    yield from _head("target", "", "asked", "measured", "")
    for told in result["targets"]:
        verdict = "hit" if told["hit"] else "**miss**"
        yield f"| `{told['key']}` | {told['good']} | {told['target']:,} | {told['measured']:,} | {verdict} |"
    for name, part in PARTS.items():
        if name in result["results"]:
            yield from ("", f"**{name}** ({_conditions(result, name)})", "", *part(result["results"][name]))
        elif name in result.get("broken", {}):
            broken = result["broken"][name]
            yield from ("", f"**{name} broke off** ({_conditions(result, name)}): {broken['reason']}.")
            if broken["found"]:
                yield "What it had found until then is in the file and counts for no target."
        else:
            yield from ("", f"**{name}** was not part of this run.")


def _conditions(result: Result, name: str) -> str:
    told = result["conditions"][name]
    own = told["command"] if told["command"] != result["command"] else ""
    loads = f"{told['seconds']:,.0f} s, load average before it {told['load_average_before'][0]}"
    return f"{loads}, by `{own}`" if own else loads


def _crowd(crowds: list[dict[str, Any]]) -> Iterator[str]:
    yield from _head(
        "pages", "calls", "answered", "refused", "hung up", "failed", "wrong of compared",
        "wrong of refusals", "accounts", "answers p50, p99 ms", "peak, planned MiB",
    )  # fmt: skip
    for each in crowds:
        pages = f"{each['max_pages']:,}" if each["max_pages"] else "the allowance's"
        yield _crowd_row(pages, each)
    yield from _sentences(crowds)


def _crowd_row(name: str, each: Mapping[str, Any]) -> str:
    accounts = each["imbalance"] or ("exact" if not any(each["at_rest"].values()) else "something is held")
    return (
        f"| {name} | {each['calls']:,} | {each['answered']:,} | {each['refused']:,} | {each['hung_up']:,} | "
        f"{each['failed']:,} | {each['contaminated']:,} of {each['compared']:,} | "
        f"{each['refusals_wrong']:,} of {each['refusals_checked']:,} | {accounts} | "
        f"{_pair(each['answer_ms'])} | {each['resident_peak_mib']:,}, {each['planned_mib']:,} |"
    )


def _sentences(crowds: list[dict[str, Any]]) -> Iterator[str]:
    """Of what went wrong, the first few."""
    for each in crowds:
        for kind in ("failures", "contaminations", "wrong_refusals"):
            yield from (f"- {kind.replace('_', ' ')}: {sentence}" for sentence in each[kind])


def _goodput(found: Mapping[str, Any]) -> Iterator[str]:
    columns = ("load", "answers/s", "of the peak", "answered", "refused", "failed", "p50, p99 ms")
    yield from _head(*columns)
    for run in found["closed"]:
        yield _goodput_row(f"{run['clients']:,} clients, closed loop", run, found["peak_per_s"])
    for run in found["open"]:
        rate = run["factor"] * found["sustainable_per_s"]
        name = f"{run['factor']:g} x what is sustained: {rate:,.1f}/s arrive"
        yield _goodput_row(name, run, found["peak_per_s"])
    yield from (f"- accounts: {sentence}" for sentence in found["imbalances"])


def _goodput_row(name: str, run: Mapping[str, Any], peak: float) -> str:
    share = f"{run['answers_per_s'] / peak:.3f}" if peak else "-"
    return (
        f"| {name} | {run['answers_per_s']:,} | {share} | {run['answered']:,} | {run['refused']:,} | "
        f"{run['failed']:,} | {_pair({'p50': run['p50_ms'], 'p99': run['p99_ms']})} |"
    )


def _fairness(found: Mapping[str, Any]) -> Iterator[str]:
    beside, alone = found["beside_the_greedy_one"], found["alone"]
    least, most = (beside["answers_of_modest"][name] for name in ("least", "most"))
    yield (
        f"One caller with {found['greedy_calls']:,} calls open and {found['modest']} with "
        f"{found['modest_calls']} each, {found['seconds']:g} s: Jain's index {found['jain']}; by what each "
        f"has open it would be {found['jain_without_turns']}. The greedy one got "
        f"{beside['answers_of_greedy']:,} answers, each other one {least:,} to {most:,}. A modest caller's "
        f"first call took {_pair(beside['first_call_ms'])} ms (p50, p99), without the greedy one "
        f"{_pair(alone['first_call_ms'])}."
    )


def _stop(found: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{found['clients']} clients; every process stopped for {found['stopped_s']:g} s with "
        f"{found['in_flight_at_stop']} calls in flight: {found['calls']:,} calls, {found['answered']:,} "
        f"answered, {found['refused']:,} refused, {found['failed']:,} failed, {found['contaminated']:,} of "
        f"{found['compared']:,} compared are wrong; accounts: {found['imbalance'] or 'exact'}."
    )
    yield from _sentences([found])


def _refusals(found: Mapping[str, Any]) -> Iterator[str]:
    yield from _head(
        "calls", "asked", "refused", "as", "p50, p99, highest ms", "wrong", "MiB, growth of the second half"
    )
    for name, each in found.items():
        times, memory = each["refusal_ms"], each["resident_mib"]
        codes = ", ".join(f"{count:,} {code}" for code, count in each["by_code"].items()) or "-"
        yield (
            f"| {name.replace('_', ' ')} | {each['asked']:,} | {each['refused']:,} | {codes} | "
            f"{_pair(times)}, {_number(times and times['max'])} | {each['wrong']:,} | "
            f"{_number(memory[-1] if memory else None)}, {each['growth_of_the_second_half_mib']:+,.1f} |"
        )
    for each in found.values():
        yield from (f"- wrong: {sentence}" for sentence in each["wrong_refusals"])


def _mixed(found: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"{found['rate']:,.2f} calls a second arrive. Of so few short calls as a run has, p99 is one of the "
        "slowest few: read it with their number."
    )
    yield ""
    yield from _head(
        "long", "short answered", "short p50, p99 ms", "to alone", "long answered", "long p50, p99 ms",
        "refused", "failed", "what grew",
    )  # fmt: skip
    for run in found["runs"]:
        verdict = run["verdict"] or {"short_p99_ratio": "-", "cause": "-"}
        short, long = run["short"], run["long"]
        yield (
            f"| {run['long_share']:.0%} | {short['answered']:,} | {_pair(short['latency_ms'])} | "
            f"{verdict['short_p99_ratio']} | {long['answered']:,} | {_pair(long['latency_ms'])} | "
            f"{run['refused']:,} | {run['failed']:,} | {verdict['cause']} |"
        )
    if found["abort"]:
        yield from (
            "",
            f"**Stopped by its condition {found['abort']['condition']}: {found['abort']['reason']}.**",
        )


def _head(*columns: str) -> Iterator[str]:
    yield "| " + " | ".join(columns) + " |"
    yield "| --- " * len(columns) + "|"


def _pair(values: Mapping[str, float | None] | None) -> str:
    return "-" if values is None else f"{_number(values['p50'])}, {_number(values['p99'])}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


PARTS: Mapping[str, Callable[[Any], Iterator[str]]] = {
    "crowd": _crowd,
    "goodput": _goodput,
    "fairness": _fairness,
    "stop": _stop,
    "refusals": _refusals,
    "mixed": _mixed,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    results = FOLDER / "results"
    parser.add_argument("--simulation", type=Path, default=results / "simulation.json")
    parser.add_argument("--overload", type=Path, default=results / "overload-cpu.json")
    parser.add_argument("--page", type=Path, default=FOLDER.parent / "docs" / "overload.md")
    given = parser.parse_args()
    for path, section, begin in (
        (given.simulation, simulation, SIMULATION),
        (given.overload, overload, MEASURED),
    ):
        if not path.exists():
            print(f"there is no {path}: its section stays as it is")
            continue
        result = json.loads(path.read_text(encoding="utf-8"))
        page = given.page.read_text(encoding="utf-8")
        given.page.write_text(replaced(page, section(result, path.name), begin), encoding="utf-8")
        print(f"wrote what {path.name} says into {given.page}")


if __name__ == "__main__":
    main()
