"""Writes docs/quality.md from result files of benchmarks.quality.

    python -m benchmarks.quality_page --before FILE --after FILE [--reasons FILE] [--out docs/quality.md]

`--before` is a run with `--adapter none`, `--after` one with the shipped adapter; `--reasons` is a result of
benchmarks.reasons.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "quality.md"
RESULTS = Path(__file__).resolve().parent / "results"
BASELINES = ("BM25", "MiniLM", "RRF")
OURS = "discover_tools"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--after", type=Path, required=True)
    parser.add_argument("--reasons", type=Path, default=RESULTS / "reasons.json")
    parser.add_argument("--out", type=Path, default=PAGE)
    arguments = parser.parse_args()
    before, after = (json.loads(path.read_text()) for path in (arguments.before, arguments.after))
    reasons = json.loads(arguments.reasons.read_text())
    arguments.out.write_text("\n".join(page(before, after, reasons)) + "\n", encoding="utf-8")
    print(f"wrote {arguments.out}")


def page(before: dict[str, Any], after: dict[str, Any], reasons: dict[str, Any]) -> Iterator[str]:
    """The page's lines."""
    yield "# Retrieval quality"
    yield ""
    yield (
        "How well `discover_tools` finds tools, on labelled sets that the adapter was not trained on. Every "
        "ranking comes through the path of a call: visible tools, names, candidates, engine admission, "
        "scores. The baselines rank the same queries: BM25, MiniLM (all-MiniLM-L6-v2, cosine) and "
        "RRF, the reciprocal rank fusion of both. Metrics are defined in `mcp_discovery/evaluate.py`; "
        "brackets are 95% intervals of a bootstrap over queries."
    )
    yield ""
    most = max(each["queries"] for each in _labelled(after))
    if most < 100:
        yield (
            f"**This run asked a seeded sample of {most} queries a set: its intervals are wide, and a set "
            "that shows no clear difference is open, not closed.**"
        )
        yield ""
    yield "## With the shipped adapter"
    yield ""
    yield from _run(after)
    yield from _metric_table(after, "nDCG@10", (*BASELINES, "vectors", "score", OURS))
    yield from _metric_table(after, "hit@1", (*BASELINES, "vectors", "score", OURS))
    yield from _metric_table(after, "C@10", (*BASELINES, "vectors", "score", OURS))
    yield from _margins(after)
    yield from _calibration(after)
    yield from _abstention(after)
    yield from _reasons(reasons)
    yield "## Before training"
    yield ""
    yield (
        "The base model without an adapter: its score alone, BM25 alone, and what is served then, their "
        "fusion by reciprocal rank in which BM25's vote counts 12 times the model's."
    )
    yield ""
    yield from _run(before)
    yield from _metric_table(before, "nDCG@10", (*BASELINES, "score", OURS))
    yield from _metric_table(before, "hit@1", (*BASELINES, "score", OURS))
    yield from _helps(before)


def _run(result: dict[str, Any]) -> Iterator[str]:
    configuration, machine = result["results"]["configuration"], result["hardware"]
    where = ", ".join(machine["cards"]) or f"{machine['cpu']}, {machine['cores']} cores"
    yield f"`{result['command']}`  "
    yield (
        f"{result['at']}, commit {result['commit'][:12]}, {where}; {configuration['kernels']}; "
        f"{configuration['candidates']} candidates."
    )
    yield ""


def _labelled(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for each in result["results"]["sets"] if each["queries"]]


def _metric_table(result: dict[str, Any], metric: str, rankers: Sequence[str]) -> Iterator[str]:
    sets = _labelled(result)
    shown = [ranker for ranker in rankers if any(ranker in each["metrics"] for each in sets)]
    yield f"| {metric} | tools | queries | " + " | ".join(shown) + " |"
    yield "|---|---|---|" + "---|" * len(shown)
    for each in sets:
        values = {ranker: each["metrics"].get(ranker, {}).get(metric) for ranker in shown}
        best = max(value["mean"] for value in values.values() if value)
        row = " | ".join(_cell(value, best) for value in values.values())
        yield f"| {each['set']} | {each['tools']:,} | {each['queries']:,} | {row} |"
    counted = [each for each in sets if each["set"] != "pooled_real"]
    means = [[each["metrics"][r][metric]["mean"] for each in counted if r in each["metrics"]] for r in shown]
    cells = (f"{sum(values) / len(values):.3f}" if len(values) == len(counted) else "-" for values in means)
    yield "| mean without pooled_real | | | " + " | ".join(cells) + " |"
    yield ""


def _cell(value: dict[str, Any] | None, best: float) -> str:
    if value is None:
        return "-"
    mean = f"**{value['mean']:.3f}**" if value["mean"] == best else f"{value['mean']:.3f}"
    return f"{mean} [{value['low']:.3f}, {value['high']:.3f}]"


def _margins(result: dict[str, Any]) -> Iterator[str]:
    yield "`discover_tools` less the best of the three baselines, paired by query:"
    yield ""
    yield "| set | nDCG@10 | hit@1 | C@10 |"
    yield "|---|---|---|---|"
    for each in _labelled(result):
        margins = each["margins"]
        if margins:
            cells = (
                f"{m['mean']:+.3f} [{m['low']:+.3f}, {m['high']:+.3f}] ({m['against']})"
                for m in (margins[metric] for metric in ("nDCG@10", "hit@1", "C@10"))
            )
            yield f"| {each['set']} | " + " | ".join(cells) + " |"
    yield ""


def _calibration(result: dict[str, Any]) -> Iterator[str]:
    sets = _labelled(result)
    yield "### Scores as probabilities"
    yield ""
    yield (
        "All scores of all candidates in ten bins; a calibrated score is right as often as it says. "
        "The scale was fitted on the sets that the JSON file beside the adapter names, where the error on a "
        "set that is left out of the fit stands too. Expected calibration error by set: "
        + ", ".join(f"{each['set']} {each['calibration']['ece']:.3f}" for each in sets)
        + "."
    )
    yield ""
    yield "| score | candidates | mean score | share right |"
    yield "|---|---|---|---|"
    for number in range(10):
        bins = [each["calibration"]["bins"][number] for each in sets if each["set"] != "pooled_real"]
        count = sum(held for held, _, _ in bins)
        if count:
            mean, right = (sum(row[0] * row[at] for row in bins) / count for at in (1, 2))
            low = number / 10
            yield f"| {low:.1f} to {low + 0.1:.1f} | {count:,} | {mean:.3f} | {right:.3f} |"
    yield ""


def _abstention(result: dict[str, Any]) -> Iterator[str]:
    yield "### Requests that nothing serves"
    yield ""
    yield (
        "`benchmarks/data/unanswerable.jsonl` against catalogues that hold no tool for them, and what it "
        "costs the labelled sets that doubtful requests get no tool. A request is doubted where its best "
        "candidate stays below a bound, which grows with the tools in reach: of more tools the nearest one "
        "is nearer, whether it serves or not."
    )
    yield ""
    yield "| catalogue | offered a tool | R@5 lost, points |"
    yield "|---|---|---|"
    for each in result["results"]["sets"]:
        abstention = each["abstention"]
        offered = f"{abstention['offered']} of {abstention['of']}" if abstention["of"] else "-"
        lost = f"{100 * abstention['recall_lost']:.1f}" if each["queries"] else "-"
        yield f"| {each['set']} | {offered} | {lost} |"
    yield ""


def _reasons(result: dict[str, Any]) -> Iterator[str]:
    yield "## Reasons"
    yield ""
    yield (
        "What `explain` may say of the right tool, judged by rule beside the wrong tool that BM25 likes "
        "best. True: each word is the tool's or the request's. Telling: more of its words are the right "
        "tool's than the wrong one's. Asked: a word is the request's. Right: all three. `words` are those "
        "that request and tool share, `sentence` is the nearest one of the tool's own description, `served` "
        "is what `explain` gives (the sentence where it shares a word with the request, else the words), "
        "`generated` is what the default model writes without its adapter. What it writes mostly is neither "
        "the tool's nor the request's, so none of it is served."
    )
    yield ""
    yield f"`{result['command']}`"
    yield ""
    yield "| reason | of | true | telling | asked | right |"
    yield "|---|---|---|---|---|---|"
    for kind, row in result["results"]["kinds"].items():
        cells = " | ".join(f"{row[column]:.3f}" for column in ("true", "telling", "asked", "right"))
        yield f"| {kind} | {row['reasons']:,} | {cells} |"
    yield ""


def _helps(result: dict[str, Any]) -> Iterator[str]:
    """Where the base model's score adds to BM25."""
    helped: list[str] = []
    not_helped: list[str] = []
    for each in _labelled(result):
        metrics = each["metrics"]
        gain = metrics[OURS]["nDCG@10"]["mean"] - metrics["BM25"]["nDCG@10"]["mean"]
        (helped if gain > 0 else not_helped).append(f"{each['set']} ({gain:+.3f})")
    yield f"By nDCG@10 against BM25 alone the score helps on {', '.join(helped) or 'no set'}; "
    yield f"it does not on {', '.join(not_helped) or 'none'}."


if __name__ == "__main__":
    main()
