"""Writes the generated section of docs/performance.md from a result of benchmarks.profile_engine.

python -m benchmarks.profile_page [--result FILE] [--page docs/performance.md]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.marked import fill

BEGIN = "<!-- begin: python -m benchmarks.profile_page -->"


def section(results: Mapping[str, Any], file: str) -> Iterator[str]:
    """For people, in Markdown: the second by what took most of it."""
    host, card = results["host"], results.get("card")
    yield "### A steady second"
    yield ""
    yield (
        f"`{results['scenario']}` at {results['outstanding']} requests outstanding: "
        f"{host['requests_per_s']:,.0f} requests and {host['steps_per_s']:,.0f} steps a second while the "
        f"host is timed ([{file}](../benchmarks/results/{file}))."
    )
    if card is not None:
        yield from ("", "| on the card | ms of a second | of kernel time |", "| --- | --- | --- |")
        for each in card["kernels"]:
            share = f"{each['share_of_kernel_time']:.1%}" if "share_of_kernel_time" in each else ""
            yield f"| {each['group']} | {each['ms_a_second']:,.0f} | {share} |"
    yield from ("", "| on the step thread | ms of a second | of that CPU |", "| --- | --- | --- |")
    for each in host["parts"]:
        cpu = f"{each['cpu_ms_a_second']:,.0f}" if "cpu_ms_a_second" in each else ""
        where = "" if each["thread"] == "step" else " (on other threads)"
        yield f"| {each['part']}{where} | {each['ms_a_second']:,.0f} | {cpu} |"


def main() -> None:
    fill(__doc__, section, BEGIN, result="profile_engine.json", page="performance.md")


if __name__ == "__main__":
    main()
