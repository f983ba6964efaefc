"""The device side of a step on a card: two steps in flight, one copy in and one or two out each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch import Part
from engine.cuda.head import CapturedHead
from engine.cuda.outputs import Wanted
from engine.cuda.step import CapturedSteps
from engine.decode import choose
from engine.errors import EngineFault
from engine.memory import LOGIT_ROWS
from engine.runner import Output, Read, ReadPair, ReadToken, ReadVector

MOST_DIRECTIONS = 64  # kept on the host: a caller may ask for any pair


class CudaRunner:
    """`Runner` over captured steps. Not thread-safe: the step loop owns it and the card.

    What a score or an embedding reads, one hidden state a row, goes to the host whole: it is small, and
    two logits of it are cheaper there than three more launches. `head_weight` [vocabulary, hidden].
    """

    depth = 2

    def __init__(
        self,
        steps: CapturedSteps,
        head: CapturedHead,
        head_weight: Tensor,
        stream: torch.cuda.Stream,
        kernels: str,
    ) -> None:
        self.kernels = kernels
        self._steps, self._head, self._head_weight, self._stream = steps, head, head_weight, stream
        rows, hidden = steps.most_outputs, head_weight.shape[1]
        self._states = [
            torch.zeros((rows, hidden), dtype=head_weight.dtype, pin_memory=True) for _ in range(2)
        ]
        self._picked = [torch.zeros(rows, dtype=torch.int64, pin_memory=True) for _ in range(2)]
        self._best = [torch.zeros(rows, dtype=torch.float32, pin_memory=True) for _ in range(2)]
        # Differences of the rows of the head that scores read, on the host.
        self._directions: dict[tuple[int, int], Tensor] = {}
        self._turn = 0

    def warm_up(self) -> None:
        """Runs every way out once, so that its kernels are loaded before anybody waits for them."""
        rows: list[Part] = [self._steps.empty_row] * 3
        reads: list[Read] = [ReadVector(), ReadPair(0, 1), ReadToken()]
        drawn: list[Read] = [ReadToken(temperature=1.0)]
        for some in (reads, reads[2:], drawn):
            self.launch(rows[: len(some)], some).collect()

    def launch(self, parts: list[Part], reads: list[Read]) -> _Launched:
        self._turn = turn = 1 - self._turn
        hidden = self._steps.launch(parts, turn)
        wanted = Wanted.of(parts, reads)
        with torch.cuda.stream(self._stream), torch.inference_mode():
            if wanted.pairs or wanted.vectors:
                self._states[turn][: wanted.count].copy_(hidden, non_blocking=True)
            self._pick(hidden, wanted.greedy, turn)
            logits = {i: self._logits_of(hidden, i) for i in wanted.drawn}
            ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ended.record(self._stream)
        return _Launched(self, wanted, turn, logits, ended)

    def _pick(self, hidden: Tensor, places: list[int], turn: int) -> None:
        """The likeliest token of the rows `places`, and its logit, on their way to the host."""
        for at in range(0, len(places), LOGIT_ROWS):
            some = places[at : at + LOGIT_ROWS]
            best, token = self._head.pick(hidden, some)
            self._best[turn][at : at + len(some)].copy_(best, non_blocking=True)
            self._picked[turn][at : at + len(some)].copy_(token, non_blocking=True)

    def _logits_of(self, hidden: Tensor, place: int) -> Tensor:
        """float32 [vocabulary] on the host; waits for the step."""
        self._head.pick(hidden, [place])
        return self._head.logits[0].cpu()

    def collect(self, step: _Launched) -> list[Output]:
        """Waits for the step. Raises EngineFault where an output is not a number."""
        step.ended.synchronize()
        wanted = step.wanted
        outputs: list[Output] = [0] * wanted.count
        if wanted.greedy:
            self._read_greedy(step, outputs)
        for i, logits in step.logits.items():
            read = wanted.drawn[i]
            outputs[i] = choose(
                logits,
                temperature=read.temperature,
                seed=read.seed,
                index=read.index,
                allowed=read.allowed,
            )
        if wanted.pairs or wanted.vectors:
            wanted.read_states(self._states[step.turn][: wanted.count], self._direction, outputs)
        return outputs

    def _read_greedy(self, step: _Launched, outputs: list[Output]) -> None:
        places = step.wanted.greedy
        if not self._best[step.turn][: len(places)].isfinite().all():
            raise EngineFault("the model's logits are not finite; its weights or pages are damaged")
        for i, token in zip(places, self._picked[step.turn][: len(places)].tolist(), strict=True):
            outputs[i] = token

    def _direction(self, positive: int, negative: int) -> Tensor:
        pair = (positive, negative)
        if pair not in self._directions:
            if len(self._directions) >= MOST_DIRECTIONS:
                self._directions.clear()
            rows = [self._head_weight[token].cpu().float() for token in pair]
            self._directions[pair] = rows[0] - rows[1]
        return self._directions[pair]


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step in flight, and the logits of those of its outputs that are drawn."""

    runner: CudaRunner
    wanted: Wanted
    turn: int
    logits: dict[int, Tensor]
    ended: torch.cuda.Event

    def wait(self) -> None:
        self.ended.synchronize()

    def collect(self) -> list[Output]:
        return self.runner.collect(self)
