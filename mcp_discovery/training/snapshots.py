"""Which of a run's adapters is the best: what it kept on the way, and means of that.

They are compared on catalogues that the run was not trained on, by nDCG@10 where a doubted request counts
zero; see `evaluate.Abstention`. The sets that quality is reported on choose nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from mcp_discovery.training.data import ToolSet, pooled, split_set
from mcp_discovery.training.evaluate import Abstention, Case, Figures, Reading, abstention, figures_of, read
from mcp_discovery.training.infer import Reader
from mcp_discovery.training.lora import averaged

State = Mapping[str, Tensor]
WINDOW = 3  # snapshots in a row that are averaged


def with_averages(kept: Mapping[str, State]) -> dict[str, State]:
    """The snapshots of a run in order, the means of each three in a row, and the mean of all."""
    names = list(kept)
    found = dict(kept)
    windows = [names[at : at + WINDOW] for at in range(len(names) - WINDOW + 1)]
    for window in [*windows, names]:
        if len(window) > 1:
            found[f"{window[0]}-{window[-1]}"] = averaged([kept[name] for name in window])
    return found


def held_out(
    sets: Sequence[ToolSet], shares: Mapping[str, float], seed: int, most: int
) -> tuple[list[ToolSet], list[Case]]:
    """The sets to train on, and the cases of what `shares` keeps out of training.

    Held-out tools without requests join every held-out catalogue, and on their own are one that
    serves none of the held-out requests.
    """
    kept, held = [], []
    for each in sets:
        if each.name in shares:
            each, away = split_set(each, shares[each.name], seed)
            held.append(away)
        kept.append(each)
    bare = [each for each in held if not each.queries]
    cases = [Case(pooled(each.name, each, bare), most) for each in held if each.queries]
    idle = [text for case in cases for text in case.texts]
    if bare and idle:
        strangers = pooled("strangers", bare[0], bare[1:])
        cases.append(Case(strangers, 2 * most, idle))
    return kept, cases


@dataclass(frozen=True, slots=True)
class Verdict:
    """How an adapter did on some cases."""

    figures: Mapping[str, Figures]
    abstention: Abstention | None

    @property
    def merit(self) -> float:
        if self.abstention is not None:
            return self.abstention.mean_kept
        return sum(each["scored+cos"]["ndcg10"] for each in self.figures.values()) / len(self.figures)


def judge(reader: Reader, cases: Sequence[Case]) -> Verdict:
    readings: list[Reading] = [read(reader, case) for case in cases]
    figures = {each.case.name: figures_of(each) for each in readings if each.case.queries}
    return Verdict(figures, abstention(readings))
