"""Whether a request makes sense for a model: token ids, lengths, bounds. One sentence where not."""

from __future__ import annotations

import math
from collections.abc import Iterable

from engine.request import Embed, Generate, Rank, Request, Score, Tokens


class KnownTexts:
    """Texts whose tokens were found to exist. By identity: tuples do not change, and a catalogue's prefixes
    come again in every request. Safe to use from several threads."""

    def __init__(self, most: int = 8192) -> None:
        self._most = most
        self._known: dict[int, Tokens] = {}  # a text that is kept keeps its id to itself

    def __contains__(self, text: Tokens) -> bool:
        return self._known.get(id(text)) is text

    def add(self, text: Tokens) -> None:
        if len(self._known) >= self._most:
            self._known.clear()
        self._known[id(text)] = text


def validate(request: Request, vocabulary: int, context: int, known: KnownTexts) -> None:
    """Raises ValueError where a request could never be served by a model of these sizes."""
    if isinstance(request, Score | Rank):
        check_tokens((request.positive, request.negative), vocabulary, "positive and negative")
        if request.window is not None and request.window < 1:
            raise ValueError(f"window must be at least 1, it is {request.window}")
    if isinstance(request, Score):
        validate_rows(request.prefixes, request.suffix, vocabulary, context, known)
    elif isinstance(request, Rank):
        _validate_rank(request, vocabulary, context)
    else:
        _validate_sequence(request, vocabulary, context)


def validate_prefixes(
    rank: Rank, prefixes: tuple[Tokens, ...], vocabulary: int, context: int, known: KnownTexts
) -> None:
    """Raises ValueError where prefixes do not fit their `Rank`, or hold a token that does not exist."""
    check_fit(rank, prefixes)
    validate_rows(prefixes, rank.suffix, vocabulary, context, known)


def check_fit(rank: Rank, prefixes: tuple[Tokens, ...]) -> None:
    """Raises ValueError where prefixes are more or longer than the `Rank` was admitted for."""
    if len(prefixes) > rank.rows:
        raise ValueError(f"{len(prefixes)} prefixes were supplied, the request was for {rank.rows}")
    longest = max(map(len, prefixes), default=0)
    if longest > rank.prefix_tokens:
        raise ValueError(f"a prefix has {longest} tokens, the request was for {rank.prefix_tokens}")


def validate_rows(
    prefixes: tuple[Tokens, ...], suffix: Tokens, vocabulary: int, context: int, known: KnownTexts
) -> None:
    """Raises ValueError where a row is empty, too long or holds a token that does not exist."""
    if suffix:
        check_tokens(suffix, vocabulary, "suffix tokens")
    for prefix in prefixes:
        if prefix not in known and (prefix or not suffix):
            check_tokens(prefix, vocabulary, "prefix tokens")
            known.add(prefix)
    _check_length(max(map(len, prefixes), default=0) + len(suffix), context, "prefix and suffix have")


def check_tokens(tokens: Iterable[int], vocabulary: int, name: str) -> None:
    """Raises ValueError where there are no tokens or one is not of the vocabulary."""
    low = min(tokens, default=None)
    if low is None:
        raise ValueError(f"{name} must not be empty")
    high = max(tokens)
    if low < 0 or high >= vocabulary:
        wrong = low if low < 0 else high
        raise ValueError(f"{name} must be from 0 to {vocabulary - 1}, one is {wrong}")


def _validate_rank(request: Rank, vocabulary: int, context: int) -> None:
    check_tokens(request.query, vocabulary, "query tokens")
    check_tokens(request.suffix, vocabulary, "suffix tokens")
    _check_length(len(request.query), context, "the query has")
    if request.rows < 1 or request.prefix_tokens < 1:
        raise ValueError(
            f"rows and prefix_tokens must be at least 1, they are {request.rows} and {request.prefix_tokens}"
        )
    _check_length(request.prefix_tokens + len(request.suffix), context, "prefix and suffix have")


def _validate_sequence(request: Embed | Generate, vocabulary: int, context: int) -> None:
    check_tokens(request.tokens, vocabulary, "tokens")
    if request.keep < 0:
        raise ValueError(f"keep must not be negative, it is {request.keep}")
    if isinstance(request, Embed):
        _check_length(len(request.tokens), context, "the text has")
        return
    if request.max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, it is {request.max_tokens}")
    if not (math.isfinite(request.temperature) and request.temperature >= 0.0):
        raise ValueError(f"temperature must be a number from 0 on, it is {request.temperature}")
    _check_length(len(request.tokens) + request.max_tokens - 1, context, "prompt and output have")


def _check_length(tokens: int, context: int, what: str) -> None:
    if tokens > context:
        raise ValueError(f"{what} {tokens:,} tokens, the model's context is {context:,}; make it shorter")
