"""Fits an adapter's scale of scores and the bound of doubt, from records of benchmarks.quality.

    python -m benchmarks.calibrate --data DIR --records FOLDER [--write]

Slope and offset maximise the likelihood of right and wrong candidates of the labelled sets, each set
with the same weight. The sets must be ones that the adapter was not trained on: of those it knows it is
far too sure. What the fit is worth on a set that took no part is told by leaving each set out in turn.
For the bound of doubt see `choose`. `--write` puts the constants beside the shipped adapter.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.quality import REPEATED, records_of
from benchmarks.quality_rank import Asked, Recorded
from benchmarks.quality_report import ABSTENTION_QUERIES, calibrated, offers, recall_lost, scored_pairs
from benchmarks.quality_sets import catalogue_size, labelled_folders, sampled
from engine.model_files import digest
from mcp_discovery import adapters
from mcp_discovery.discovery.calibration import BY_WORDS, Calibration
from mcp_discovery.discovery.catalogue import Catalogue
from mcp_discovery.evaluate import LabelledSet

MOST_OFFERED = 5.5  # of 60 requests that nothing serves, all catalogues together
WEIGHTS = (10.0, 20.0, 30.0, 50.0)
GROWTHS = (0.0, 0.02, 0.03, 0.04)  # of the bound with each doubling of the tools, for a weight of 1
FLOORS = (-9.0, -4.0)
WORDS = (0.0, 0.5, 1.0)
FAIR, A_POINT = 6.0, 3.0  # requests of 60 a catalogue may let through; so many more count as a point of R@5
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
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    recorded = _recorded(arguments.records)
    sets = _sets(arguments.data, recorded)
    errors = left_out_errors(sets)
    print("ECE with the set left out:", ", ".join(f"{name} {error:.4f}" for name, error in errors.items()))
    fitted = fit([each.pairs() for name, each in sets.items() if name != REPEATED])
    print(f"slope {fitted.slope:.4f}, offset {fitted.offset:.4f}")
    idle = {name: each.unanswerable for name, each in recorded.items() if each.unanswerable}
    chosen = choose(fitted, sets, idle)
    if arguments.write:
        _write(chosen, recorded, errors)


def left_out_errors(sets: dict[str, Set]) -> dict[str, float]:
    """Expected calibration error on each set of the fit to the others."""
    errors = {}
    for name, each in sets.items():
        others = [other.pairs() for key, other in sets.items() if key not in (name, REPEATED)]
        if others:
            scored = scored_pairs(each.labelled, each.catalogue, each.asked, fit(others))
            errors[name] = calibrated(*scored).ece
    return errors


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
    """`fitted` with a weight and a bound of doubt; prints what each weight costs.

    For each weight of the cosine, growth of the bound, floor and worth of the words the lowest bound that
    lets at most `MOST_OFFERED` of 60 requests that nothing serves through, all catalogues together; of these
    the one that costs least, in points of R@5 on the mean and in what the worst catalogue lets through
    above `FAIR`.
    """
    counted = [each for name, each in dev.items() if name != REPEATED]
    sizes = {
        name: len(dev[name].catalogue.tools) if name in dev else catalogue_size(name, None) for name in idle
    }
    trials: list[tuple[float, Calibration]] = []
    for weight, growth, floor, words in product(WEIGHTS, GROWTHS, FLOORS, WORDS):
        scale = replace(
            fitted,
            doubt_weight=weight,
            doubt_below=0.0,
            doubt_growth=round(weight * growth, 3),
            doubt_floor=floor,
            doubt_words=words,
        )
        best = [_margin(asked, scale, sizes[name]) for name, each in idle.items() for asked in each]
        bound = float(np.quantile(best, 1.0 - MOST_OFFERED / ABSTENTION_QUERIES, method="higher"))
        trial = replace(scale, doubt_below=round(bound + 1e-3, 3))
        lost = [recall_lost(each.labelled, each.catalogue, each.asked, trial) for each in counted]
        shares = {
            name: ABSTENTION_QUERIES * sum(offers(asked, trial, sizes[name]) for asked in each) / len(each)
            for name, each in idle.items()
        }
        unfair = max(max(shares.values()) - FAIR, 0.0)
        trials.append((100.0 * float(np.mean(lost)) + unfair / A_POINT, trial))
        print(
            f"weight {weight:g}, floor {floor:g}, words {words:g}, "
            f"bound {trial.doubt_below} + {trial.doubt_growth} a doubling: "
            f"R@5 lost {np.mean(lost):.4f}; offered of 60:"
        )
        print("  ", ", ".join(f"{name} {share:.1f}" for name, share in shares.items()))
        print("   lost:", ", ".join(f"{x.labelled.name} {y:.3f}" for x, y in zip(counted, lost, strict=True)))
    cost, chosen = min(trials, key=lambda each: each[0])
    print(f"chosen at a cost of {cost:.2f}: {chosen}")
    return chosen


def _margin(asked: Asked, scale: Calibration, tools: int) -> float:
    """By how much the best candidate is above the bound."""
    logits, cosines = asked.readings()
    told = frozenset(asked.by_words()[:BY_WORDS])
    best = max(
        scale.assurance(value, cosines[position], position in told) for position, value in logits.items()
    )
    return best - scale.bound(tools)


def _write(chosen: Calibration, recorded: dict[str, Recorded], errors: dict[str, float]) -> None:
    sha256 = next(iter(recorded.values())).configuration["adapter_sha256"]
    path = next(path for path in adapters.shipped() if digest(path) == sha256).with_suffix(".json")
    note = {
        "adapter_sha256": sha256,
        "calibration": asdict(chosen),
        "queries": {name: len(each.queries) for name, each in recorded.items() if each.queries},
        "requests_nothing_serves": {
            name: len(each.unanswerable) for name, each in recorded.items() if each.unanswerable
        },
        "ece_with_the_set_left_out": {name: round(error, 4) for name, error in errors.items()},
    }
    path.write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
