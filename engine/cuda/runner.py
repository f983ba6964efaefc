"""The device side of a step on a card: two steps in flight, one copy in and one or two out each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine.batch import StepRow
from engine.cuda.step import CapturedSteps
from engine.decode import choose
from engine.errors import EngineFault
from engine.memory import LOGIT_ROWS
from engine.runner import Output, Read, ReadPair, ReadToken, ReadVector


class CudaRunner:
    """`Runner` over captured steps. Not thread-safe: the step loop owns it and the card.

    `head` [vocabulary, hidden] and `logits` float32 [LOGIT_ROWS, vocabulary] lie on the device. What
    a score or an embedding reads, one hidden state a row, goes to the host whole: it is small, and
    two logits of it are cheaper there than three more launches.
    """

    depth = 2

    def __init__(
        self, steps: CapturedSteps, head: Tensor, logits: Tensor, stream: torch.cuda.Stream, kernels: str
    ) -> None:
        self.kernels = kernels
        self._steps, self._head, self._logits, self._stream = steps, head, logits, stream
        rows = steps.most_outputs
        self._states = [
            torch.zeros((rows, head.shape[1]), dtype=head.dtype, pin_memory=True) for _ in range(2)
        ]
        self._picked = [torch.zeros(rows, dtype=torch.int64, pin_memory=True) for _ in range(2)]
        self._best = [torch.zeros(rows, dtype=torch.float32, pin_memory=True) for _ in range(2)]
        self._columns: dict[int, Tensor] = {}  # rows of the head that scores read, on the host
        self._turn = 0

    def warm_up(self) -> None:
        """Runs every way out once, so that its kernels are loaded before anybody waits for them."""
        rows = [self._steps.empty_row] * 3
        reads: list[Read] = [ReadVector(), ReadPair(0, 1), ReadToken()]
        drawn: list[Read] = [ReadToken(temperature=1.0)]
        for some in (reads, reads[2:], drawn):
            self.launch(rows[: len(some)], some).collect()

    def launch(self, rows: list[StepRow], reads: list[Read]) -> _Launched:
        self._turn = turn = 1 - self._turn
        hidden = self._steps.launch(rows, turn)
        greedy = [i for i, read in enumerate(reads) if isinstance(read, ReadToken) and _is_greedy(read)]
        drawn = [i for i, read in enumerate(reads) if isinstance(read, ReadToken) and not _is_greedy(read)]
        with torch.cuda.stream(self._stream), torch.inference_mode():
            if len(greedy) + len(drawn) < len(reads):
                self._states[turn][: len(reads)].copy_(hidden, non_blocking=True)
            self._pick(hidden, greedy, turn)
            logits = {i: self._head_logits(hidden[i : i + 1])[0].cpu() for i in drawn}
            ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ended.record(self._stream)
        return _Launched(self, reads, turn, greedy, logits, ended)

    def _pick(self, hidden: Tensor, places: list[int], turn: int) -> None:
        """The likeliest token of the rows `places`, and its logit, on their way to the host."""
        for at in range(0, len(places), LOGIT_ROWS):
            some = places[at : at + LOGIT_ROWS]
            chosen = hidden if len(places) == hidden.shape[0] <= LOGIT_ROWS else hidden[some]
            best, token = self._head_logits(chosen).max(dim=-1)
            self._best[turn][at : at + len(some)].copy_(best, non_blocking=True)
            self._picked[turn][at : at + len(some)].copy_(token, non_blocking=True)

    def _head_logits(self, states: Tensor) -> Tensor:
        """float32 [n, vocabulary] of n <= LOGIT_ROWS states, in a buffer that the next call overwrites."""
        return torch.mm(states, self._head.t(), out_dtype=torch.float32, out=self._logits[: states.shape[0]])

    def collect(self, step: _Launched) -> list[Output]:
        """Waits for the step. Raises EngineFault where an output is not a number."""
        step.ended.synchronize()
        outputs: list[Output] = [0] * len(step.reads)
        best = self._best[step.turn][: len(step.greedy)]
        if not best.isfinite().all():
            raise EngineFault("the model's logits are not finite; its weights or pages are damaged")
        for i, token in zip(step.greedy, self._picked[step.turn].tolist(), strict=False):
            outputs[i] = token
        for i, logits in step.logits.items():
            read = step.reads[i]
            if isinstance(read, ReadToken):
                outputs[i] = choose(
                    logits,
                    temperature=read.temperature,
                    seed=read.seed,
                    index=read.index,
                    allowed=read.allowed,
                )
        self._read_states(step, outputs)
        return outputs

    def _read_states(self, step: _Launched, outputs: list[Output]) -> None:
        pairs = [(i, read) for i, read in enumerate(step.reads) if isinstance(read, ReadPair)]
        vectors = [i for i, read in enumerate(step.reads) if isinstance(read, ReadVector)]
        if not pairs and not vectors:
            return
        states = self._states[step.turn][: len(step.reads)].float()
        if not states.isfinite().all():
            raise EngineFault("the model's outputs are not finite; its weights or pages are damaged")
        for kind in {read for _, read in pairs}:
            places = [i for i, read in pairs if read == kind]
            difference = states[places] @ (self._column(kind.positive) - self._column(kind.negative))
            for i, value in zip(places, torch.sigmoid(difference.double()).tolist(), strict=True):
                outputs[i] = value
        if vectors:
            units = functional.normalize(states[vectors], dim=-1)
            for i, unit in zip(vectors, units.tolist(), strict=True):
                outputs[i] = tuple(unit)

    def _column(self, token: int) -> Tensor:
        if token not in self._columns:
            self._columns[token] = self._head[token].float().cpu()
        return self._columns[token]


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step in flight: which reads took the likeliest token, and the logits of those that draw."""

    runner: CudaRunner
    reads: list[Read]
    turn: int
    greedy: list[int]
    logits: dict[int, Tensor]
    ended: torch.cuda.Event

    def collect(self) -> list[Output]:
        return self.runner.collect(self)


def _is_greedy(read: ReadToken) -> bool:
    return not read.temperature and read.allowed is None
