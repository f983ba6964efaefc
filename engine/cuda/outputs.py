"""What a step's outputs are read as, and the reading of those that come to the host as hidden states."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.batch import Part, StepBlock
from engine.errors import EngineFault
from engine.runner import Output, Read, ReadPair, ReadToken, ReadVector

_LEAST_LENGTH = 1e-12  # that a vector is divided by


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

    def read_states(
        self, states: Tensor, direction: Callable[[int, int], Tensor], outputs: list[Output]
    ) -> None:
        """Puts scores and vectors into `outputs`. `states` [count, hidden] is on the host, and so is
        `direction(positive, negative)` [hidden] float32, the difference of these rows of the head.
        Raises EngineFault where a value is not finite.

        Each call of torch gives the interpreter lock away and may wait for it as long as a switch interval,
        so there are few of them: what is small is done on Python's floats.
        """
        for (positive, negative), places in self.pairs.items():
            own = states if len(places) == self.count else states[places]
            differences: list[float] = torch.mv(own.float(), direction(positive, negative)).tolist()
            _check_finite(differences)
            for i, difference in zip(places, differences, strict=True):
                outputs[i] = _sigmoid(difference)
        if self.vectors:
            vectors = states[self.vectors].float()
            lengths = vectors.norm(dim=-1, keepdim=True)
            _check_finite(lengths.flatten().tolist())
            vectors.div_(lengths.clamp_min_(_LEAST_LENGTH))
            for i, unit in zip(self.vectors, vectors.tolist(), strict=True):
                outputs[i] = tuple(unit)


def _sigmoid(value: float) -> float:
    """1 / (1 + exp(-value)), which does not overflow for any finite value."""
    if value < 0.0:
        exponential = math.exp(value)
        return exponential / (1.0 + exponential)
    return 1.0 / (1.0 + math.exp(-value))


def _check_finite(values: list[float]) -> None:
    # No sum of as many float32 values leaves the range of a float64; of one that is not finite any does.
    if not math.isfinite(sum(values)):
        raise EngineFault("the model's outputs are not finite; its weights or pages are damaged")
