"""How often the reason that `explain` gives is right, by kind of reason.

    python -m benchmarks.reasons --data DIR [--limit N] [--generated N] [--adapter none|auto]

For the first labelled tool of each of N queries a set, the reason of each kind:

    words      the words that request and tool share, and the parameters that the request speaks of
    sentence   the sentence of the tool's own description that shares most words with the request
    served     what `explain` gives: the sentence where it shares a word with the request, else the words
    generated  what the model writes when it is asked why the tool serves the request (greedy, 32 tokens;
               of the first --generated queries of a set)

It is judged beside the tool that BM25 takes for the best of the wrong ones:

    true       each of its words is the tool's or the request's
    telling    more of its words are the right tool's than the wrong one's
    asked      one of its words is the request's
    right      all three

Words count as equal where their first five letters are; those that only frame a reason do not count.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.quality_sets import labelled_folders, sampled
from benchmarks.report import write
from engine.config import EngineConfig
from engine.engine import Engine
from engine.local import LocalClient
from engine.request import Generate, Generated
from engine.tokenizer import Tokenizer
from mcp_discovery.assemble import DiscoveryModel
from mcp_discovery.discovery.catalogue import Catalogue, Tool
from mcp_discovery.discovery.lexical import LexicalIndex, document, terms
from mcp_discovery.discovery.prompts import words_of
from mcp_discovery.discovery.reasons import nearest_sentence, reason, shared_words
from mcp_discovery.evaluate import LabelledSet

STEM = 5
FRAME = frozenset(
    word[:STEM]
    for word in terms(
        "It shares with the request takes Its own text says because tool serves user asks this which will "
        "allows allowing provides providing helps helping enables enabling ensures designed used "
        "able so them they"
    )
)
QUESTION = "In one short sentence: why does the tool serve the request?"
MAX_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Case:
    query: str
    right: Tool
    wrong: Tool


@dataclass(frozen=True, slots=True)
class Judged:
    given: bool
    true: bool
    telling: bool
    asked: bool

    @property
    def right(self) -> bool:
        return self.true and self.telling and self.asked


def judged(reason: str | None, case: Case) -> Judged:
    """Without a reason nothing is true of it."""
    words = _stems(reason or "") - FRAME
    own, other, asked = _stems(document(case.right)), _stems(document(case.wrong)), _stems(case.query)
    return Judged(
        given=bool(words),
        true=bool(words) and words <= own | asked,
        telling=len(words & own) > len(words & other),
        asked=bool(words & asked),
    )


def _stems(text: str) -> set[str]:
    return {word[:STEM] for word in terms(text)}


def cases_of(labelled: LabelledSet) -> Iterator[Case]:
    tools = Catalogue.of(labelled.tools).tools
    at = {tool.id: tool for tool in tools}
    index, mask = LexicalIndex.of(tools), np.ones(len(tools), dtype=np.bool_)
    for query in labelled.queries:
        served = {id for label in query.labels for id in label}
        first = next((at[id] for label in query.labels for id in sorted(label) if id in at), None)
        order = [tools[position] for position in index.order(query.text, mask, 20)]
        wrong = next((tool for tool in order if tool.id not in served), None)
        if first is not None and wrong is not None:
            yield Case(query.text, first, wrong)


async def generated(client: LocalClient, tokenizer: Tokenizer, case: Case) -> str:
    start, end = tokenizer.special("<|im_start|>"), tokenizer.special("<|im_end|>")
    tool = case.right
    told = f"Tool: {words_of(tool.name)}. {tool.description[:400]}\nRequest: {case.query}\n{QUESTION}"
    tokens = (
        start,
        *tokenizer.encode(f"user\n{told}"),
        end,
        *tokenizer.encode("\n"),
        start,
        *tokenizer.encode("assistant\n"),
    )
    outcome = await client.run(Generate(tokens, MAX_TOKENS, stop=frozenset([end])))
    if not isinstance(outcome, Generated):
        raise SystemExit(f"the engine did not write a reason: {outcome}")
    return re.split(r"(?<=[.!?])\s", tokenizer.decode(outcome.tokens).strip(), maxsplit=1)[0]


def shares(rows: Sequence[Judged]) -> dict[str, Any]:
    def share(of: Callable[[Judged], bool]) -> float:
        return round(sum(map(of, rows)) / len(rows), 3)

    return {
        "reasons": len(rows),
        "given": share(lambda row: row.given),
        "true": share(lambda row: row.true),
        "telling": share(lambda row: row.telling),
        "asked": share(lambda row: row.asked),
        "right": share(lambda row: row.right),
    }


async def measured(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, str]]]:
    found: dict[str, list[Judged]] = {"words": [], "sentence": [], "served": [], "generated": []}
    examples = []
    model = DiscoveryModel.of(arguments.model, arguments.adapter)
    read = Tokenizer.from_folder if model.path.is_dir() else Tokenizer.from_gguf
    tokenizer = read(model.path)
    config = EngineConfig(device=arguments.device)
    engine = await asyncio.to_thread(Engine.create, config, model.path, model.adapter_path)
    try:
        for folder in labelled_folders(arguments.data):
            for number, case in enumerate(cases_of(sampled(folder, arguments.limit))):
                texts: dict[str, str | None] = {
                    "words": shared_words(case.right, case.query),
                    "sentence": nearest_sentence(case.right, case.query),
                    "served": reason(case.right, case.query, 0.5),
                }
                if number < arguments.generated:
                    texts["generated"] = await generated(LocalClient(engine), tokenizer, case)
                    examples.append({"query": case.query, "tool": case.right.id, **texts})
                for kind, text in texts.items():
                    found[kind].append(judged(text, case))
    finally:
        await asyncio.to_thread(engine.close)
    return {kind: shares(rows) for kind, rows in found.items() if rows}, examples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--limit", type=int, default=200, help="queries of a set")
    parser.add_argument("--generated", type=int, default=5, help="of them with a generated reason")
    parser.add_argument("--adapter", default="auto")
    parser.add_argument("--model")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    kinds, examples = asyncio.run(measured(arguments))
    print(f"{'kind':12}" + "".join(f"{column:>10}" for column in next(iter(kinds.values()))))
    for kind, columns in kinds.items():
        print(f"{kind:12}" + "".join(f"{value:>10}" for value in columns.values()))
    write("reasons", {"kinds": kinds, "examples": examples[:12]}, out=arguments.out)


if __name__ == "__main__":
    main()
