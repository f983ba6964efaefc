"""Writes the generated section of docs/operations.md from a result of benchmarks.kills.

python -m benchmarks.kills_page [--result FILE] [--page docs/operations.md]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.marked import fill

BEGIN = "<!-- begin: python -m benchmarks.kills_page -->"
COLUMNS = (
    "killed", "kills", "calls in flight", "which ended as", "last such error ms", "ready again ms",
    "first answer ms", "other connections lost", "unanswered", "accounts wrong",
)  # fmt: skip
NAMES = {"front-end": "a front-end", "engine": "the engine process", "parent": "the parent"}


def section(results: Mapping[str, Any], file: str) -> Iterator[str]:
    """For people, in Markdown: a row for each kind of process, and what was broken."""
    kinds = results["kinds"]
    yield (
        f"`python -m benchmarks.kills`: {results['frontends']} front-ends, the real engine on a CPU, "
        f"{results['connections']} TLS connections with one call after the other, a kill somewhere in it "
        f"([{file}](../benchmarks/results/{file})). Times are the longest of all kills of a row, from "
        "the kill on; for a front-end the first answer is that of a client that had to connect again."
    )
    yield from ("", "| " + " | ".join(COLUMNS) + " |", "| --- " * len(COLUMNS) + "|")
    yield from (_row(NAMES[kind], told) for kind, told in kinds.items())
    yield ""
    if "parent" in kinds:
        told = kinds["parent"]
        yield (
            f"Of the processes whose parent was killed {told['processes_left']} were left; the last was gone "
            f"after {_shown(told['processes_gone_ms'])} ms."
        )
    yield from (f"- **Broken:** {sentence}." for sentence in results["violations"])


def _row(name: str, told: Mapping[str, Any]) -> str:
    ended = ", ".join(f"{count:,} {end}" for end, count in sorted(told["ended"].items())) or "-"
    lost = f"{told['connections_of_others_lost']:,} of {told['connections_of_others']:,}"
    wrong = "nobody is left to ask" if name == NAMES["parent"] else f"{told['accounts_wrong']:,}"
    cells = (
        name, f"{told['rounds']:,}", f"{told['in_flight']:,}", ended, _shown(told["last_error_ms"]),
        _shown(told["ready_again_ms"]), _shown(told["first_answer_ms"]), lost, f"{told['unanswered']:,}",
        wrong,
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def main() -> None:
    fill(__doc__, section, BEGIN, result="kills.json", page="operations.md")


if __name__ == "__main__":
    main()
