"""What a call costs the engine process on the host: the wire, the core, the step loop and a step's staging.

    python -m benchmarks.host [--in-flight 64 1024] [--seconds 4]

The engine is the real one, over a runner that stages each step as for a card and reads its outputs from
zeros; the device itself is a clock that says when a step would have ended. One client process asks for
ranks of 32 of 322 resident prefixes. CPU times are those of the engine process, by thread; where clients
share its cores, they say more than the rate.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvloop

from benchmarks.engine import Text
from benchmarks.report import write
from benchmarks.wire import ask_until
from benchmarks.wire_process import serve_wire, wire_process
from engine import LocalClient
from engine.batch import Part
from engine.core import Core, CoreLimits
from engine.cuda.outputs import Wanted
from engine.cuda.sizes import buckets
from engine.cuda.staging import FlatStep, Sections, fill
from engine.engine import Engine
from engine.pages import PagePool
from engine.request import Outcome, Rank, Score, Scored
from engine.runner import InFlight, Output, Read
from engine.schedule import StepLimits
from engine.wire import EngineFacts, WireClient
from mcp_discovery.tuning import tune_interpreter

PAGES, PAGE_TOKENS, STEP_TOKENS, STEP_ROWS = 4338, 16, 8192, 512
HIDDEN, GROUP = 576, 3
STEP_S, TOKEN_S = 0.3e-3, 0.6e-6  # of the device: 5.2 ms for a full step
CANDIDATES, TOOLS, TOOL_TOKENS, TEXT_TOKENS = 32, 322, 80, 30
FACTS = EngineFacts("clock", PAGE_TOKENS, 49_152, 8192, "clock")
WARM_UP_S = 1.0


class StagingRunner:
    """Does on the host what a card's runner does, and waits as long as the card would take."""

    depth = 2
    kernels = "clock"

    def __init__(self) -> None:
        self._sizes = sorted(buckets(STEP_TOKENS, STEP_ROWS, GROUP))
        self._sections = Sections.of(STEP_TOKENS, STEP_ROWS, PAGES + STEP_ROWS)
        self._staged = np.zeros(self._sections.end, np.int32)
        self._states = torch.ones((STEP_ROWS, HIDDEN), dtype=torch.float16)
        self._direction = torch.zeros(HIDDEN)
        self._busy_until = 0.0

    def launch(self, parts: list[Part], reads: list[Read]) -> InFlight:
        step = FlatStep.of(parts, PAGE_TOKENS)
        tokens, rows = len(step.tokens), len(step.counts)
        bucket = next(each for each in self._sizes if tokens <= each.tokens and rows < each.rows)
        fill(self._staged, self._sections, step, bucket, PAGE_TOKENS, PAGES)
        self._busy_until = max(self._busy_until, time.monotonic()) + STEP_S + TOKEN_S * tokens
        return _Flight(self, Wanted.of(parts, reads), self._busy_until)

    def collect(self, flight: _Flight) -> list[Output]:
        outputs: list[Output] = [0] * flight.wanted.count
        flight.wanted.read_states(self._states[: len(outputs)], lambda *pair: self._direction, outputs)
        return outputs


@dataclass(frozen=True, slots=True)
class _Flight:
    runner: StagingRunner
    wanted: Wanted
    ready: float

    def wait(self) -> None:
        time.sleep(max(0.0, self.ready - time.monotonic()))

    def collect(self) -> list[Output]:
        self.wait()
        return self.runner.collect(self)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--in-flight", type=int, nargs="*", default=[64, 1024])
    parser.add_argument("--seconds", type=float, default=4.0, help="a row")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with wire_process(_serve) as (path, control):
        rows = uvloop.run(_measure(path, control, given.in_flight, given.seconds))
    write("host", {"seconds_a_row": given.seconds, "by_in_flight": rows}, out=given.out)


def _serve(path: Path, control: Connection) -> None:
    """The engine process: says its CPU seconds, and those of the thread that steps, whenever it is asked."""
    torch.set_num_threads(1)
    limits = CoreLimits(
        step=StepLimits(tokens=STEP_TOKENS, rows=STEP_ROWS),
        depth=StagingRunner.depth,
        max_queue=4096,
        max_queued_tokens=8_000_000,
        vocabulary=FACTS.vocabulary,
        context=FACTS.context,
    )
    engine = Engine(Core(PagePool(PAGES, PAGE_TOKENS), limits), StagingRunner())
    engine.start()
    engine.mark_ready()
    (thread,) = [each for each in threading.enumerate() if each.name == "engine"]
    assert thread.ident is not None
    stepping = time.pthread_getcpuclockid(thread.ident)

    def cpu_s() -> tuple[float, float]:
        return time.process_time(), time.clock_gettime(stepping)

    tune_interpreter()
    with engine:
        uvloop.run(serve_wire(path, control, LocalClient(engine), FACTS, cpu_s))


async def _measure(path: Path, control: Connection, counts: list[int], seconds: float) -> dict[str, Any]:
    source = Text(1)
    known = [source.take(TOOL_TOKENS) for _ in range(TOOLS)]
    chosen = [tuple(source.random.sample(known, CANDIDATES)) for _ in range(256)]
    ranks = [
        Rank(source.take(TEXT_TOKENS), CANDIDATES, 128, source.take(TEXT_TOKENS), 100, 200)
        for _ in range(256)
    ]
    turns = count()
    computed: list[int] = []  # tokens of each rank that were not resident
    async with WireClient(path, name="benchmark") as client:
        if not await client.wait_connected(10.0):
            raise SystemExit(client.status().reason)
        for prefix in known:
            await client.run(Score((prefix,), ranks[0].suffix, 100, 200))

        async def ask() -> Outcome:
            turn = next(turns)
            soon = time.monotonic() + 60.0
            picked = chosen[turn // 7 % 256]
            outcome = await client.rank(
                ranks[turn % 256], lambda _: picked, deadline=soon, caller=f"c{turn % 64}"
            )
            if isinstance(outcome, Scored):
                computed.append(outcome.usage.prompt_tokens - outcome.usage.cached_tokens)
            return outcome

        return {
            str(in_flight): await _row(ask, computed, control, seconds, in_flight) for in_flight in counts
        }


async def _row(
    ask: Callable[[], Awaitable[Outcome]],
    computed: list[int],
    control: Connection,
    seconds: float,
    in_flight: int,
) -> dict[str, float]:
    """`in_flight` coroutines, each asking again as soon as it has its answer."""
    await ask_until(ask, time.perf_counter() + WARM_UP_S, in_flight)
    computed.clear()
    before, started = _cpu_s(control), time.perf_counter()
    latencies = await ask_until(ask, started + seconds, in_flight)
    took, after = time.perf_counter() - started, _cpu_s(control)
    calls = len(latencies)
    whole, stepping = [1e6 * (end - begin) / calls for begin, end in zip(before, after, strict=True)]
    row = {
        "calls_per_s": round(calls / took),
        "cpu_us_a_call": round(whole, 1),
        "step_thread_us_a_call": round(stepping, 1),
        "p50_ms": round(1e3 * statistics.median(latencies), 1),
        "tokens_a_call": round(statistics.mean(computed)),
    }
    print(f"{in_flight} in flight: " + ", ".join(f"{value:,} {name}" for name, value in row.items()))
    return row


def _cpu_s(control: Connection) -> tuple[float, float]:
    control.send("cpu")
    seconds: tuple[float, float] = control.recv()
    return seconds


if __name__ == "__main__":
    main()
