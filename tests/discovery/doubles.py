"""Stand-ins for tokenizer and engine, and small catalogues."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import Any

from engine.client import Choose, EngineStatus, PageCounts
from engine.errors import ModelError, Refusal, RefusalCode
from engine.request import (
    Embed,
    Embedded,
    Generate,
    Generated,
    Outcome,
    Rank,
    Request,
    Score,
    Scored,
    Timing,
    Usage,
)
from mcp_discovery.discovery.catalogue import Catalogue, Tool
from mcp_discovery.discovery.listing import Listing
from mcp_discovery.discovery.prompts import Prompts
from mcp_discovery.discovery.select import Discovery, DiscoverySettings, Trained

SPECIALS = ("<|im_start|>", "<|im_end|>")


class WordTokenizer:
    """One token a word, white-space or other character; special tokens only by name. Reversible."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._words: list[str] = []
        self.special_ids = {self._id(f"special {token}") for token in SPECIALS}

    def encode(self, text: str) -> list[int]:
        return [self._id(word) for word in re.findall(r" ?\w+|\s|[^\w\s]", text)]

    def special(self, token: str) -> int:
        if token not in SPECIALS:
            raise ModelError(f"no special token {token}")
        return self._id(f"special {token}")

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self._words[token] for token in tokens)

    def _id(self, word: str) -> int:
        if word not in self._ids:
            self._ids[word] = len(self._words)
            self._words.append(word)
        return self._ids[word]


TOPICS = ("rain weather umbrella forecast", "file disk document", "issue bug ticket repository")
"""What the stub's vectors tell apart: one direction a line, and one for everything else."""


def by_topic(text: str) -> tuple[float, ...]:
    """A unit vector of the share of a text's words in each of `TOPICS`."""
    told = text.partition("Tool:")[2] or text.partition("Request:")[2]
    words = re.findall(r"\w+", told.replace("special", " "))
    counts = [float(sum(word in topic.split() for word in words)) for topic in TOPICS]
    vector = [*counts, 0.0 if any(counts) else 1.0]
    length = sum(value * value for value in vector) ** 0.5
    return tuple(value / length for value in vector)


Judge = Callable[[str, str], float]
"""(text of the tool's prefix, text of the query's suffix) -> probability."""


def by_shared_words(prefix: str, suffix: str) -> float:
    """Share of the request's words that the tool's text has."""
    asked = set(re.findall(r"\w+", suffix.partition("Request:")[2].partition("special")[0].lower()))
    told = set(re.findall(r"\w+", prefix.partition("Tool:")[2].lower()))
    return len(asked & told) / max(1, len(asked))


class StubEngine:
    """An engine client that judges by a function and keeps what it was asked."""

    def __init__(self, tokenizer: WordTokenizer, judge: Judge = by_shared_words, pages: int = 4096) -> None:
        self.tokenizer = tokenizer
        self.judge = judge
        self.pages = pages
        self.embed: Callable[[str], tuple[float, ...]] = by_topic
        self.requests: list[Request] = []
        self.deadlines: list[float | None] = []
        self.callers: list[str] = []
        self.answer: Outcome | Exception | None = None  # instead of judging
        self.entered = asyncio.Event()
        self.hold: asyncio.Event | None = None  # answers wait for it

    async def run(self, request: Request, *, deadline: float | None = None, caller: str = "") -> Outcome:
        self.requests.append(request)
        self.deadlines.append(deadline)
        self.callers.append(caller)
        self.entered.set()
        if self.hold is not None:
            await self.hold.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is not None:
            return self.answer
        if isinstance(request, Embed):
            return Embedded(self.embed(self.tokenizer.decode(request.tokens)))
        if isinstance(request, Generate):
            return Generated(self._listed(request), Usage(prompt_tokens=len(request.tokens), output_tokens=3))
        assert isinstance(request, Score)
        suffix = self.tokenizer.decode(request.suffix)
        return Scored(
            tuple(self.judge(self.tokenizer.decode(prefix), suffix) for prefix in request.prefixes),
            Usage(prompt_tokens=70, cached_tokens=48, pages=3),
            Timing(queue_ms=1.25, run_ms=20.5),
        )

    def _listed(self, request: Generate) -> tuple[int, ...]:
        """The numbers of the listed tools that the judge finds likely, best first, as the constraint
        lets them be written; 0 without one."""
        told, _, asked = self.tokenizer.decode(request.tokens).rpartition("\nRequest:")
        lines = re.findall(r"\n(\d+)\. ([^\n]*)", told)
        likely = {number: self.judge(f"Tool: {text}", f"Request:{asked}") for number, text in lines}
        best = sorted((number for number in likely if likely[number] >= 0.5), key=lambda n: -likely[n])
        output: list[int] = []
        assert request.constraint is not None
        for token in self.tokenizer.encode(",".join(best) or "0"):
            if token not in (request.constraint.allowed(output) or ()):
                break
            output.append(token)
        assert len(output) <= request.max_tokens
        return tuple(output)

    async def rank(
        self, request: Rank, choose: Choose, *, deadline: float | None = None, caller: str = ""
    ) -> Outcome:
        self.requests.append(request)
        prefixes = tuple(choose(self.embed(self.tokenizer.decode(request.query))))
        assert len(prefixes) <= request.rows
        assert max(map(len, prefixes), default=0) <= request.prefix_tokens
        score = Score(prefixes, request.suffix, request.positive, request.negative)
        return await self.run(score, deadline=deadline, caller=caller)

    def status(self) -> EngineStatus:
        pages = PageCounts(free=self.pages, held=0, cached=0, total=self.pages)
        return EngineStatus(True, False, "", pages, 0, 0, 0, 0, 0.0, "stub")

    @property
    def scored_prefixes(self) -> list[str]:
        """Texts of every tool prefix that the model was given to score."""
        scores = [request for request in self.requests if isinstance(request, Score)]
        return [self.tokenizer.decode(prefix) for request in scores for prefix in request.prefixes]


def tool(server: str, name: str, description: str = "", *parameters: str, **extra: Any) -> Tool:
    schema: dict[str, Any] = {"type": "object", "properties": {key: {"type": "string"} for key in parameters}}
    return Tool(server, name, {"name": name, "description": description, "inputSchema": schema, **extra})


def discovery_over(
    tools: Sequence[Tool],
    *,
    judge: Judge = by_shared_words,
    servers_missing: Sequence[str] = (),
    pages: int = 4096,
    trained: Trained | None = None,
    writes: bool = False,
    **settings: Any,
) -> tuple[Discovery, StubEngine]:
    tokenizer = WordTokenizer()
    engine = StubEngine(tokenizer, judge, pages)
    catalogue = Catalogue.of(tools, servers_missing=servers_missing, indexed_at="2026-01-02T03:04:05Z")
    prompts = Prompts(tokenizer)
    chosen = DiscoverySettings(**settings)
    listing = Listing(tokenizer) if writes else None
    return Discovery(
        engine, prompts, catalogue, chosen, model="stub", trained=trained, listing=listing
    ), engine


def refusal(code: RefusalCode = RefusalCode.PAGES_SHORT) -> Refusal:
    return Refusal(
        code,
        "The request needs 96 pages and 71 are free.",
        pages_needed=96,
        pages_free=71,
        pages_total=80,
        page_tokens=16,
        queue_depth=3,
        retry_after_ms=None if code is RefusalCode.REQUEST_TOO_LARGE else 400,
    )
