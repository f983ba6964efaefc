"""What fewer candidates cost in quality, from records of benchmarks.quality: the model is not asked again.

    python -m benchmarks.candidates --data DIR --records FOLDER [--counts 8 16 32] --out FILE

A call with fewer candidates scores the first of those that were recorded, and what it scores is the same, so
its order follows from the record. Figures are means over the sets but `pooled_real`, which repeats three.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

from benchmarks.quality import REPEATED, records_of
from benchmarks.quality_rank import Asked, Recorded
from benchmarks.quality_report import final_order
from benchmarks.quality_sets import labelled_folders, sampled
from benchmarks.report import write
from mcp_discovery import adapters
from mcp_discovery.discovery.catalogue import Catalogue
from mcp_discovery.evaluate import ids_of, metrics_of

METRICS = ("nDCG@10", "hit@1", "R@5", "C@10")


def with_candidates(asked: Asked, count: int) -> Asked:
    """The same query where only the first `count` candidates were scored."""
    kept = set(asked.candidates[:count])
    return replace(
        asked,
        candidates=asked.candidates[:count],
        logits=asked.logits[:count],
        cosines=asked.cosines[:count],
        scored=[position for position in asked.scored if position in kept],
    )


def quality(folder: Path, record: Recorded, counts: Sequence[int]) -> dict[str, dict[str, float]]:
    """Each metric's mean over the queries of a set, by count."""
    labelled = sampled(folder, len(record.queries))
    catalogue = Catalogue.of(labelled.tools)
    found: dict[str, dict[str, float]] = {}
    for count in counts:
        values = [
            metrics_of(query.labels, ids_of(final_order(with_candidates(asked, count)), catalogue))
            for query, asked in zip(labelled.queries, record.queries, strict=True)
        ]
        found[str(count)] = {name: round(mean(each[name] for each in values), 4) for name in METRICS}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--counts", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    records = {each.name: each for each in map(Recorded.read, records_of(given.records, adapters.AUTO))}
    folders = [folder for folder in labelled_folders(given.data) if folder.name in records]
    sets = {folder.name: quality(folder, records[folder.name], given.counts) for folder in folders}
    counted = [each for name, each in sets.items() if name != REPEATED]
    means = {
        str(count): {name: round(mean(each[str(count)][name] for each in counted), 4) for name in METRICS}
        for count in given.counts
    }
    for count, values in means.items():
        print(f"{count} candidates: {values}")
    write("candidates", {"mean": means, "sets": sets}, out=given.out)


if __name__ == "__main__":
    main()
