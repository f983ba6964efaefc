"""Lexical order: BM25 (Robertson, as Lucene computes it; k1 1.5, b 0.75) over a tool's own words.

A tool's document is its server, name, description and parameter names nested to depth 4, split at
case and separators. Scripts that write no spaces are indexed as single characters and pairs of them.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcp_discovery.discovery.catalogue import Tool

# bm25s imports jax where it finds it, and jax takes three quarters of a card at its first use.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import bm25s

Mask = NDArray[np.bool_]
"""One flag a position of the catalogue."""

K1, B = 1.5, 0.75
PARAMETER_DEPTH = 4
_PRONOUNS = "i it its me my that this you your"
STOP_WORDS = frozenset(
    f"a an and are as at be by can for from in is of on or please the to with {_PRONOUNS}".split()
)
_BREAKS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[_\-./:]+")
_ACCENTS = re.compile("[\u0300-\u036f]")
# Han, Kana, Hangul, Thai, Lao, Khmer, Burmese: words are not separated, so pairs stand in for them.
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3041-\u30ff\u3400-\u9fff"
    "\uac00-\ud7af\U00020000-\U0003ffff"
)
# The second group holds words of any other script, with the vowel signs of Indic and Arabic scripts.
_RUNS = re.compile(rf"([{_UNSPACED}]+)|((?:[^\W_{_UNSPACED}]|[\u0590-\u0dff])+)")


def split_words(text: str) -> str:
    """`text` with a space at each change of case and in place of `_ - . / :`."""
    return _BREAKS.sub(" ", text)


def terms(text: str) -> list[str]:
    """Index terms in order: compatibility forms folded, accents dropped, lower case, stop words left out."""
    if text.isascii():
        words = re.findall("[a-z0-9]+", split_words(text).lower())
        return [word for word in words if word not in STOP_WORDS]
    folded = unicodedata.normalize("NFKD", split_words(unicodedata.normalize("NFKC", text))).casefold()
    folded = unicodedata.normalize("NFC", _ACCENTS.sub("", folded))
    found: list[str] = []
    for unspaced, word in _RUNS.findall(folded):
        if unspaced:
            found += unspaced
            found += (unspaced[start : start + 2] for start in range(len(unspaced) - 1))
        elif word not in STOP_WORDS:
            found.append(word)
    return found


def parameter_names(schema: object, depth: int = PARAMETER_DEPTH) -> Iterator[str]:
    """Property names of a schema, of its objects and of the items of its arrays, `depth` levels deep."""
    if depth == 0 or not isinstance(schema, Mapping):
        return
    properties = schema.get("properties")
    if isinstance(properties, Mapping):
        for name, value in properties.items():
            yield str(name)
            yield from parameter_names(value, depth - 1)
    yield from parameter_names(schema.get("items"), depth - 1)


def document(tool: Tool) -> str:
    """What is indexed of a tool."""
    return " ".join((tool.server, tool.name, tool.description, *parameter_names(tool.input_schema)))


class LexicalIndex:
    """BM25 over the documents of a catalogue, by position."""

    def __init__(self, documents: Sequence[Sequence[str]]) -> None:
        self._size = len(documents)
        self._bm25: Any = None
        if any(documents):
            self._bm25 = bm25s.BM25(k1=K1, b=B, method="lucene")
            self._bm25.index(list(map(list, documents)), create_empty_token=False, show_progress=False)

    @classmethod
    def of(cls, tools: Sequence[Tool]) -> LexicalIndex:
        return cls([terms(document(tool)) for tool in tools])

    def scores(self, query: Sequence[str]) -> NDArray[np.float32]:
        """[catalogue size]; a term that occurs twice counts twice, one that no tool has counts nothing."""
        known = [] if self._bm25 is None else [term for term in query if term in self._bm25.vocab_dict]
        if not known:
            return np.zeros(self._size, dtype=np.float32)
        scores: NDArray[np.float32] = self._bm25.get_scores(known)
        return scores

    def order(self, query: str, mask: Mask, most: int) -> list[int]:
        """Up to `most` positions inside `mask` that share a term with `query`, best first; equal
        scores keep catalogue order. A repeated word of the query counts once."""
        scores = self.scores(list(dict.fromkeys(terms(query))))
        found = np.flatnonzero((scores > 0) & mask)
        if len(found) > most:
            worst_kept = -np.partition(-scores[found], most - 1)[most - 1]
            found = found[scores[found] >= worst_kept]
        return [int(position) for position in found[np.argsort(-scores[found], kind="stable")][:most]]
