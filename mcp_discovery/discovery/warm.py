"""Computing the tools' prefixes ahead of the calls that need them, and their vectors with them.

One pass over a tool's prefix leaves both: pages in the engine's cache, and the state at its end, which
is the tool's vector. Vectors come first, of every tool; pages stay as far as the pool has room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

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
    """One pass over a snapshot. `cache` None: no vectors are wanted."""

    def __init__(
        self, client: EngineClient, snapshot: Snapshot, page_tokens: int, cache: VectorCache | None
    ) -> None:
        self._client = client
        self._snapshot = snapshot
        self._page_tokens = page_tokens
        self._cache = cache
        self._fresh: dict[bytes, Vector] = {}

    async def run(self, progress: Progress | None = None) -> int:
        """Returns how many prefixes it computed; stops early where the engine refuses."""
        jobs = sorted(self._jobs(), key=lambda job: not job.lacks_vector)
        done = 0
        while done < len(jobs):
            batch = jobs[done : done + self._at_once()]
            computed = sum(await asyncio.gather(*map(self._compute, batch)))
            done += computed
            if progress is not None:
                progress(done, len(jobs))
            if computed < len(batch):
                break
            if len(self._fresh) >= STORE_EVERY:
                await self._store()
        await self._store()
        return done

    def _jobs(self) -> Iterator[_Job]:
        room = int(self._client.status().pages.total * WARM_SHARE)
        size = self._page_tokens
        pages: set[Tokens] = set()  # a page is known by all tokens up to its end
        for prefix, positions in self._snapshot.positions_by_prefix().items():
            if len(pages) <= room:
                pages |= {prefix[:end] for end in range(size, len(prefix) + 1, size)}
            keep = len(pages) <= room
            present = self._snapshot.vectors.present
            lacks = self._cache is not None and not present[list(positions)].all()
            if keep or lacks:
                yield _Job(prefix, tuple(positions), keep, lacks)

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
