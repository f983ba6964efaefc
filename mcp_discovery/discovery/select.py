"""A request for tools to ranked tools: visible tools, names, candidates, scores, a decision.

A call works on one snapshot of the catalogue from start to end. A tool that the caller may not see,
or that the call's own filters leave out, is no candidate: neither the model nor any order reads it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from engine.client import EngineClient
from engine.errors import Refusal
from engine.request import Cancelled, Failed, Generated, Outcome, Rank, Score, Scored, Timing, Tokens, Usage
from mcp_discovery.discovery.calibration import Calibration, evidence, logit
from mcp_discovery.discovery.call import DiscoverRequest, DiscoverResult, Method, Pick, Ranking, Status
from mcp_discovery.discovery.candidates import choose, fuse
from mcp_discovery.discovery.catalogue import Catalogue, Tool
from mcp_discovery.discovery.lexical import Mask
from mcp_discovery.discovery.listing import Listing
from mcp_discovery.discovery.prompts import CutQuery, Prompts
from mcp_discovery.discovery.reasons import NAMED, reason
from mcp_discovery.discovery.scope import Scope
from mcp_discovery.discovery.snapshot import Snapshot
from mcp_discovery.discovery.vectors import VectorCache
from mcp_discovery.discovery.warm import WarmUp
from mcp_discovery.transport.identity import Caller

MAX_LIMIT = 20
WIDE_LIMIT = 10  # above it twice as many candidates are scored
ORDER_LENGTH = 100  # tools of each order that are fused


@dataclass(frozen=True, slots=True)
class DiscoverySettings:
    """What a site chooses.

    The order of a model that is not trained for scoring is fused with the lexical one by reciprocal
    rank: `lexical_weight` is BM25's vote against 1 for the model; 0 orders by score alone.
    """

    candidates: int = 32  # scored a call, twice as many above WIDE_LIMIT
    min_score: float | None = None  # None: a trained model judges whether any tool serves the request
    limit: int = 5
    lexical_weight: float = 12.0


@dataclass(frozen=True, slots=True)
class Trained:
    """What a model that is trained for discovery brings: a scale for its scores, and a place for vectors."""

    calibration: Calibration
    cache: VectorCache


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
        trained: Trained | None = None,
        listing: Listing | None = None,
    ) -> None:
        """`trained` None: the model's vectors say nothing and its scores little. `listing`: a chat model
        chooses by writing instead."""
        self._listing = listing
        self._trained = trained
        self._cache = None if trained is None else trained.cache
        self._client = client
        self._prompts = prompts
        self.settings = settings or DiscoverySettings()
        self.model = model
        self._snapshot = Snapshot(catalogue, prompts, cache=self._cache)

    @property
    def is_trained(self) -> bool:
        return self._trained is not None

    @property
    def snapshot(self) -> Snapshot:
        return self._snapshot

    def index(self, catalogue: Catalogue) -> Snapshot:
        """A snapshot of `catalogue` to `replace` the present one with; may run in another thread."""
        return Snapshot(catalogue, self._prompts, self._snapshot, self._cache)

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
        """Computes tool prefixes into the engine's cache, and the vectors that are missing.

        Returns how many it computed; stops early where the engine refuses. `progress` gets (done, total).
        Where a new revision comes meanwhile, it goes on with that one.
        """
        if self._listing is not None:
            return 0  # a list of tools is another prompt at each call
        done = 0
        while True:
            snapshot = self._snapshot
            warm_up = WarmUp(
                self._client,
                snapshot,
                self._prompts.page_tokens,
                self._cache,
                lambda held=snapshot: self._snapshot is not held,  # type: ignore[misc]
            )
            done += await warm_up.run(progress)
            if self._snapshot is snapshot:
                return done

    async def recall(self) -> bool:
        """Takes the vectors that another process has stored meanwhile. Whether none is missing then."""
        snapshot = self._snapshot
        missing = snapshot.without_vector() if self._cache is not None else {}
        if self._cache is not None and missing:
            stored = await asyncio.to_thread(self._cache.read, set(missing.values()))
            for position, key in list(missing.items()):
                if (vector := stored.get(key)) is not None:
                    snapshot.vectors.put(position, vector)
                    del missing[position]
        return not missing

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
            scope.servers_stale,
            picks=tuple(Pick(tools[position], 1.0, why) for position in found),
            notes=(*scope.notes, *problems),
            method="names",
            retrieve_ms=_ms_since(started),
        )

    async def _rank(
        self, query: str, limit: int, scope: Scope, caller: Caller, deadline: float | None, started: float
    ) -> Ranking:
        snapshot, wanted = scope.snapshot, self.settings.candidates * (2 if limit > WIDE_LIMIT else 1)
        named = snapshot.twins.once(snapshot.names.find(query, scope.mask))
        firsts = snapshot.twins.firsts(scope.mask)
        rest = firsts.copy()
        for position in named:
            rest[snapshot.twins.of(position)] = False
        lexical = snapshot.lexical.order(query, firsts, max(wanted, ORDER_LENGTH) + len(named))
        unnamed = [position for position in lexical if rest[position]] if named else lexical
        retrieval = _Retrieval(snapshot, rest, unnamed, wanted)
        retrieve_ms = _ms_since(started)
        outcome: Scored | Generated | Refusal | Failed | None = None
        truncated = False
        if rest.any() and len(named) < limit:
            cut = self._prompts.cut(query)
            truncated = cut.truncated
            outcome = _answered(await self._ask(retrieval, cut, limit - len(named), deadline, caller))
        read = self._read(outcome, retrieval)
        doubtful = self._trained is not None and self._trained.calibration.doubts(
            read.logits,
            retrieval.cosines,
            retrieval.lexical,
            int(np.count_nonzero(scope.mask)),
        )
        return Ranking(
            named=tuple(named),
            lexical=tuple(lexical),
            dense=tuple(retrieval.dense),
            candidates=tuple(read.candidates),
            scored=tuple(read.order),
            probabilities=read.probabilities,
            cosines=retrieval.cosines,
            scores=read.scores,
            doubtful=doubtful,
            outcome=outcome,
            query_truncated=truncated,
            retrieve_ms=retrieve_ms,
        )

    async def _ask(
        self, retrieval: _Retrieval, cut: CutQuery, most: int, deadline: float | None, caller: Caller
    ) -> Outcome:
        """One admission for all that the call needs of the engine."""
        if self._listing is not None:
            retrieval.by_words()
            generate = self._listing.request(retrieval.tools(), cut, most)
            return await self._client.run(generate, deadline=deadline, caller=caller.id)
        prompts, suffix = self._prompts, self._prompts.suffix(cut)
        positive, negative = prompts.positive, prompts.negative
        if self._trained is None:
            score = Score(retrieval.by_words(), suffix, positive, negative)
            return await self._client.run(score, deadline=deadline, caller=caller.id)
        rank = Rank(
            query=prompts.query(cut),
            rows=retrieval.wanted,
            prefix_tokens=prompts.max_prefix_tokens,
            suffix=suffix,
            positive=positive,
            negative=negative,
        )
        return await self._client.rank(
            rank, retrieval.by_words_and_vector, deadline=deadline, caller=caller.id
        )

    def _read(self, outcome: Scored | Generated | Refusal | Failed | None, retrieval: _Retrieval) -> _Read:
        """What the engine's answer says of the candidates."""
        candidates = retrieval.candidates
        if isinstance(outcome, Generated) and self._listing is not None:
            order = [candidates[place - 1] for place in self._listing.places(outcome.tokens, len(candidates))]
            return _Read(candidates, {}, {}, order, {at: 1.0 / n for n, at in enumerate(order, 1)})
        if not isinstance(outcome, Scored):
            return _Read([], {}, {}, [], {})
        probabilities = dict(zip(candidates, outcome.probabilities, strict=True))
        if self._trained is None:
            order = fused(probabilities, retrieval.lexical, self.settings.lexical_weight)
            return _Read(candidates, probabilities, {}, order, dict(probabilities))
        read = logit(np.array(outcome.probabilities)).tolist()
        logits = dict(zip(candidates, read, strict=True))
        weights = evidence(logits, retrieval.cosines)
        published = self._trained.calibration.probability(np.array(list(weights.values()))).tolist()
        scores = dict(zip(weights, published, strict=True))
        order = sorted(weights, key=lambda position: -weights[position])
        return _Read(candidates, probabilities, logits, order, scores)

    def _decide(self, request: DiscoverRequest, ranking: Ranking, scope: Scope) -> DiscoverResult:
        """Named tools first, then scored ones from the threshold on, up to the limit."""
        outcome = ranking.outcome
        if isinstance(outcome, Refusal | Failed):
            return DiscoverResult(
                "refused" if isinstance(outcome, Refusal) else "failed",
                scope.snapshot.catalogue,
                scope.visible_tools,
                scope.servers_missing,
                scope.servers_stale,
                refusal=outcome if isinstance(outcome, Refusal) else None,
                failure=outcome if isinstance(outcome, Failed) else None,
                retrieve_ms=ranking.retrieve_ms,
                query_truncated=ranking.query_truncated,
            )
        limit = request.limit or min(MAX_LIMIT, max(self.settings.limit, len(ranking.named)))
        min_score = self.settings.min_score if request.min_score is None else request.min_score
        if min_score is None:
            min_score = math.inf if ranking.doubtful else 0.0
        picks = tuple(islice(self._picks(request, ranking, scope, min_score), limit))
        notes = scope.notes if picks else (*scope.notes, _why_nothing(ranking, scope, min_score))
        lacking = scope.may_lack and len(picks) < limit
        return DiscoverResult(
            "partial" if lacking else _status(bool(picks)),
            scope.snapshot.catalogue,
            scope.visible_tools,
            scope.servers_missing,
            scope.servers_stale,
            picks=picks,
            notes=notes,
            method=self._method if outcome or not picks else "names",
            candidates=len(ranking.candidates),
            degraded=self._is_degraded(scope),
            usage=outcome.usage if outcome else Usage(),
            timing=outcome.timing if outcome else Timing(),
            query_truncated=ranking.query_truncated,
            retrieve_ms=ranking.retrieve_ms,
        )

    @property
    def _method(self) -> Method:
        if self._listing is not None:
            return "bm25+generate"
        return "bm25+score" if self._trained is None else "bm25+vectors+score"

    def _is_degraded(self, scope: Scope) -> bool:
        """Whether a tool that the caller may see can be found by its words alone, for now."""
        return self._trained is not None and bool((scope.visible & ~scope.snapshot.vectors.present).any())

    def _picks(
        self, request: DiscoverRequest, ranking: Ranking, scope: Scope, min_score: float
    ) -> Iterator[Pick]:
        tools = scope.snapshot.catalogue.tools
        for position in ranking.named:
            yield Pick(tools[position], 1.0, NAMED if request.explain else None, scope.also_on(position))
        for position in ranking.scored:
            score = ranking.scores[position]
            if score >= min_score:
                why = reason(tools[position], request.query, score) if request.explain else None
                yield Pick(tools[position], score, why, scope.also_on(position))


@dataclass(frozen=True, slots=True)
class _Read:
    """Candidates in the order of retrieval, the model's own probabilities and, of a trained one, their
    logits, the final order and its scores."""

    candidates: list[int]
    probabilities: dict[int, float]
    logits: dict[int, float]
    order: list[int]
    scores: dict[int, float]


class _Retrieval:
    """The candidates of one call: chosen by words alone, or when the query's vector has come."""

    def __init__(self, snapshot: Snapshot, mask: Mask, lexical: Sequence[int], wanted: int) -> None:
        self.wanted = wanted
        self.lexical = lexical
        self.dense: list[int] = []
        self.candidates: list[int] = []
        self.cosines: dict[int, float] = {}
        self._snapshot = snapshot
        self._mask = mask

    def by_words(self) -> tuple[Tokens, ...]:
        """Their prefixes."""
        return self._chosen([self.lexical])

    def by_words_and_vector(self, vector: Sequence[float]) -> tuple[Tokens, ...]:
        """Their prefixes, given the query's unit vector."""
        vectors, query = self._snapshot.vectors, np.asarray(vector)
        self.dense = vectors.order(query, self._mask, max(self.wanted, ORDER_LENGTH))
        prefixes = self._chosen([self.lexical, self.dense])
        self.cosines = vectors.cosines(query, self.candidates)
        return prefixes

    def tools(self) -> list[Tool]:
        """The candidates themselves."""
        return [self._snapshot.catalogue.tools[position] for position in self.candidates]

    def _chosen(self, orders: Sequence[Sequence[int]]) -> tuple[Tokens, ...]:
        self.candidates = choose(orders, self._mask, self.wanted)
        return tuple(self._snapshot.prefix(position) for position in self.candidates)


def fused(probabilities: Mapping[int, float], lexical: Sequence[int], lexical_weight: float) -> list[int]:
    """Scored positions, best first: by probability, and by BM25's order as far as its vote counts.

    Among equal probabilities BM25's order decides, then the catalogue's.
    """
    matched = [position for position in lexical if position in probabilities]
    by_lexical = dict.fromkeys([*matched, *sorted(probabilities)])
    by_score = sorted(by_lexical, key=lambda position: -probabilities[position])
    return fuse([by_score, matched], [1.0, lexical_weight]) if lexical_weight else by_score


def _answered(outcome: Outcome) -> Scored | Generated | Refusal | Failed:
    """The outcome of a call's request; anything that cannot answer one is a fault."""
    if isinstance(outcome, Scored | Generated | Refusal | Failed):
        return outcome
    if isinstance(outcome, Cancelled):
        return Failed("cancelled", "The engine dropped the request; try again.")
    return Failed("wrong_answer", "The engine answered another kind of request; this is a bug.")


def _why_nothing(ranking: Ranking, scope: Scope, min_score: float) -> str:
    if not ranking.scored:
        count = len(ranking.candidates)
        return (
            f"The model says that none of the {count} tools that come nearest serves this."
            if count
            else scope.emptiness
        )
    best = max(ranking.scored, key=lambda position: ranking.scores[position])
    nearest = scope.snapshot.catalogue.tools[best].id
    best_score = f"the best is {nearest} with {ranking.scores[best]:.2f}"
    count = len(ranking.scored)
    if min_score == math.inf:
        return f"None of the {count} tools that come nearest seems to serve this; {best_score}."
    return f"None of the {count} tools that come nearest reaches min_score {min_score:g}; {best_score}."


def _status(found: bool) -> Status:
    return "matched" if found else "no_match"


def _ms_since(started: float) -> float:
    return (time.monotonic() - started) * 1000.0
