"""Fits an adapter's scale of scores and chooses its default threshold, from records of benchmarks.quality.

    python -m benchmarks.calibrate --train DIR --train-records FOLDER --dev DIR --dev-records FOLDER [--write]

Slope and offset maximise the likelihood of right and wrong candidates of the training sets, each set
with the same weight. The bound of doubt is chosen on dev: for each weight of the cosine the lowest that
lets at most `MOST_OFFERED` of 60 requests that nothing serves through; of these the one that costs least
R@5 on the mean of the sets. `--write` puts the constants beside the shipped adapter.
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

MOST_OFFERED = 5.5  # of 60 requests that nothing serves, all catalogues together
WEIGHTS = (10.0, 20.0, 30.0, 50.0, 80.0)
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
    """`fitted` with the weight and bound of doubt that cost least R@5; prints what each weight costs."""
    counted = [each for name, each in dev.items() if name != REPEATED]
    everything = [asked for each in idle.values() for asked in each]
    trials = []
    for weight in WEIGHTS:
        scale = replace(fitted, doubt_weight=weight)
        best = [_best(asked, scale) for asked in everything]
        bound = float(np.quantile(best, 1.0 - MOST_OFFERED / ABSTENTION_QUERIES, method="higher"))
        trial = replace(scale, doubt_below=round(bound + 1e-3, 3))
        lost = [recall_lost(each.labelled, each.catalogue, each.asked, trial) for each in counted]
        shares = {
            name: ABSTENTION_QUERIES * sum(offers(asked, trial) for asked in each) / len(each)
            for name, each in idle.items()
        }
        trials.append((float(np.mean(lost)), trial))
        print(f"weight {weight:g}, bound {trial.doubt_below}: R@5 lost {np.mean(lost):.4f}; offered of 60:")
        print("  ", ", ".join(f"{name} {share:.1f}" for name, share in shares.items()))
        print("   lost:", ", ".join(f"{x.labelled.name} {y:.3f}" for x, y in zip(counted, lost, strict=True)))
    return min(trials, key=lambda trial: trial[0])[1]


def _best(asked: Asked, scale: Calibration) -> float:
    """The most that any candidate has of what doubt looks at."""
    logits, cosines = asked.readings()
    return max(scale.assurance(value, cosines[position]) for position, value in logits.items())


def _write(chosen: Calibration, recorded: dict[str, Recorded], train: list[str]) -> None:
    sha256 = next(iter(recorded.values())).configuration["adapter_sha256"]
    path = next(path for path in adapters.shipped() if digest(path) == sha256).with_suffix(".json")
    note = {
        "adapter_sha256": sha256,
        "calibration": asdict(chosen),
        "fitted_on": train,
        "doubt_chosen_on": sorted(recorded),
    }
    path.write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
