"""Who asks for what, when: worlds of different sizes and the requests that come to them.

Sizes are those of the score shape (`benchmarks/targets.toml`) and smaller ones: a mistake in the
bookkeeping shows with eight rows as it does with 64, and eight cost less.
"""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from benchmarks.simulation.checks import MOST_OUTPUT
from engine.core import CoreLimits
from engine.request import Embed, Generate, Rank, Request, Score, Tokens
from engine.schedule import StepLimits

VOCABULARY, CONTEXT = 50_000, 8_192
POSITIVE, NEGATIVE = 1, 2
STOP = 7  # tokens are drawn from 0 to 15, so that one output token in 16 ends an answer that may end early
OUTPUT_TOKENS = 16
LOADS = (0.3, 0.7, 0.95, 1.2, 3.0, 10.0)
KINDS = ("embed", "generate", "score", "wide score", "long score", "rank", "empty score")


@dataclass(frozen=True, slots=True)
class World:
    """One engine and the traffic that it gets. Times are seconds, rates requests a second."""

    pages: int
    page_tokens: int
    limits: CoreLimits
    fixed_s: float  # of a step
    token_s: float  # of a token in it
    rate: float
    burst: int  # most requests that come at one moment
    burst_share: float  # of the arrivals that are bursts
    modest: int  # callers that take turns; one more, greedy, sends `greedy_share` of all
    greedy_share: float
    prefixes: tuple[Tokens, ...]
    kinds: tuple[float, ...]  # weights of KINDS
    timeout_share: float
    cancel_share: float
    disturbances: int  # faults, drains, jumps of the clock and neighbours on the device

    def step_s(self, tokens: int) -> float:
        return self.fixed_s + self.token_s * tokens

    @property
    def short_s(self) -> float:
        """About what a small request takes alone: the scale of timeouts and patience."""
        return 2.0 * self.step_s(self.limits.step.tokens)


@dataclass(frozen=True, slots=True)
class Call:
    """A request and what its caller will do. Delays are seconds from the moment named."""

    request: Request
    caller: str
    timeout: float | None
    cancel_after: float | None  # submission
    has_timer: bool  # expires the request itself at its deadline, as a client on an event loop does
    supply_after: float  # the vector's arrival; what a `Rank` waits for
    supplies: tuple[Tokens, ...] | None  # None: the choice fails, and the caller takes the request back


def random_world(rng: random.Random) -> World:
    page_tokens = rng.choice((4, 16, 16, 16, 32))
    prefixes = _catalogue(rng, page_tokens)
    pages = rng.choice((6, 20, 60, 200, 600, 1500))
    step_tokens = rng.choice((16, 64, 256, 1024, 4096))
    fixed_s, token_s = rng.uniform(0.0002, 0.01), rng.uniform(1e-6, 1e-4)
    kinds = tuple(rng.random() ** 2 * usual for usual in (1.0, 1.0, 2.0, 0.03, 0.01, 1.0, 0.02))
    mean_tokens = 150.0
    capacity = step_tokens / (fixed_s + token_s * step_tokens) / mean_tokens
    rows, depth = rng.choice((4, 16, 64, 512)), rng.choice((1, 2))
    step_limits = StepLimits.for_slow_steps if depth == 1 else StepLimits  # as on a CPU
    return World(
        pages=pages,
        page_tokens=page_tokens,
        limits=CoreLimits(
            step=step_limits(step_tokens, rows),
            depth=depth,
            max_queue=rng.choice((0, 8, 64, 512)),
            max_queued_tokens=rng.choice((2_000, 50_000, 4_000_000)),
            vocabulary=VOCABULARY,
            context=CONTEXT,
        ),
        fixed_s=fixed_s,
        token_s=token_s,
        rate=capacity * rng.choice(LOADS),
        burst=rng.choice((1, 10, 100)),
        burst_share=rng.choice((0.0, 0.01, 0.1)),
        modest=rng.choice((1, 5, 50)),
        greedy_share=rng.choice((0.0, 0.5, 0.9)),
        prefixes=prefixes,
        kinds=kinds,
        timeout_share=rng.choice((0.0, 0.1, 0.9)),
        cancel_share=rng.choice((0.0, 0.05, 0.2)),
        disturbances=rng.choice((0, 2, 8)),
    )


def _catalogue(rng: random.Random, page_tokens: int) -> tuple[Tokens, ...]:
    """Prefixes that share their beginning; most end with a page."""
    system = tuple(range(100, 100 + rng.randrange(3 * page_tokens)))
    prefixes = []
    for number in range(rng.choice((8, 60, 320))):
        length = len(system) + rng.randrange(1, 5) * page_tokens
        if rng.random() < 0.8:
            length -= length % page_tokens
        own = max(1, length - len(system))
        prefixes.append(system + tuple(1_000 + number * 100 + at % 100 for at in range(own)))
    return tuple(prefixes)


class Traffic:
    """The calls of one world, without an end. Prefixes are drawn by Zipf's law."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self._world = world
        self._rng = rng
        self._kinds = list(accumulate(world.kinds))
        self._zipf = list(accumulate(1.0 / rank for rank in range(1, len(world.prefixes) + 1)))
        self._text = tuple(rng.randrange(20_000, VOCABULARY) for _ in range(20_000))
        self._callers = [f"modest {number}" for number in range(world.modest)]

    def gap(self) -> float:
        """Seconds to the next arrival, of one call or a burst."""
        world = self._world
        mean_size = 1.0 + world.burst_share * (world.burst - 1) / 2
        return self._rng.expovariate(world.rate / mean_size)

    def size(self) -> int:
        """How many calls come at once."""
        if self._rng.random() < self._world.burst_share:
            return self._rng.randint(1, self._world.burst)
        return 1

    def call(self) -> Call:
        rng, world = self._rng, self._world
        short = world.short_s
        request = self._request(
            KINDS[min(bisect(self._kinds, rng.random() * self._kinds[-1]), len(KINDS) - 1)]
        )
        greedy = rng.random() < world.greedy_share
        return Call(
            request=request,
            caller="greedy" if greedy else rng.choice(self._callers),
            timeout=short * 2.0 ** rng.uniform(-2.0, 8.0) if rng.random() < world.timeout_share else None,
            cancel_after=short * 2.0 ** rng.uniform(-6.0, 5.0) if rng.random() < world.cancel_share else None,
            has_timer=rng.random() < 0.5,
            supply_after=short * 2.0 ** rng.uniform(-12.0, 3.0),
            supplies=self._supplies(request),
        )

    def _request(self, kind: str) -> Request:
        rng = self._rng
        if kind == "embed":
            tokens = self._prefix() + self._some(rng.randrange(0, 40))
            return Embed(tokens, keep=rng.choice((0, len(tokens))))
        if kind == "generate":
            stop = frozenset((STOP,)) if rng.random() < 0.5 else frozenset()
            constraint = Fickle() if rng.random() < 0.01 else None
            return Generate(
                self._prefix() + self._some(rng.randrange(1, 40)),
                rng.choice((1, 2, MOST_OUTPUT)),
                stop,
                constraint=constraint,
                keep=rng.choice((0, 1_000)),
            )
        window = rng.choice((None, None, None, 1, 3))
        if kind == "rank":
            longest = max(map(len, self._world.prefixes))
            query, suffix = self._some(rng.randrange(1, 40)), self._some(rng.randrange(1, 30))
            return Rank(query, rng.choice((1, 4, 12)), longest, suffix, POSITIVE, NEGATIVE, window)
        rows, suffix = {
            "score": (rng.randrange(1, 8), self._some(rng.randrange(0, 40))),
            "wide score": (32, self._some(30)),
            "long score": (64, self._some(256)),
            "empty score": (0, self._some(30)),
        }[kind]
        return Score(self._prefixes(rows), suffix, POSITIVE, NEGATIVE, window)

    def _supplies(self, request: Request) -> tuple[Tokens, ...] | None:
        if not isinstance(request, Rank) or self._rng.random() < 0.01:
            return None
        return self._prefixes(self._rng.randrange(request.rows + 1))

    def _prefix(self) -> Tokens:
        return self._world.prefixes[bisect(self._zipf, self._rng.random() * self._zipf[-1] * 0.999999)]

    def _prefixes(self, count: int) -> tuple[Tokens, ...]:
        return tuple([self._prefix() for _ in range(count)])

    def _some(self, count: int) -> Tokens:
        at = self._rng.randrange(len(self._text) - count)
        return self._text[at : at + count]


class Fickle:
    """A constraint that breaks after some tokens."""

    def allowed(self, output: Sequence[int]) -> Sequence[int]:
        return range(OUTPUT_TOKENS) if len(output) < 3 else ()
