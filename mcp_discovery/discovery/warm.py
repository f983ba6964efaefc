"""Computing the tools' prefixes ahead of the calls that need them, and their vectors with them.

One pass over a tool's prefix leaves both: pages in the engine's cache, and the state at its end, which
is the tool's vector. Vectors come first, of every tool; pages stay as far as the pool has room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from engine.client import EngineClient
from engine.request import Embed, Embedded, Tokens
from mcp_discovery.discovery.snapshot import Snapshot
from mcp_discovery.discovery.vectors import Vector, VectorCache, key_of

CALLER = "warm-up"
AT_ONCE = 16  # prefixes in flight where the engine's rate is not known
MOST_AT_ONCE = 256
USUAL_TOKENS = 80  # of a prefix
SECONDS_AT_ONCE = 0.25  # of work in flight: what a call that comes meanwhile waits for
WARM_SHARE = 0.75  # of the pool's pages; the rest stays for requests
STORE_EVERY = 1024  # new vectors between two writes of the cache

Progress = Callable[[int, int], None]
"""(done, total)"""


@dataclass(frozen=True, slots=True)
class _Job:
    """A prefix to compute, for the tools at `positions`."""

    prefix: Tokens
    positions: tuple[int, ...]
    keep: bool  # its pages
    lacks_vector: bool


class WarmUp:
    """One pass over what is new in a snapshot. `cache` None: no vectors are wanted."""

    def __init__(
        self,
        client: EngineClient,
        snapshot: Snapshot,
        page_tokens: int,
        cache: VectorCache | None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """`is_over` is asked between two batches: true where another snapshot has taken its place."""
        self._is_over = is_over
        self._client = client
        self._snapshot = snapshot
        self._page_tokens = page_tokens
        self._cache = cache
        self._fresh: dict[bytes, Vector] = {}

    async def run(self, progress: Progress | None = None) -> int:
        """Returns how many prefixes it computed; stops early where the engine refuses."""
        cold = list(self._snapshot.cold())
        jobs = await asyncio.to_thread(self._jobs, [positions for _, positions in cold])
        done = 0
        while done < len(jobs):
            batch = jobs[done : done + self._at_once()]
            computed = sum(await asyncio.gather(*map(self._compute, batch)))
            done += computed
            if progress is not None:
                progress(done, len(jobs))
            if computed < len(batch) or self._is_over():
                break
            if len(self._fresh) >= STORE_EVERY:
                await self._store()
        await self._store()
        if done == len(jobs):
            for index, _ in cold:
                index.is_warm[:] = True
        return done

    def _jobs(self, cold: Sequence[Sequence[int]]) -> list[_Job]:
        """What there is to compute, those that lack a vector first. Of a few servers that are new the pages
        are always kept: the cache lets go of those used least recently, such as of tools that are gone."""
        room = int(self._client.status().pages.total * WARM_SHARE)
        size = self._page_tokens
        pages: set[Tokens] = set()  # a page is known by all tokens up to its end
        jobs: list[_Job] = []
        present = self._snapshot.vectors.present
        for prefix, positions in self._by_prefix(cold).items():
            if len(pages) <= room:
                pages |= {prefix[:end] for end in range(size, len(prefix) + 1, size)}
            keep = len(pages) <= room
            lacks = self._cache is not None and not present[positions].all()
            if keep or lacks:
                jobs.append(_Job(prefix, tuple(positions), keep, lacks))
        return sorted(jobs, key=lambda job: not job.lacks_vector)

    def _by_prefix(self, cold: Sequence[Sequence[int]]) -> dict[Tokens, list[int]]:
        """The tools at these positions, those together whose prefixes are the same."""
        found: dict[Tokens, list[int]] = {}
        for position in chain.from_iterable(cold):
            found.setdefault(self._snapshot.prefix(position), []).append(position)
        return found

    def _at_once(self) -> int:
        """As many as take `SECONDS_AT_ONCE` at the engine's measured rate."""
        rate = self._client.status().tokens_per_s
        if not rate:
            return AT_ONCE
        return min(MOST_AT_ONCE, max(1, int(rate * SECONDS_AT_ONCE / USUAL_TOKENS)))

    async def _compute(self, job: _Job) -> bool:
        kept = len(job.prefix) if job.keep else 0
        outcome = await self._client.run(Embed(job.prefix, keep=kept), caller=CALLER)
        if not isinstance(outcome, Embedded):
            return False
        if job.lacks_vector:
            for position in job.positions:
                self._snapshot.vectors.put(position, outcome.vector)
            vector = self._snapshot.vectors.get(job.positions[0])
            if vector is not None:
                self._fresh[key_of(job.prefix)] = vector
        return True

    async def _store(self) -> None:
        if self._cache is not None and self._fresh:
            fresh, self._fresh = self._fresh, {}
            await asyncio.to_thread(self._cache.write, fresh)
