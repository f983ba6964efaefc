"""A neighbour on the card: a process that behaves like a resident serving model of 30B parameters.

    python -m benchmarks.neighbour --leave-mib 2804 [--duty 0.6] [--busy]

It holds random weights in the shape of a 30B-A3B mixture of experts in bfloat16 (57 GiB) and a pool of keys
and values that leaves just `--leave-mib` free. While busy it decodes: each step reads all the weights and
every sequence's context, as a batch of 64 does, and is followed by a pause that makes its kernels run for
`--duty` of the time while nothing else is on the card. The kernels and the memory traffic are a decoder's;
the text is none.

Orders come as lines on standard input: `busy`, `idle`, `report`, `stop`. Each is answered by one JSON line
about the time since the last one, the first comes when the memory is held, the last at the end:
`step_p50_ms` and `step_p99_ms` from launch to end; `running_share`, of the time, in which a step was under
way, waiting for the card included; `card_share`, the part of the card's time that its work is worth, which
is its steps at the pace they have alone.
"""

from __future__ import annotations

import argparse
import json
import math
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

MIB = 1 << 20
TRIALS = 30  # steps that set the pace alone
ORDERS = ("busy", "idle", "report", "stop")


@dataclass(frozen=True, slots=True)
class Shape:
    """A mixture-of-experts decoder and its batch; the defaults are Qwen3-30B-A3B's sizes."""

    layers: int = 48
    hidden: int = 2048
    heads: int = 32
    kv_heads: int = 4
    head_dim: int = 128
    experts: int = 128
    experts_per_token: int = 8
    expert_hidden: int = 768
    vocabulary: int = 151_936
    batch: int = 64
    context: int = 1024  # tokens of each sequence that a step reads

    @property
    def rows(self) -> int:
        """Of each expert, with the load spread evenly."""
        return max(1, self.batch * self.experts_per_token // self.experts)


def random_tensor(device: torch.device, dtype: torch.dtype, *size: int) -> Tensor:
    """Uniform, scaled to the fan-in, so that activations stay finite whatever the depth."""
    bound = math.sqrt(3.0 / size[-2])
    return torch.empty(size, device=device, dtype=dtype).uniform_(-bound, bound)


class Layer:
    """Weights of one layer, and its step."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        def made(*size: int) -> Tensor:
            return random_tensor(device, dtype, *size)

        self._shape = shape
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self._qkv = made(shape.hidden, queries + 2 * keys)
        self._out = made(queries, shape.hidden)
        self._router = made(shape.hidden, shape.experts)
        self._gate_up = made(shape.experts, shape.hidden, 2 * shape.expert_hidden)
        self._down = made(shape.experts, shape.expert_hidden, shape.hidden)
        cached = (shape.batch * shape.kv_heads, shape.context, shape.head_dim)
        self._keys, self._values = made(*cached), made(*cached)

    def __call__(self, hidden: Tensor) -> Tensor:
        """(batch, hidden) -> the same."""
        hidden = hidden + self._attention(_normed(hidden))
        return hidden + self._mixture(_normed(hidden))

    def _attention(self, hidden: Tensor) -> Tensor:
        shape = self._shape
        queries, keys, values = torch.split(
            hidden @ self._qkv,
            [shape.heads * shape.head_dim, *[shape.kv_heads * shape.head_dim] * 2],
            dim=1,
        )
        groups = queries.reshape(shape.batch * shape.kv_heads, -1, shape.head_dim)
        self._keys[:, -1].copy_(keys.reshape(-1, shape.head_dim))
        self._values[:, -1].copy_(values.reshape(-1, shape.head_dim))
        weights = torch.bmm(groups, self._keys.transpose(1, 2)) / math.sqrt(shape.head_dim)
        attended = torch.bmm(torch.softmax(weights, dim=-1), self._values)
        return attended.reshape(shape.batch, -1) @ self._out

    def _mixture(self, hidden: Tensor) -> Tensor:
        """Every expert reads its weights for its rows; the rows go round, as no text decides."""
        shape = self._shape
        weights = torch.softmax(hidden @ self._router, dim=-1).mean(dim=1, keepdim=True)
        dealt = hidden.repeat(-(-shape.experts * shape.rows // shape.batch), 1)[: shape.experts * shape.rows]
        gate, up = torch.bmm(dealt.reshape(shape.experts, shape.rows, -1), self._gate_up).chunk(2, dim=-1)
        mixed = torch.bmm(torch.nn.functional.silu(gate) * up, self._down)
        return mixed.reshape(-1, shape.hidden)[: shape.batch] * weights


def _normed(hidden: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(hidden, hidden.shape[-1:])


class Decoder:
    """The model and one decode step; on a card the step is one captured graph."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        self._device = device
        self._embeddings = random_tensor(device, dtype, shape.vocabulary, shape.hidden)
        self.layers = [Layer(shape, device, dtype) for _ in range(shape.layers)]
        self._head = random_tensor(device, dtype, shape.hidden, shape.vocabulary)
        self.tokens = torch.randint(shape.vocabulary, (shape.batch,), device=device)
        self.run = self._captured() if device.type == "cuda" else self._step

    @torch.inference_mode()
    def _step(self) -> None:
        """One token for each sequence, which is the next step's input."""
        hidden = self._embeddings[self.tokens]
        for layer in self.layers:
            hidden = layer(hidden)
        self.tokens.copy_((_normed(hidden) @ self._head).argmax(dim=1))

    def _captured(self) -> Callable[[], None]:
        """The step as a graph; returns when it has run."""
        torch.cuda.synchronize()  # the weights were filled on another stream
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph, stream=stream):
            self._step()

        def run() -> None:
            graph.replay()
            torch.cuda.synchronize()

        return run


def fill(leave_mib: int) -> Tensor:
    """Takes what is free on the card but for `leave_mib`, to 2 MiB. What the driver needs to map it comes
    out of the same memory, so a block that leaves too little is given back for a smaller one."""
    from engine.cuda.nvml import read_card

    torch.cuda.empty_cache()
    take = (read_card().free // MIB - leave_mib) // 2 * 2
    while take > 0:
        block = torch.empty(take * MIB, dtype=torch.uint8, device="cuda")
        short = leave_mib - read_card().free // MIB
        if short <= 0:
            return block
        del block
        torch.cuda.empty_cache()
        take -= -(-short // 2) * 2
    return torch.empty(0, dtype=torch.uint8)


@dataclass
class Tally:
    """Steps since the last report."""

    began: float = field(default_factory=time.monotonic)
    steps: list[float] = field(default_factory=list)  # seconds each

    def report(self, mode: str, alone_s: float) -> dict[str, object]:
        seconds = max(time.monotonic() - self.began, 1e-9)
        ordered = sorted(self.steps)
        return {
            "mode": mode,
            "seconds": round(seconds, 2),
            "steps": len(ordered),
            "step_alone_ms": round(alone_s * 1e3, 2),
            "step_p50_ms": _at(ordered, 0.5),
            "step_p99_ms": _at(ordered, 0.99),
            "running_share": round(sum(ordered) / seconds, 3),
            "card_share": round(min(1.0, len(ordered) * alone_s / seconds), 3),
        }


def _at(ordered: list[float], share: float) -> float | None:
    """A quantile in milliseconds, by nearest rank."""
    return round(ordered[math.ceil(share * len(ordered)) - 1] * 1e3, 2) if ordered else None


class Neighbour:
    """Steps while busy, and answers orders between two steps."""

    def __init__(
        self, step: Callable[[], None], duty: float, tell: Callable[[dict[str, object]], None]
    ) -> None:
        self._step, self._duty, self._tell = step, duty, tell
        self.alone_s = self._pace()

    def _pace(self) -> float:
        """Seconds of a step with the card to itself: the median of some."""
        return sorted(self._timed() for _ in range(TRIALS))[TRIALS // 2]

    def _timed(self) -> float:
        began = time.perf_counter()
        self._step()
        return time.perf_counter() - began

    def run(self, orders: queue.Queue[str], mode: str) -> None:
        """Until the order `stop`. Between steps it pauses for what the duty leaves of its pace alone: beside
        others a step takes longer and the pause does not, so that the share never falls below the duty."""
        tally = Tally()
        pause = self.alone_s * (1.0 - self._duty) / self._duty
        while True:
            try:
                order = orders.get(timeout=pause) if mode == "busy" else orders.get()
            except queue.Empty:
                tally.steps.append(self._timed())
                continue
            self._tell(tally.report(mode, self.alone_s))
            tally = Tally()
            if order == "stop":
                return
            mode = mode if order == "report" else order


def read_orders(lines: Iterator[str], orders: queue.Queue[str]) -> None:
    """Puts the orders that come; the end of the input is `stop`."""
    for line in lines:
        if line.strip() in ORDERS:
            orders.put(line.strip())
    orders.put("stop")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--leave-mib", type=int, default=2740 + 64, help="of the card, free by NVML")
    parser.add_argument("--duty", type=float, default=0.6)
    parser.add_argument("--busy", action="store_true", help="begin busy")
    parser.add_argument("--layers", type=int, default=Shape().layers)
    parser.add_argument("--experts", type=int, default=Shape().experts)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path, help="a file for the JSON lines as well")
    given = parser.parse_args()
    if not 0.0 < given.duty < 1.0:
        parser.error("--duty is a share of the time, above 0 and below 1")
    device = torch.device(given.device)
    shape = Shape(layers=given.layers, experts=given.experts)
    decoder = Decoder(shape, device)

    def tell(told: dict[str, object]) -> None:
        print(json.dumps(told), flush=True)
        if given.out is not None:
            with given.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(told) + "\n")

    neighbour = Neighbour(decoder.run, given.duty, tell)
    held = fill(given.leave_mib) if device.type == "cuda" else torch.empty(0)
    tell(_introduction(shape, held, neighbour, given.duty))
    orders: queue.Queue[str] = queue.Queue()
    threading.Thread(target=read_orders, args=(sys.stdin, orders), daemon=True).start()
    neighbour.run(orders, "busy" if given.busy else "idle")


def _introduction(shape: Shape, held: Tensor, neighbour: Neighbour, duty: float) -> dict[str, object]:
    told: dict[str, object] = {"shape": asdict(shape), "duty": duty}
    told["step_alone_ms"] = round(neighbour.alone_s * 1e3, 2)
    if held.is_cuda:
        from engine.cuda.nvml import read_card

        filled = held.numel() // MIB
        told["model_mib"], told["filled_mib"] = torch.cuda.memory_allocated() // MIB - filled, filled
        told["used_mib"], told["free_mib"] = read_card().used // MIB, read_card().free // MIB
    return told


if __name__ == "__main__":
    main()
