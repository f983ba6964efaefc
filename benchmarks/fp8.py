"""What pages of fp8 cost in quality, through the path of `discover_tools`, beside 16-bit pages.

    python -m benchmarks.fp8 --data DIR [--model FILE] [--adapter auto] --out FILE

Two engines are asked every query of the sets, one after the other, on the same machine; each computes its own
vectors of the tools, so that what coarse pages do to retrieval counts too. Per query the two orders of the
candidates that both considered are compared: Spearman's and Kendall's (tau-b) rank correlation of what
`discover_tools` orders by. The loss is nDCG@10 with the first kind of pages less that with the second, with a
95% interval of a paired bootstrap over queries.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.quality_rank import AT_ONCE_CARD, AT_ONCE_CPU, Asked, ask_all
from benchmarks.quality_report import Bootstrap, final_order
from benchmarks.quality_sets import labelled_folders, sampled
from benchmarks.report import write
from engine.config import EngineConfig
from engine.engine import Engine
from engine.local import LocalClient
from engine.tokenizer import Tokenizer
from mcp_discovery.assemble import DiscoveryModel, runs_on_cpu
from mcp_discovery.discovery.catalogue import Catalogue
from mcp_discovery.discovery.prompts import Prompts
from mcp_discovery.discovery.select import Discovery, DiscoverySettings, Trained
from mcp_discovery.discovery.vectors import VectorCache
from mcp_discovery.evaluate import LabelledSet, metrics_of

SETS = ("arcade", "vendor_mcp")
CANDIDATES = 32
NDCG = "nDCG@10"
Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Recorded:
    """What one kind of pages answered: of each set, its queries in order."""

    kernels: str
    answers: dict[str, list[Asked]]


@dataclass(frozen=True, slots=True)
class Pair:
    """One query under both kinds of pages. Correlations are of the `common` candidates of `considered`; None
    where fewer than two are common, or all of one side are tied."""

    considered: int
    common: int
    spearman: float | None
    kendall: float | None
    log_odds_apart: float  # mean over the common candidates
    same_first: bool

    @classmethod
    def of(cls, first: Asked, second: Asked) -> Pair:
        ours, theirs = first.evidence(), second.evidence()
        common = [position for position in first.candidates if position in theirs]
        a, b = (np.array([side[at] for at in common], dtype=np.float64) for side in (ours, theirs))
        logits = [dict(zip(each.candidates, each.logits, strict=True)) for each in (first, second)]
        apart = [abs(logits[0][at] - logits[1][at]) for at in common]
        return cls(
            considered=len(first.candidates),
            common=len(common),
            spearman=spearman(a, b),
            kendall=kendall(a, b),
            log_odds_apart=float(np.mean(apart)) if apart else 0.0,
            same_first=final_order(first)[:1] == final_order(second)[:1],
        )


def spearman(a: Values, b: Values) -> float | None:
    """Pearson's correlation of ranks, tied values sharing the mean of theirs."""
    return _correlation(_ranks(a), _ranks(b))


def kendall(a: Values, b: Values) -> float | None:
    """Tau-b: pairs in the same order less pairs in the other, over the geometric mean of untied pairs."""
    pairs = np.triu_indices(len(a), 1)
    signs = [np.sign(side[:, None] - side[None, :])[pairs] for side in (a, b)]
    untied = float(np.sqrt(np.count_nonzero(signs[0]) * np.count_nonzero(signs[1])))
    return float(signs[0] @ signs[1]) / untied if untied else None


def _ranks(values: Values) -> Values:
    less = (values[None, :] < values[:, None]).sum(axis=1)
    equal = (values[None, :] == values[:, None]).sum(axis=1)
    ranks: Values = less + (equal - 1) / 2.0
    return ranks


def _correlation(a: Values, b: Values) -> float | None:
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return float(np.corrcoef(a, b)[0, 1])


def compare(labelled: LabelledSet, first: Sequence[Asked], second: Sequence[Asked]) -> dict[str, Any]:
    """The figures of one set. A query that either side did not answer has no pair, but counts in nDCG."""
    answered = [(a, b) for a, b in zip(first, second, strict=True) if not a.failure and not b.failure]
    pairs = [Pair.of(a, b) for a, b in answered]
    ids = [tool.id for tool in Catalogue.of(labelled.tools).tools]
    ndcg = [
        [
            metrics_of(query.labels, [ids[at] for at in final_order(each)])[NDCG]
            for query, each in zip(labelled.queries, side, strict=True)
        ]
        for side in (first, second)
    ]
    lost = [a - b for a, b in zip(*ndcg, strict=True)]
    return {
        "set": labelled.name,
        "tools": len(ids),
        "queries": len(labelled.queries),
        "unanswered": len(labelled.queries) - len(answered),
        "candidates_in_common": _share(sum(p.common for p in pairs), sum(p.considered for p in pairs)),
        "spearman": _interval([p.spearman for p in pairs if p.spearman is not None]),
        "kendall": _interval([p.kendall for p in pairs if p.kendall is not None]),
        "log_odds_apart": round(float(np.mean([p.log_odds_apart for p in pairs])), 4) if pairs else None,
        "same_first": _share(sum(p.same_first for p in pairs), len(pairs)),
        "ndcg_at_10": [round(float(np.mean(side)), 4) for side in ndcg],
        "ndcg_at_10_lost": _interval(lost),
    }


def _interval(values: Sequence[float]) -> dict[str, Any] | None:
    return Bootstrap(len(values)).interval(values).as_json() if values else None


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def record_alone(config: EngineConfig, model: DiscoveryModel, sets: Sequence[LabelledSet]) -> Recorded:
    """`record` in a process of its own: what it takes of the device is back when this returns."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as child:
        return child.submit(_record, config, model, sets).result()


def _record(config: EngineConfig, model: DiscoveryModel, sets: Sequence[LabelledSet]) -> Recorded:
    return asyncio.run(record(config, model, sets))


async def record(config: EngineConfig, model: DiscoveryModel, sets: Sequence[LabelledSet]) -> Recorded:
    """Every query of every set."""
    engine = await asyncio.to_thread(Engine.create, config, model.path, model.adapter_path)
    at_once = AT_ONCE_CPU if runs_on_cpu(config.device) else AT_ONCE_CARD
    answers = {}
    try:
        for labelled in sets:
            with tempfile.TemporaryDirectory() as folder:
                discovery = _discovery(engine, model, labelled, Path(folder) / "vectors", config.page_tokens)
                if discovery.is_trained:
                    await discovery.warm()
                queries = [(query.id, query.text) for query in labelled.queries]
                answers[labelled.name] = await ask_all(discovery, queries, at_once, _silent)
            print(f"{config.kv_dtype}: asked {labelled.name}", file=sys.stderr, flush=True)
        return Recorded(engine.status().kernels, answers)
    finally:
        await asyncio.to_thread(engine.close)


def _discovery(
    engine: Engine, model: DiscoveryModel, labelled: LabelledSet, vectors: Path, page_tokens: int
) -> Discovery:
    """As the server's, but with vectors of its own: those in the user's cache may come from other pages."""
    read = Tokenizer.from_folder if model.path.is_dir() else Tokenizer.from_gguf
    adapter = model.adapter
    return Discovery(
        LocalClient(engine),
        Prompts(read(model.path), page_tokens),
        Catalogue.of(labelled.tools),
        DiscoverySettings(candidates=CANDIDATES),
        model=model.name,
        trained=None if adapter is None else Trained(adapter.calibration, VectorCache(vectors)),
    )


def _silent(done: int, total: int) -> None:
    """Sets are small: a line a set is progress enough."""


def table(sets: Sequence[dict[str, Any]]) -> str:
    """For docs: a line a set."""
    lines = [
        "| set | queries | Spearman | Kendall | same first | nDCG@10 | lost (95%) |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for each in sets:
        before, after = each["ndcg_at_10"]
        lost = each["ndcg_at_10_lost"]
        lines.append(
            f"| {each['set']} | {each['queries']} | {each['spearman']['mean']:.4f} | "
            f"{each['kendall']['mean']:.4f} | {each['same_first']:.1%} | {before:.4f} to {after:.4f} | "
            f"{lost['mean']:.4f} ({lost['low']:.4f} to {lost['high']:.4f}) |"
        )
    return "\n".join(lines)


def main() -> None:
    given = _arguments()
    model = DiscoveryModel.of(given.model, given.adapter)
    folders = [folder for folder in labelled_folders(given.data) if folder.name in given.sets]
    sets = [sampled(folder, given.limit) for folder in folders]
    if missing := set(given.sets) - {labelled.name for labelled in sets}:
        raise SystemExit(f"--data has no labelled set named {', '.join(sorted(missing))}")
    configs = [EngineConfig(device=given.device, kv_dtype=pages) for pages in given.pages]
    first, second = (record_alone(config, model, sets) for config in configs)
    found = [compare(each, first.answers[each.name], second.answers[each.name]) for each in sets]
    results = {
        "model": model.name,
        "model_sha256": model.sha256,
        "adapter_sha256": model.adapter.sha256 if model.adapter else "",
        "calibration": asdict(model.adapter.calibration) if model.adapter else None,
        "candidates": CANDIDATES,
        "pages": given.pages,
        "kernels": [first.kernels, second.kernels],
        "sets": found,
    }
    print(table(found))
    write("fp8", results, out=given.out)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--data", type=Path, nargs="+", required=True, help="labelled sets, or folders of them"
    )
    parser.add_argument("--sets", nargs="+", default=list(SETS), help="which of them")
    parser.add_argument("--model", help="a GGUF file or a safetensors folder")
    parser.add_argument("--adapter", default="auto", help="auto, none or a file")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--pages", nargs=2, default=["auto", "fp8_e4m3"], help="the two kinds compared")
    parser.add_argument("--limit", type=int, help="at most so many queries a set")
    parser.add_argument("--out", type=Path, help="result file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
