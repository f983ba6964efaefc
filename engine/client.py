"""The engine's client protocol: the seam between whoever serves callers and the engine.

Submit, answer or refusal, cancel, deadline. `LocalClient` speaks it to an engine in this process;
a client over a Unix socket speaks the same protocol to an engine in another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.request import Outcome, Rank, Request, Tokens

Choose = Callable[[Sequence[float]], Sequence[Tokens]]
"""Prefixes to score, given the query's unit vector; at most `Rank.rows` of at most `Rank.prefix_tokens`."""


@dataclass(frozen=True, slots=True)
class PageCounts:
    """`free + held + cached = total` at every moment. `cached` pages are evictable."""

    free: int
    held: int
    cached: int
    total: int


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A snapshot for people and metrics; taking it never waits for the device."""

    ready: bool
    draining: bool
    reason: str  # why not ready, "" when ready
    pages: PageCounts
    waiting: int  # requests in the queue
    waiting_tokens: int  # their prefill tokens
    running: int  # requests admitted and not finished
    steps: int
    tokens_per_s: float  # measured, 0.0 before the first step
    kernels: str  # which kernels run, e.g. "torch cpu float32"


def no_engine(reason: str) -> EngineStatus:
    """The status where there is no engine, for `reason`."""
    return EngineStatus(
        ready=False,
        draining=False,
        reason=reason,
        pages=PageCounts(0, 0, 0, 0),
        waiting=0,
        waiting_tokens=0,
        running=0,
        steps=0,
        tokens_per_s=0.0,
        kernels="",
    )


class EngineClient(Protocol):
    """What the discovery room needs of an engine, wherever it lives. All deadlines are absolute
    `time.monotonic()` seconds. Cancelling the awaiting task cancels the request at the next step
    boundary; its pages return there."""

    async def run(self, request: Request, *, deadline: float | None = None, caller: str = "") -> Outcome:
        """One request (not `Rank`) to its outcome. Never raises for what happens to the request."""
        ...

    async def rank(
        self, request: Rank, choose: Choose, *, deadline: float | None = None, caller: str = ""
    ) -> Outcome:
        """`Rank`: `choose` is called once on the caller's side, between the two stages."""
        ...

    def status(self) -> EngineStatus: ...


class Submission(Protocol):
    """A request that was submitted. Every call may come late: then it does nothing."""

    def cancel(self) -> None:
        """The caller wants no answer; the outcome is `Cancelled` where it has not ended yet."""
        ...

    def supply(self, prefixes: tuple[Tokens, ...]) -> None:
        """The prefixes of a `Rank`, once its vector has come. Raises ValueError where they do not fit it."""
        ...


class Submitter(Protocol):
    """An engine by callbacks on one event loop: what a server of many connections asks, a request at a
    time, without a task for each. `LocalClient` is one."""

    def submit(
        self,
        request: Request,
        *,
        deadline: float | None,
        caller: str,
        on_done: Callable[[Outcome], None],
        on_vector: Callable[[tuple[float, ...]], None] | None = None,
    ) -> Submission:
        """`on_done` is called once, on the loop, with the outcome, maybe before this returns; `on_vector`
        before it for a `Rank`. `deadline` is enforced. Raises ValueError in one sentence for a request
        that makes no sense."""
        ...

    def status(self) -> EngineStatus: ...
