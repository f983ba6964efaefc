"""What one call asks for, and what comes of it: plain values, no protocol."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from engine.errors import Refusal
from engine.request import Failed, Generated, Scored, Timing, Usage
from mcp_discovery.discovery.catalogue import Catalogue, Tool

Status = Literal["matched", "no_match", "partial", "refused", "failed"]
Method = Literal["names", "bm25+score", "bm25+vectors+score", "bm25+generate"]


@dataclass(frozen=True, slots=True)
class DiscoverRequest:
    """One call's arguments, validated. `limit` and `min_score` None: the site's."""

    query: str = ""
    limit: int | None = None
    servers: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    read_only: bool = False
    min_score: float | None = None
    explain: bool = False


@dataclass(frozen=True, slots=True)
class Ranking:
    """Everything that one query considered, by position in the catalogue.

    `candidates` are in the order of retrieval, `scored` are the same in their final order, or none where
    the engine did not answer. `outcome` None: the model was not asked, because names fill the answer
    or no tool is in reach.
    """

    named: tuple[int, ...]
    lexical: tuple[int, ...]
    dense: tuple[int, ...]
    candidates: tuple[int, ...]
    scored: tuple[int, ...]
    probabilities: dict[int, float]  # the model's own, of each candidate
    cosines: dict[int, float]  # of the candidates that have a vector
    scores: dict[int, float]  # the published probability
    doubtful: bool  # no candidate seems to serve the request
    outcome: Scored | Generated | Refusal | Failed | None
    query_truncated: bool
    retrieve_ms: float


@dataclass(frozen=True, slots=True)
class Pick:
    """`score` is the probability that the tool serves the request, and 1 where the request names it.
    Where a model wrote a list it is 1 / place in it: an order, no probability.
    """

    tool: Tool
    score: float
    reason: str | None = None
    also_on: tuple[str, ...] = ()  # other servers that the caller sees with the very same tool


@dataclass(frozen=True, slots=True)
class DiscoverResult:
    """What came of one call, on which catalogue, at what cost. `visible_tools` is the caller's count."""

    status: Status
    catalogue: Catalogue
    visible_tools: int
    servers_missing: tuple[str, ...]
    servers_stale: tuple[str, ...] = ()  # their last good list is searched; they do not answer at present
    picks: tuple[Pick, ...] = ()
    notes: tuple[str, ...] = ()  # sentences about names, filters and why nothing matched
    method: Method = "bm25+score"
    candidates: int = 0
    degraded: bool = False
    usage: Usage = field(default_factory=Usage)
    query_truncated: bool = False
    timing: Timing = field(default_factory=Timing)
    retrieve_ms: float = 0.0
    refusal: Refusal | None = None
    failure: Failed | None = None
