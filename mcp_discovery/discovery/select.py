"""A request for tools to ranked tools: visible tools, names, candidates, scores, a decision.

A call works on one snapshot of the catalogue from start to end. A tool that the caller may not see,
or that the call's own filters leave out, is no candidate: neither the model nor any order reads it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from engine.client import EngineClient
from engine.errors import Refusal
from engine.request import Cancelled, Embed, Embedded, Failed, Outcome, Score, Scored, Timing, Tokens, Usage
from mcp_discovery.discovery.call import DiscoverRequest, DiscoverResult, Pick, Ranking, Status
from mcp_discovery.discovery.candidates import choose, fuse
from mcp_discovery.discovery.catalogue import Catalogue
from mcp_discovery.discovery.prompts import CutQuery, Prompts
from mcp_discovery.discovery.reasons import NAMED, reason
from mcp_discovery.discovery.scope import Scope
from mcp_discovery.discovery.snapshot import Snapshot
from mcp_discovery.transport.identity import Caller

MAX_LIMIT = 20
WIDE_LIMIT = 10  # above it twice as many candidates are scored
LEXICAL_ORDER = 64  # tools of the lexical order that are kept, scored or not
WARM_AT_ONCE = 16  # prefixes in flight while warming
WARM_SHARE = 0.75  # of the pool's pages; the rest stays for requests


@dataclass(frozen=True, slots=True)
class DiscoverySettings:
    """What a site chooses.

    Until an adapter is trained for scoring, the model's order is fused with the lexical one by
    reciprocal rank: `lexical_weight` is BM25's vote against 1 for the model; 0 orders by score alone.
    """

    candidates: int = 32  # scored a call, twice as many above WIDE_LIMIT
    min_score: float = 0.0
    limit: int = 5
    lexical_weight: float = 12.0


class Discovery:
    """Finds tools. One event loop uses it; `replace` puts a new revision in place between calls."""

    def __init__(
        self,
        client: EngineClient,
        prompts: Prompts,
        catalogue: Catalogue,
        settings: DiscoverySettings | None = None,
        *,
        model: str,
    ) -> None:
        self._client = client
        self._prompts = prompts
        self.settings = settings or DiscoverySettings()
        self.model = model
        self._snapshot = Snapshot(catalogue, prompts)

    @property
    def snapshot(self) -> Snapshot:
        return self._snapshot

    def index(self, catalogue: Catalogue) -> Snapshot:
        """A snapshot of `catalogue` to `replace` the present one with; may run in another thread."""
        return Snapshot(catalogue, self._prompts, self._snapshot)

    def replace(self, snapshot: Snapshot) -> None:
        """Later calls see `snapshot`; calls in progress keep theirs."""
        self._snapshot = snapshot

    async def discover(
        self, request: DiscoverRequest, caller: Caller, deadline: float | None = None
    ) -> DiscoverResult:
        """The answer to one call. `deadline` is absolute `time.monotonic()` seconds.

        The engine's refusals and failures are results. Raises what the client raises where the
        engine is gone.
        """
        started = time.monotonic()
        scope = Scope.of(self._snapshot, request, caller)
        if request.names:
            return self._load(request, scope, started)
        limit = request.limit or self.settings.limit
        ranking = await self._rank(request.query, limit, scope, caller, deadline, started)
        return self._decide(request, ranking, scope)

    async def rank(self, query: str, caller: Caller, deadline: float | None = None) -> Ranking:
        """The whole order of a query, before threshold and limit: what evaluation looks at."""
        started = time.monotonic()
        scope = Scope.of(self._snapshot, DiscoverRequest(query), caller)
        return await self._rank(query, self.settings.limit, scope, caller, deadline, started)

    async def warm(self, progress: Callable[[int, int], None] | None = None) -> int:
        """Computes tool prefixes into the engine's cache, in catalogue order, as many as it can hold.

        Returns how many it computed; stops early where the engine refuses. `progress` gets (done, total).
        """
        prefixes = list(self._prefixes_that_fit(self._snapshot))
        for start in range(0, len(prefixes), WARM_AT_ONCE):
            batch = prefixes[start : start + WARM_AT_ONCE]
            outcomes = await asyncio.gather(
                *(self._client.run(Embed(prefix, keep=len(prefix)), caller="warm-up") for prefix in batch)
            )
            done = start + sum(isinstance(outcome, Embedded) for outcome in outcomes)
            if progress is not None:
                progress(done, len(prefixes))
            if done < start + len(batch):
                return done
        return len(prefixes)

    def _prefixes_that_fit(self, snapshot: Snapshot) -> Iterator[Tokens]:
        """Distinct prefixes that together take no more than the warm share of the pool."""
        room = int(self._client.status().pages.total * WARM_SHARE)
        size = self._prompts.page_tokens
        pages: set[Tokens] = set()  # a page is known by all tokens up to its end
        for position in range(len(snapshot.catalogue)):
            prefix = snapshot.prefix(position)
            new = {prefix[:end] for end in range(size, len(prefix) + 1, size)} - pages
            pages |= new
            if len(pages) > room:
                return
            if new:
                yield prefix

    def _load(self, request: DiscoverRequest, scope: Scope, started: float) -> DiscoverResult:
        """Exactly the tools of `names`; the model is not asked."""
        resolved = scope.snapshot.names.resolve(request.names, scope.visible)
        tools = scope.snapshot.catalogue.tools
        found = [position for position in resolved.positions if scope.mask[position]]
        problems = list(resolved.problems)
        problems += (
            f"{tools[position].id} is left out by servers, exclude or read_only."
            for position in resolved.positions
            if not scope.mask[position]
        )
        if request.limit is not None and len(found) > request.limit:
            problems.append(
                f"limit {request.limit} leaves out {len(found) - request.limit} of the tools named."
            )
            found = found[: request.limit]
        why = NAMED if request.explain else None
        may_lack = scope.may_lack and bool(resolved.problems)
        return DiscoverResult(
            "partial" if may_lack or (found and problems) else _status(bool(found)),
            scope.snapshot.catalogue,
            scope.visible_tools,
            scope.servers_missing,
            picks=tuple(Pick(tools[position], 1.0, why) for position in found),
            notes=(*scope.notes, *problems),
            method="names",
            retrieve_ms=_ms_since(started),
        )

    async def _rank(
        self, query: str, limit: int, scope: Scope, caller: Caller, deadline: float | None, started: float
    ) -> Ranking:
        snapshot, wanted = scope.snapshot, self.settings.candidates * (2 if limit > WIDE_LIMIT else 1)
        named = snapshot.names.find(query, scope.mask)
        rest = scope.mask.copy()
        rest[named] = False
        lexical = snapshot.lexical.order(query, scope.mask, max(wanted, LEXICAL_ORDER) + len(named))
        candidates = choose([[position for position in lexical if rest[position]]], rest, wanted)
        retrieve_ms = _ms_since(started)
        outcome: Scored | Refusal | Failed | None = None
        truncated = False
        if candidates and len(named) < limit:
            cut = self._prompts.cut(query)
            truncated = cut.truncated
            prefixes = tuple(snapshot.prefix(position) for position in candidates)
            outcome = _of_score(
                await self._client.run(self._score(prefixes, cut), deadline=deadline, caller=caller.id)
            )
        scores = outcome.probabilities if isinstance(outcome, Scored) else ()
        probabilities = dict(zip(candidates, scores, strict=bool(scores)))
        scored = fused(probabilities, lexical, self.settings.lexical_weight)
        return Ranking(
            tuple(named), tuple(lexical), tuple(scored), probabilities, outcome, truncated, retrieve_ms
        )

    def _score(self, prefixes: tuple[Tokens, ...], cut: CutQuery) -> Score:
        prompts = self._prompts
        return Score(prefixes, prompts.suffix(cut), positive=prompts.positive, negative=prompts.negative)

    def _decide(self, request: DiscoverRequest, ranking: Ranking, scope: Scope) -> DiscoverResult:
        """Named tools first, then scored ones from the threshold on, up to the limit."""
        outcome = ranking.outcome
        if isinstance(outcome, Refusal | Failed):
            return DiscoverResult(
                "refused" if isinstance(outcome, Refusal) else "failed",
                scope.snapshot.catalogue,
                scope.visible_tools,
                scope.servers_missing,
                refusal=outcome if isinstance(outcome, Refusal) else None,
                failure=outcome if isinstance(outcome, Failed) else None,
                retrieve_ms=ranking.retrieve_ms,
                query_truncated=ranking.query_truncated,
            )
        limit = request.limit or min(MAX_LIMIT, max(self.settings.limit, len(ranking.named)))
        min_score = self.settings.min_score if request.min_score is None else request.min_score
        picks = tuple(islice(self._picks(request, ranking, scope, min_score), limit))
        notes = scope.notes if picks else (*scope.notes, _why_nothing(ranking, scope, min_score))
        lacking = scope.may_lack and len(picks) < limit
        return DiscoverResult(
            "partial" if lacking else _status(bool(picks)),
            scope.snapshot.catalogue,
            scope.visible_tools,
            scope.servers_missing,
            picks=picks,
            notes=notes,
            method="bm25+score" if outcome or not picks else "names",
            candidates=len(ranking.probabilities),
            usage=outcome.usage if outcome else Usage(),
            timing=outcome.timing if outcome else Timing(),
            query_truncated=ranking.query_truncated,
            retrieve_ms=ranking.retrieve_ms,
        )

    def _picks(
        self, request: DiscoverRequest, ranking: Ranking, scope: Scope, min_score: float
    ) -> Iterator[Pick]:
        tools = scope.snapshot.catalogue.tools
        for position in ranking.named:
            yield Pick(tools[position], 1.0, NAMED if request.explain else None)
        for position in ranking.scored:
            score = ranking.probabilities[position]
            if score >= min_score:
                why = reason(tools[position], request.query, score) if request.explain else None
                yield Pick(tools[position], score, why)


def fused(probabilities: Mapping[int, float], lexical: Sequence[int], lexical_weight: float) -> list[int]:
    """Scored positions, best first: by probability, and by BM25's order as far as its vote counts.

    Among equal probabilities BM25's order decides, then the catalogue's.
    """
    matched = [position for position in lexical if position in probabilities]
    by_lexical = dict.fromkeys([*matched, *sorted(probabilities)])
    by_score = sorted(by_lexical, key=lambda position: -probabilities[position])
    return fuse([by_score, matched], [1.0, lexical_weight]) if lexical_weight else by_score


def by_probability(probabilities: Mapping[int, float]) -> list[int]:
    return sorted(probabilities, key=lambda position: (-probabilities[position], position))


def _of_score(outcome: Outcome) -> Scored | Refusal | Failed:
    """The outcome of a score request; anything that cannot answer one is a fault."""
    if isinstance(outcome, Scored | Refusal | Failed):
        return outcome
    if isinstance(outcome, Cancelled):
        return Failed("cancelled", "The engine dropped the request; try again.")
    return Failed("wrong_answer", "The engine answered another kind of request; this is a bug.")


def _why_nothing(ranking: Ranking, scope: Scope, min_score: float) -> str:
    if not ranking.scored:
        return scope.emptiness
    best = max(ranking.scored, key=lambda position: ranking.probabilities[position])
    nearest = scope.snapshot.catalogue.tools[best].id
    return (
        f"None of the {len(ranking.scored)} tools that come nearest reaches min_score {min_score:g}; "
        f"the best is {nearest} with {ranking.probabilities[best]:.2f}."
    )


def _status(found: bool) -> Status:
    return "matched" if found else "no_match"


def _ms_since(started: float) -> float:
    return (time.monotonic() - started) * 1000.0
