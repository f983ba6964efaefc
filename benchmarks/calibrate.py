"""Fits an adapter's scale of scores and chooses its default threshold, from records of benchmarks.quality.

    python -m benchmarks.calibrate --train DIR --train-records FOLDER --dev DIR --dev-records FOLDER [--write]

Slope and offset maximise the likelihood of right and wrong candidates of the training sets, each set
with the same weight. The threshold is chosen on dev: the lowest at which no catalogue has more than
`MOST_OFFERED` of 60 requests that nothing serves offered a tool, as long as R@5 loses at most
`MOST_LOST` on the mean of the sets. `--write` puts the constants beside the shipped adapter.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.quality import REPEATED, records_of
from benchmarks.quality_rank import Asked, Recorded
from benchmarks.quality_report import ABSTENTION_QUERIES, calibrated, offers, recall_lost, scored_pairs
from benchmarks.quality_sets import labelled_folders, sampled
from engine.weights import digest
from mcp_discovery import adapters
from mcp_discovery.discovery.calibration import Calibration
from mcp_discovery.discovery.catalogue import Catalogue
from mcp_discovery.evaluate import LabelledSet

MOST_OFFERED, MOST_LOST = 5.0, 0.02
THRESHOLDS = (0.001, 0.002, 0.003, 0.005, 0.007, *(round(0.01 * step, 2) for step in range(1, 91)))
Pairs = tuple[NDArray[np.float64], NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class Set:
    """A labelled set with what was asked of it."""

    labelled: LabelledSet
    catalogue: Catalogue
    asked: Sequence[Asked]

    def pairs(self) -> Pairs:
        """(evidence, 1 where right) of every candidate of every query."""
        found: list[float] = []
        right: list[float] = []
        for query, each in zip(self.labelled.queries, self.asked, strict=True):
            wanted = {id for label in query.labels for id in label}
            for position, value in each.evidence().items():
                found.append(value)
                right.append(float(self.catalogue.tools[position].id in wanted))
        return np.array(found), np.array(right)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--train", type=Path, nargs="+", required=True)
    parser.add_argument("--train-records", type=Path, required=True)
    parser.add_argument("--dev", type=Path, nargs="+", required=True)
    parser.add_argument("--dev-records", type=Path, required=True)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    recorded = _recorded(arguments.dev_records)
    dev = _sets(arguments.dev, recorded)
    train = _sets(arguments.train, _recorded(arguments.train_records))
    fitted = fit([each.pairs() for each in train.values()])
    print(f"slope {fitted.slope:.4f}, offset {fitted.offset:.4f}")
    idle = {name: each.unanswerable for name, each in recorded.items() if each.unanswerable}
    chosen = choose(fitted, dev, idle)
    for split, sets in (("train", train), ("dev", dev)):
        for name, each in sets.items():
            ece = calibrated(*scored_pairs(each.labelled, each.catalogue, each.asked, chosen)).ece
            print(f"{split} {name:18} ECE {ece:.4f}")
    if arguments.write:
        _write(chosen, recorded, list(train))


def _recorded(folder: Path) -> dict[str, Recorded]:
    return {each.name: each for each in map(Recorded.read, records_of(folder, adapters.AUTO))}


def _sets(folders: Sequence[Path], recorded: dict[str, Recorded]) -> dict[str, Set]:
    """The labelled sets of `folders` that were recorded."""
    found = {}
    for folder in labelled_folders(folders):
        record = recorded.get(folder.name)
        if record is not None:
            labelled = sampled(folder, len(record.queries))
            found[folder.name] = Set(labelled, Catalogue.of(labelled.tools), record.queries)
    return found


def fit(sets: Sequence[Pairs]) -> Calibration:
    """Logistic regression of right on evidence by Newton's method, every set weighing the same."""
    x = np.concatenate([evidence for evidence, _ in sets])
    y = np.concatenate([right for _, right in sets])
    weight = np.concatenate([np.full(len(right), 1.0 / len(right)) for _, right in sets])
    design = np.stack([x, np.ones_like(x)], axis=1)
    beta = np.array([0.5, -0.5 * float(np.average(x[y > 0.5]))])
    for _ in range(100):
        p = 1.0 / (1.0 + np.exp(-np.clip(design @ beta, -500, 500)))
        gradient = design.T @ (weight * (y - p))
        curvature = (design * (weight * p * (1.0 - p))[:, None]).T @ design
        step = np.linalg.solve(curvature + 1e-9 * np.eye(2), gradient)
        beta += np.clip(step, -1.0, 1.0)
        if np.abs(step).max() < 1e-9:
            break
    return Calibration(slope=round(float(beta[0]), 4), offset=round(float(beta[1]), 4))


def choose(fitted: Calibration, dev: dict[str, Set], idle: dict[str, list[Asked]]) -> Calibration:
    """`fitted` with its threshold; prints what each threshold does."""
    counted = [each for name, each in dev.items() if name != REPEATED]
    chosen = None
    print("min_score  R@5 lost  offered of 60:", ", ".join(idle))
    for threshold in THRESHOLDS:
        trial = replace(fitted, min_score=threshold)
        lost = float(np.mean([recall_lost(s.labelled, s.catalogue, s.asked, trial) for s in counted]))
        shares = [
            ABSTENTION_QUERIES * sum(offers(asked, trial) for asked in each) / len(each)
            for each in idle.values()
        ]
        print(f"{threshold:9.3f}  {lost:8.4f}  " + " ".join(f"{share:5.1f}" for share in shares))
        if chosen is None and max(shares) <= MOST_OFFERED and lost <= MOST_LOST:
            chosen = trial
        if lost > 3 * MOST_LOST:
            break
    if chosen is None:
        print("no threshold keeps both bounds")
    return chosen or fitted


def _write(chosen: Calibration, recorded: dict[str, Recorded], train: list[str]) -> None:
    sha256 = next(iter(recorded.values())).configuration["adapter_sha256"]
    path = next(path for path in adapters.shipped() if digest(path) == sha256).with_suffix(".json")
    note = {
        "adapter_sha256": sha256,
        "calibration": asdict(chosen),
        "fitted_on": train,
        "threshold_chosen_on": sorted(recorded),
    }
    path.write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
