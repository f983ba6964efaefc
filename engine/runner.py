"""The device side of a step: parts in, for each output row what its request reads of it.

The engine keeps at most `depth` steps in flight: with 2, the host works on one step while the
device runs the other. Sequences in flight are not launched again before they are collected.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine.attention.base import Attention
from engine.batch import KVCache, Part, StepBlock, build_batch, single_rows
from engine.decode import choose
from engine.errors import EngineFault
from engine.memory import LOGIT_ROWS
from engine.model import Model


@dataclass(frozen=True, slots=True)
class ReadVector:
    """The final-norm hidden state at unit length: a tuple of floats."""


@dataclass(frozen=True, slots=True)
class ReadPair:
    """The probability of `positive` against `negative`: a float."""

    positive: int
    negative: int


@dataclass(frozen=True, slots=True)
class ReadToken:
    """The next token, an int: greedy at `temperature` 0, else drawn for (`seed`, `index`).

    `index` counts the tokens generated before; `allowed` restricts the choice.
    """

    temperature: float = 0.0
    seed: int = 0
    index: int = 0
    allowed: tuple[int, ...] | None = None


Read = ReadVector | ReadPair | ReadToken
Output = tuple[float, ...] | float | int


class InFlight(Protocol):
    """A step that was launched."""

    def wait(self) -> None:
        """Until the device has done it."""
        ...

    def collect(self) -> list[Output]:
        """One output for each read, in order, on the host. Waits for the device."""
        ...


class Runner(Protocol):
    """Runs steps in the order of their launches. An exception of either call is a device fault."""

    @property
    def depth(self) -> int:
        """Most steps in flight; with 1, a launch computes the step."""
        ...

    @property
    def kernels(self) -> str:
        """Which kernels run, for people."""
        ...

    def launch(self, parts: list[Part], reads: list[Read]) -> InFlight:
        """`reads` has one entry for each part whose `output` is set, in order; of a block every row is
        read so, each into an output of its own."""
        ...


def single_reads(parts: Iterable[Part], reads: Iterable[Read]) -> list[Read]:
    """A read for each row that has an output."""
    wanted = iter(reads)
    single: list[Read] = []
    for part in parts:
        if isinstance(part, StepBlock):
            single += [next(wanted)] * len(part)
        elif part.output:
            single.append(next(wanted))
    return single


@dataclass(frozen=True, slots=True)
class _Done:
    outputs: list[Output]

    def wait(self) -> None:
        """Nothing is in flight."""

    def collect(self) -> list[Output]:
        return self.outputs


class TorchRunner:
    """Runs each step to its end at once, on the device of the cache."""

    depth = 1

    def __init__(self, model: Model, attention: Attention, kv: KVCache) -> None:
        self._model = model
        self._attention = attention
        self._kv = kv
        dtype = str(model.weights.embedding.dtype).removeprefix("torch.")
        self.kernels = f"{attention.name} {kv.data.device.type} {dtype}"

    def launch(self, parts: list[Part], reads: list[Read]) -> InFlight:
        batch = build_batch(single_rows(parts), self._kv.page_tokens, self._kv.data.device)
        with torch.inference_mode():
            hidden = self._model.forward(batch, self._attention)
            return _Done(read_outputs(self._model, hidden, single_reads(parts, reads)))


def read_outputs(model: Model, hidden: Tensor, reads: Sequence[Read]) -> list[Output]:
    """hidden [O, hidden], final-normed, one row for each read. One product of logits for each kind.

    Raises EngineFault where what is read is not a number.
    """
    outputs: list[Output] = [0] * len(reads)
    vectors = [i for i, read in enumerate(reads) if isinstance(read, ReadVector)]
    if vectors:
        for i, vector in zip(vectors, _unit_vectors(hidden[vectors]), strict=True):
            outputs[i] = vector
    pairs = [(i, read) for i, read in enumerate(reads) if isinstance(read, ReadPair)]
    if pairs:
        values = _probabilities(model, hidden[[i for i, _ in pairs]], [read for _, read in pairs])
        for (i, _), value in zip(pairs, values, strict=True):
            outputs[i] = value
    tokens = [(i, read) for i, read in enumerate(reads) if isinstance(read, ReadToken)]
    for at in range(0, len(tokens), LOGIT_ROWS):
        some = tokens[at : at + LOGIT_ROWS]
        for (i, read), logits in zip(some, model.logits(hidden[[i for i, _ in some]]), strict=True):
            outputs[i] = choose(
                logits,
                temperature=read.temperature,
                seed=read.seed,
                index=read.index,
                allowed=read.allowed,
            )
    return outputs


def _unit_vectors(hidden: Tensor) -> list[tuple[float, ...]]:
    """[n, hidden] -> n tuples of unit length."""
    return [tuple(row) for row in _finite(functional.normalize(hidden.float(), dim=-1)).tolist()]


def _probabilities(model: Model, hidden: Tensor, reads: Sequence[ReadPair]) -> list[float]:
    """1 / (1 + exp(logit[negative] - logit[positive])) of each row, in float64."""
    columns = sorted({token for read in reads for token in (read.positive, read.negative)})
    place = {token: column for column, token in enumerate(columns)}
    logits = model.logits(hidden, torch.tensor(columns, device=hidden.device)).double().cpu()
    picked = torch.tensor([(place[read.positive], place[read.negative]) for read in reads])
    positive, negative = logits.gather(1, picked).unbind(1)
    values: list[float] = _finite(torch.sigmoid(positive - negative)).tolist()
    return values


def _finite(values: Tensor) -> Tensor:
    if not values.isfinite().all():
        raise EngineFault("the model's outputs are not finite; its weights or pages are damaged")
    return values
