"""Scores and continuations on a device against a reference: float32, on the CPU, one request at a time.

    python -m benchmarks.agreement reference --model FILE [--adapter FILE]      # once, on any CPU
    python -m benchmarks.agreement compare --model FILE [--adapter FILE] [--device cuda] [--kv-dtype ...]

200 groups of 8 tools each: queries of the load set against the demo catalogue, BM25's first tools. The
reference lies in `benchmarks/data/reference.json` by the digests of model and adapter.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import write
from engine import Engine, EngineConfig, Generate, Generated, Outcome, Score, Scored
from engine.tokenizer import Tokenizer
from mcp_discovery.discovery.catalogue import Catalogue
from mcp_discovery.discovery.lexical import LexicalIndex
from mcp_discovery.discovery.prompts import Prompts
from mcp_discovery.discovery.sources import files

HERE = Path(__file__).parent
REFERENCE = HERE / "data" / "reference.json"
DEMO = HERE.parent / "mcp_discovery" / "data" / "demo"
GROUPS, CANDIDATES, CONTINUATIONS, OUTPUT = 200, 8, 16, 32
TOLERANCE = 0.02


@dataclass(frozen=True, slots=True)
class Questions:
    scores: list[Score]
    continuations: list[Generate]


def questions(model: Path) -> Questions:
    """The same for every device: made from committed files with a fixed seed."""
    tokenizer = Tokenizer.from_gguf(model) if model.is_file() else Tokenizer.from_folder(model)
    prompts = Prompts(tokenizer)
    tools = Catalogue.of(files.load([DEMO]).tools).tools
    lexical, everything = LexicalIndex.of(tools), np.ones(len(tools), dtype=bool)
    lines = (HERE / "data" / "queries.jsonl").read_text(encoding="utf-8").splitlines()
    queries = [json.loads(line)["query"] for line in random.Random(7).sample(lines, GROUPS)]
    scores = []
    for query in queries:
        best = lexical.order(query, everything, CANDIDATES)
        suffix = prompts.suffix(prompts.cut(query))
        prefixes = tuple(prompts.prefix(tools[at]) for at in best)
        scores.append(Score(prefixes, suffix, prompts.positive, prompts.negative))
    asked = [prompts.query(prompts.cut(query)) for query in queries[:CONTINUATIONS]]
    return Questions(scores, [Generate(tokens, max_tokens=OUTPUT) for tokens in asked])


def make_reference(model: Path, adapter: Path | None, threads: int | None) -> None:
    asked = questions(model)
    config = EngineConfig(device="cpu", dtype="float32", allowance_mib=8192, threads=threads)
    with Engine.create(config, model, adapter) as engine:
        probabilities = []
        for number, score in enumerate(asked.scores):
            probabilities.append(list(_scored(engine.score(score)).probabilities))
            print(f"\r{number + 1} of {GROUPS} groups", end="", flush=True)
        tokens = [list(_generated(engine.generate(each)).tokens) for each in asked.continuations]
        loaded = engine.loaded
        assert loaded is not None
        entry = {
            "model_sha256": loaded.model_sha256,
            "adapter_sha256": loaded.adapter_sha256,
            "probabilities": [[round(p, 6) for p in group] for group in probabilities],
            "continuations": tokens,
        }
    known = json.loads(REFERENCE.read_text()) if REFERENCE.exists() else []
    keys = ("model_sha256", "adapter_sha256")
    others = [each for each in known if any(each[key] != entry[key] for key in keys)]
    REFERENCE.write_text(json.dumps([*others, entry]) + "\n")
    print(f"\nwrote {REFERENCE}")


def compare(model: Path, adapter: Path | None, config: EngineConfig) -> dict[str, Any]:
    asked = questions(model)
    with Engine.create(config, model, adapter) as engine:
        loaded = engine.loaded
        assert loaded is not None
        reference = next(
            each
            for each in json.loads(REFERENCE.read_text())
            if (each["model_sha256"], each["adapter_sha256"]) == (loaded.model_sha256, loaded.adapter_sha256)
        )
        outcomes = engine.probe([*asked.scores, *asked.continuations])  # all at once
        kernels = engine.status().kernels
    scored = [_scored(each).probabilities for each in outcomes[: len(asked.scores)]]
    written = [_generated(each).tokens for each in outcomes[len(asked.scores) :]]
    return {
        "kernels": kernels,
        **agreement(scored, reference["probabilities"]),
        "continuations_equal": sum(
            list(got) == want for got, want in zip(written, reference["continuations"], strict=True)
        ),
        "continuations": len(written),
    }


def agreement(got: list[tuple[float, ...]], want: list[list[float]]) -> dict[str, Any]:
    """How far probabilities are apart, and pairs in another order though the reference has them apart."""
    errors = sorted(abs(g - w) for a, b in zip(got, want, strict=True) for g, w in zip(a, b, strict=True))
    swapped = pairs = 0
    for a, b in zip(got, want, strict=True):
        for i, j in combinations(range(len(b)), 2):
            if abs(b[i] - b[j]) > TOLERANCE:
                pairs += 1
                swapped += (a[i] - a[j]) * (b[i] - b[j]) <= 0
    return {
        "groups": len(got),
        "rows": len(errors),
        "largest_error": round(errors[-1], 5),
        "mean_error": round(math.fsum(errors) / len(errors), 6),
        "p99_error": round(errors[int(len(errors) * 0.99)], 5),
        "rows_beyond_tolerance": sum(error > TOLERANCE for error in errors),
        "tolerance": TOLERANCE,
        "pairs_apart": pairs,
        "pairs_swapped": swapped,
    }


def _scored(outcome: Outcome) -> Scored:
    if not isinstance(outcome, Scored):
        raise SystemExit(f"a score ended otherwise: {outcome}")
    return outcome


def _generated(outcome: Outcome) -> Generated:
    if not isinstance(outcome, Generated):
        raise SystemExit(f"a continuation ended otherwise: {outcome}")
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("reference", "compare"))
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--adapter", type=Path)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--kv-dtype", default="auto", choices=("auto", "float16", "bfloat16", "fp8_e4m3"))
    parser.add_argument("--dtype", default="auto", choices=("auto", "float16", "bfloat16", "float32"))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.action == "reference":
        make_reference(given.model, given.adapter, given.threads)
        return
    config = EngineConfig(device=given.device, kv_dtype=given.kv_dtype, dtype=given.dtype)
    results = compare(given.model, given.adapter, config)
    print(json.dumps(results, indent=2))
    write("agreement", results, out=given.out)


if __name__ == "__main__":
    main()
