"""Lexical order: BM25 (Robertson, as Lucene computes it; k1 1.5, b 0.75) over a tool's own words.

A tool's document is its server, name, description and parameter names nested to depth 4, split at
case and separators. Scripts that write no spaces are indexed as single characters and pairs of them.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mcp_discovery.discovery.catalogue import Tool

Mask = NDArray[np.bool_]
"""One flag a position of the catalogue."""

K1, B = 1.5, 0.75
PARAMETER_DEPTH = 4
_PRONOUNS = "i it its me my that this you your"
STOP_WORDS = frozenset(
    f"a an and are as at be by can for from in is of on or please the to with {_PRONOUNS}".split()
)
_BREAKS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[_\-./:]+")
_ASCII_WORDS = re.compile("[a-z0-9]+")
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
        # A text whose case changes nowhere needs no more splitting.
        cased = text if text[1:].islower() else split_words(text)
        words = _ASCII_WORDS.findall(cased.lower())
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


class Vocabulary:
    """Numbers of terms. Shared by the revisions of a catalogue, so that a group keeps its postings; terms
    that are no longer used keep their number."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def add(self, term: str) -> int:
        return self._numbers.setdefault(term, len(self._numbers))

    def get(self, term: str) -> int | None:
        return self._numbers.get(term)

    def __len__(self) -> int:
        return len(self._numbers)


class Postings:
    """The words of one group of documents: which holds which term how often, as three arrays of one length.

    `terms` (int32) are numbers of the vocabulary, `documents` (int32) numbers in the group, ascending, and
    `counts` (float32) how often; `lengths` (float32) are terms a document.
    """

    def __init__(self, documents: Sequence[Sequence[str]], vocabulary: Vocabulary) -> None:
        entries = [
            (vocabulary.add(term), number, count)
            for number, document in enumerate(documents)
            for term, count in Counter(document).items()
        ]
        columns = np.array(entries, dtype=np.int32).reshape(-1, 3).T
        self.terms, self.documents = columns[0].copy(), columns[1].copy()
        self.counts = columns[2].astype(np.float32)
        self.lengths = np.array([len(document) for document in documents], dtype=np.float32)

    @classmethod
    def of(cls, tools: Sequence[Tool], vocabulary: Vocabulary) -> Postings:
        return cls([terms(document(tool)) for tool in tools], vocabulary)


class LexicalIndex:
    """BM25 over the documents of a catalogue, by position.

    It is merged from the postings of its groups, which do not depend on one another: a new revision only
    reads the words of what has changed. What a term weighs is computed when a query holds it.
    """

    def __init__(self, documents: Sequence[Sequence[str]]) -> None:
        vocabulary = Vocabulary()
        self._merge([Postings(documents, vocabulary)], vocabulary)

    @classmethod
    def of(cls, tools: Sequence[Tool]) -> LexicalIndex:
        return cls([terms(document(tool)) for tool in tools])

    @classmethod
    def over(cls, groups: Sequence[Postings], vocabulary: Vocabulary) -> LexicalIndex:
        """The documents of all `groups`, one group after the other, their terms numbered by `vocabulary`."""
        index = cls.__new__(cls)
        index._merge(groups, vocabulary)
        return index

    def _merge(self, groups: Sequence[Postings], vocabulary: Vocabulary) -> None:
        """Compressed sparse rows: term t's documents and counts lie from `_starts[t]` to `_starts[t + 1]`."""
        sizes = [len(group.lengths) for group in groups]
        offsets = np.cumsum([0, *sizes])
        terms = np.concatenate([np.zeros(0, np.int32), *(group.terms for group in groups)])
        documents = [
            group.documents + np.int32(offset) for offset, group in zip(offsets, groups, strict=False)
        ]
        order = np.argsort(terms, kind="stable")
        self._vocabulary = vocabulary
        counts = np.bincount(terms, minlength=len(vocabulary))
        self._starts: list[int] = np.concatenate([[0], np.cumsum(counts)]).tolist()
        self._documents = np.concatenate([np.zeros(0, np.int32), *documents])[order]
        self._counts = np.concatenate([np.zeros(0, np.float32), *(group.counts for group in groups)])[order]
        self._lengths = np.concatenate([np.zeros(0, np.float32), *(group.lengths for group in groups)])

    @cached_property
    def _weights(self) -> NDArray[np.float32]:
        """What each entry adds to its document's score where every document is seen, as mostly it is."""
        size, held = len(self._lengths), np.diff(self._starts)
        average = float(self._lengths.sum(dtype=np.float64)) / max(size, 1) or 1.0
        rarity = np.log(1 + (size - held + 0.5) / (held + 0.5)).astype(np.float32)
        saturation = K1 * (1 - B + B * self._lengths[self._documents] / average)
        weights: NDArray[np.float32] = np.repeat(rarity, held) * self._counts / (self._counts + saturation)
        return weights

    def scores(self, query: Sequence[str], mask: Mask | None = None) -> NDArray[np.float32]:
        """[catalogue size], 0 outside `mask`; a term that occurs twice counts twice, one that no tool has
        counts nothing.

        How rare a term and how long a document is is told by the documents inside `mask` alone, so that
        tools that a caller may not see change nothing for them.
        """
        scores = np.zeros(len(self._lengths), dtype=np.float32)
        if mask is None or mask.all():
            rows = list(self._rows(query))
            if rows:
                # All at once takes a quarter of the time of term by term, and adds in the same order.
                documents = np.concatenate([self._documents[row] for row in rows])
                np.add.at(scores, documents, np.concatenate([self._weights[row] for row in rows]))
            return scores
        seen, size = mask, int(mask.sum())
        average = float(self._lengths.sum(where=seen, dtype=np.float64)) / max(size, 1) or 1.0
        for row in self._rows(query):
            held, counts = self._documents[row], self._counts[row]
            held, counts = held[seen[held]], counts[seen[held]]
            rarity = math.log(1 + (size - len(held) + 0.5) / (len(held) + 0.5))
            # A repeated term counts less, and less in a long document.
            saturation = K1 * (1 - B + B * self._lengths[held] / average)
            scores[held] += rarity * counts / (counts + saturation)
        return scores

    def _rows(self, query: Sequence[str]) -> Iterator[slice]:
        """The entries of each term of `query` that a document has."""
        for term in query:
            number = self._vocabulary.get(term)
            if number is not None and number < len(self._starts) - 1:  # later revisions add terms
                yield slice(self._starts[number], self._starts[number + 1])

    def order(self, query: str, mask: Mask, most: int) -> list[int]:
        """Up to `most` positions inside `mask` that share a term with `query`, best first; equal
        scores keep catalogue order. A repeated word of the query counts once."""
        scores = self.scores(list(dict.fromkeys(terms(query))), mask)
        found = np.flatnonzero(scores > 0)
        if len(found) > most:
            worst_kept = -np.partition(-scores[found], most - 1)[most - 1]
            found = found[scores[found] >= worst_kept]
        best: list[int] = found[np.argsort(-scores[found], kind="stable")][:most].tolist()
        return best
