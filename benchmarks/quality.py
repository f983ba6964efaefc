"""Retrieval quality on labelled sets through the path of `discover_tools`, beside what people use today.

    python -m benchmarks.quality --data DIR --records FOLDER --out FILE [--adapter none|auto]

For each set the engine is asked every query (at most 1,000, as `mcp_discovery.evaluate` samples them) and
every request of `data/unanswerable.jsonl` that is meant for its catalogue. What it considered is recorded
in FOLDER; a set that is recorded there under the same settings is not asked again, so a run that broke off
goes on. `--merge` asks nothing and reports on the records. Rankings of MiniLM come from the files of
`benchmarks.minilm` (`--minilm FOLDER`) where there are any.

Compared on the same queries: BM25, MiniLM (all-MiniLM-L6-v2), RRF of both (k = 60), the model's
vectors alone, its score alone, and discover_tools. Differences to the best of the first three are given
with 95% intervals of a paired bootstrap over queries.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.quality_rank import AT_ONCE_CARD, AT_ONCE_CPU, Recorded, ask_all
from benchmarks.quality_report import Reported, report, table
from benchmarks.quality_sets import DEMO, labelled_folders, sampled, unanswerable
from benchmarks.report import Target, write
from engine.config import EngineConfig
from engine.engine import Engine
from engine.local import LocalClient
from engine.model_files import digest
from mcp_discovery import adapters
from mcp_discovery.assemble import Choices, DiscoveryModel, runs_on_cpu
from mcp_discovery.discovery.calibration import Calibration
from mcp_discovery.discovery.catalogue import Catalogue
from mcp_discovery.discovery.sources import files

REPEATED = "pooled_real"  # repeats queries of three other sets, so it is left out of the mean


def main() -> None:
    arguments = _arguments()
    folders = labelled_folders(arguments.data)
    if not arguments.merge:
        asyncio.run(_record(arguments, folders))
    recorded = [Recorded.read(path) for path in records_of(arguments.records, arguments.adapter)]
    calibration = calibration_of(recorded[0])
    sets = {folder.name: folder for folder in folders}
    reported = [report(each, sets.get(each.name), arguments.minilm, calibration) for each in recorded]
    print(table(reported))
    shown = None if calibration is None else asdict(calibration)
    configuration = {**recorded[0].configuration, "calibration": shown}
    results = {"configuration": configuration, "sets": [each.as_json() for each in reported]}
    write("quality", results, _targets(reported), out=arguments.out)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--data", type=Path, nargs="+", required=True, help="labelled sets, or folders of them"
    )
    parser.add_argument("--records", type=Path, required=True, help="folder of what was asked")
    parser.add_argument("--out", type=Path, help="result file")
    parser.add_argument("--merge", action="store_true", help="ask nothing, report on the records")
    parser.add_argument("--minilm", type=Path, help="folder written by benchmarks.minilm")
    parser.add_argument("--adapter", default="auto", help="auto, none or a file")
    parser.add_argument("--model", help="a GGUF file or a safetensors folder")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--limit", type=int, help="at most so many queries a set")
    parser.add_argument("--candidates", type=int)
    return parser.parse_args()


def records_of(folder: Path, adapter: str) -> list[Path]:
    """The records of this adapter's runs."""
    found = sorted(folder.glob(f"*.{_label(adapter)}.json.gz"))
    if not found:
        raise SystemExit(f"there is no record with adapter {_label(adapter)} in {folder}")
    return found


def _label(adapter: str) -> str:
    """Records of different adapters lie side by side."""
    return adapter if adapter in (adapters.AUTO, adapters.NONE) else Path(adapter).stem


def calibration_of(recorded: Recorded) -> Calibration | None:
    """The present one of the adapter that the record was made with; None without an adapter."""
    sha256 = recorded.configuration["adapter_sha256"]
    known = {digest(path): path for path in adapters.shipped()}
    if not sha256:
        return None
    return adapters.calibration(known[sha256]) if sha256 in known else Calibration()


async def _record(arguments: argparse.Namespace, folders: Sequence[Path]) -> None:
    """Asks every set that is not recorded yet."""
    model = DiscoveryModel.of(arguments.model, arguments.adapter)
    cpu = runs_on_cpu(arguments.device)
    config = EngineConfig(device=arguments.device)
    engine = await asyncio.to_thread(Engine.create, config, model.path, model.adapter_path)
    try:
        for name, catalogue, queries in _asked_of(folders, arguments.limit):
            target = arguments.records / f"{name}.{_label(arguments.adapter)}.json.gz"
            discovery = model.discovery(
                LocalClient(engine),
                catalogue,
                Choices(arguments.candidates),
                device=arguments.device,
                page_tokens=config.page_tokens,
            )
            settings = {
                "model": model.name,
                "model_sha256": model.sha256,
                "adapter_sha256": model.adapter.sha256 if model.adapter else "",
                "candidates": discovery.settings.candidates,
                "queries": len(queries),
                "kernels": engine.status().kernels,
            }
            if target.exists() and Recorded.read(target).configuration == settings:
                continue
            if discovery.is_trained:
                await discovery.warm(_progress(f"{name}: tools"))
            at_once = AT_ONCE_CPU if cpu else AT_ONCE_CARD
            answered = await ask_all(discovery, queries, at_once, _progress(f"{name}: queries"))
            idle = [(each.id, each.text) for each in unanswerable() if name in each.catalogues]
            idle = idle[: arguments.limit]
            nothing = await ask_all(discovery, idle, at_once, _progress(f"{name}: unanswerable"))
            Recorded(name, settings, answered, nothing).write(target)
    finally:
        await asyncio.to_thread(engine.close)


def _asked_of(
    folders: Sequence[Path], limit: int | None
) -> list[tuple[str, Catalogue, list[tuple[str, str]]]]:
    """(name, catalogue, queries) of each set, and of the demo catalogue, which has no labels."""
    found = []
    for folder in folders:
        labelled = sampled(folder, limit)
        queries = [(query.id, query.text) for query in labelled.queries]
        found.append((labelled.name, Catalogue.of(labelled.tools), queries))
    return [*found, ("demo", Catalogue.of(files.load([DEMO]).tools), [])]


def _progress(what: str) -> Callable[[int, int], None]:
    started = last = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done == total or now - last > 5:
            last = now
            print(f"{what} {done:,} of {total:,}, {now - started:.0f} s", file=sys.stderr, flush=True)

    return show


def _targets(reported: Sequence[Reported]) -> list[Target]:
    """The promises on quality, for a run with every query and a trained adapter."""
    labelled = [each for each in reported if each.queries]
    whole = [each for each in labelled if each.margins]
    targets = []
    if whole:
        for key, metric in (("ndcg_at_10_margin", "nDCG@10"), ("hit_at_1_margin", "hit@1")):
            worst = min(each.margins[metric].mean for each in whole)
            targets.append(Target(f"quality.{key}", worst, "at least"))
    offered = [each.offered_of_60 for each in reported if each.offered_of_60 is not None]
    if offered:
        targets.append(Target("quality.unanswerable_offered", max(offered), "at most"))
    counted = [each for each in labelled if each.name != REPEATED]
    if counted:
        lost = 100 * sum(each.recall_lost for each in counted) / len(counted)
        targets.append(Target("quality.abstention_recall_points_lost", lost, "at most"))
    return targets


if __name__ == "__main__":
    main()
