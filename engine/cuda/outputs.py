"""What a step's outputs are read as, and the reading of those that come to the host as hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from engine.batch import Part, StepBlock
from engine.errors import EngineFault
from engine.runner import Output, Read, ReadPair, ReadToken, ReadVector


@dataclass(slots=True)
class Wanted:
    """What is read of a step's outputs: the places of each kind among `count` rows that have one."""

    count: int = 0
    pairs: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    vectors: list[int] = field(default_factory=list)
    greedy: list[int] = field(default_factory=list)  # the likeliest token
    drawn: dict[int, ReadToken] = field(default_factory=dict)  # a choice over all logits

    @classmethod
    def of(cls, parts: Iterable[Part], reads: Iterable[Read]) -> Wanted:
        wanted, following = cls(), iter(reads)
        for part in parts:
            if part.output:
                wanted._add(next(following), len(part) if isinstance(part, StepBlock) else 1)
        return wanted

    def _add(self, read: Read, rows: int) -> None:
        at, self.count = self.count, self.count + rows
        if isinstance(read, ReadPair):
            self.pairs.setdefault((read.positive, read.negative), []).extend(range(at, at + rows))
        elif isinstance(read, ReadVector):
            self.vectors.extend(range(at, at + rows))
        elif not read.temperature and read.allowed is None:
            self.greedy.extend(range(at, at + rows))
        else:
            self.drawn.update(dict.fromkeys(range(at, at + rows), read))

    def read_states(self, states: Tensor, column: Callable[[int], Tensor], outputs: list[Output]) -> None:
        """Puts scores and vectors into `outputs`. `states` [count, hidden] and `column(token)` [hidden],
        float32, a row of the head, are on the host. Raises EngineFault where a value is not finite."""
        for (positive, negative), places in self.pairs.items():
            own = states if len(places) == self.count else states[places]
            difference = _finite(own.float() @ (column(positive) - column(negative)))
            for i, value in zip(places, torch.sigmoid(difference.double()).tolist(), strict=True):
                outputs[i] = value
        if self.vectors:
            units = functional.normalize(states[self.vectors].float(), dim=-1)
            for i, unit in zip(self.vectors, _finite(units).tolist(), strict=True):
                outputs[i] = tuple(unit)


def _finite(values: Tensor) -> Tensor:
    if not values.isfinite().all():
        raise EngineFault("the model's outputs are not finite; its weights or pages are damaged")
    return values
