"""The training sets as one pool of tools and a list of examples, each with its likely wrong answers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mcp_discovery.discovery.catalogue import Tool
from mcp_discovery.discovery.lexical import LexicalIndex, terms
from mcp_discovery.discovery.prompts import words_of
from mcp_discovery.training.data import DataError, ToolSet

HARD_RANKS = 40
Ranks = NDArray[np.int32]
FOUND = ("mined", "near", "foreign")  # what mining finds for an example


def lexical_ranks(
    tools: Sequence[Tool], texts: Sequence[str], most: int
) -> list[tuple[Ranks, NDArray[np.float32]]]:
    """For each text the tools that share a term with it, best BM25 score first, `most` at most."""
    index = LexicalIndex.of(tools)
    ranked: list[tuple[Ranks, NDArray[np.float32]]] = []
    for text in texts:
        scores = index.scores(list(dict.fromkeys(terms(text[:2000]))))
        order = np.argsort(-scores, kind="stable")[:most].astype(np.int32)
        order = order[scores[order] > 0]
        ranked.append((order, scores[order]))
    return ranked


def no_ranks() -> Ranks:
    return np.empty(0, np.int32)


@dataclass(slots=True)
class Example:
    """A request and the tools that serve it; indices are into `Corpus.tools`.

    The last three are what mining found: `mined` are wrong answers by the adapter's own vectors; `near`
    are tools so near the right ones that they may serve as well, whatever the labels say; `foreign` are
    the nearest tools of a small catalogue that cannot serve the request.
    """

    text: str | None  # None: made up anew from the tool's own text at each draw
    positives: tuple[int, ...]
    excluded: frozenset[int]  # never wrong answers: acceptable, or same-named elsewhere
    hard: Ranks  # likely wrong answers by BM25, best first
    mined: Ranks = field(default_factory=no_ranks)
    near: Ranks = field(default_factory=no_ranks)
    foreign: Ranks = field(default_factory=no_ranks)


@dataclass(frozen=True, slots=True)
class Source:
    """Examples of one kind; the share of draws it gets is `weight` over the sum of weights."""

    name: str
    weight: float
    examples: tuple[Example, ...]
    first: int  # of the set's tools in the pool
    last: int  # one past the end
    exhaustive: bool  # whether every tool of the set that serves a request is labelled


class Corpus:
    """All tools of all sets, and the sources to draw from."""

    def __init__(self, sets: Sequence[ToolSet], factors: Mapping[str, float], cap: int = 1500) -> None:
        """`factors` multiply a source's default weight, the square root of its examples up to `cap`."""
        if not sets:
            raise DataError("there is no tool set to train on")
        self.tools: list[Tool] = [tool for each in sets for tool in each.tools]
        classes: dict[str, int] = {}
        self.twin = np.array(
            [classes.setdefault(words_of(tool.name), len(classes)) for tool in self.tools], dtype=np.int32
        )
        self.names = [frozenset(words_of(tool.name).split()) for tool in self.tools]
        self._members: dict[int, list[int]] = defaultdict(list)
        for at, twin in enumerate(self.twin.tolist()):
            self._members[twin].append(at)
        self.siblings: dict[int, list[int]] = {}
        self.sources: list[Source] = []
        start = 0
        for each in sets:
            self._add_siblings(each, start)
            kinds = (("", self._labelled(each, start)), (":tools", self._made_up(each, start)))
            for suffix, examples in kinds:
                base = 0.25 if suffix and each.queries else 1.0
                name = each.name + suffix
                weight = base * math.sqrt(min(len(examples), cap)) * factors.get(name, 1.0)
                if examples and weight > 0:
                    stop = start + len(each.tools)
                    source = Source(name, weight, tuple(examples), start, stop, not suffix)
                    self.sources.append(source)
            start += len(each.tools)

    @property
    def example_count(self) -> int:
        return sum(len(source.examples) for source in self.sources)

    def found_state(self) -> dict[str, Tensor]:
        """What mining has found, as stored in checkpoints: for each kind all of it in order, int32, and
        how many each example has, int64."""
        examples = [example for source in self.sources for example in source.examples]
        state = {}
        for kind in FOUND:
            parts: list[Ranks] = [getattr(example, kind) for example in examples]
            state[kind] = torch.from_numpy(np.concatenate(parts))
            state[f"{kind}_counts"] = torch.tensor([len(part) for part in parts])
        return state

    def restore_found(self, state: Mapping[str, Tensor]) -> None:
        """Raises DataError where the state is of other sets."""
        examples = [example for source in self.sources for example in source.examples]
        for kind in FOUND:
            counts = state[f"{kind}_counts"].tolist()
            if len(counts) != len(examples):
                raise DataError("the checkpoint was written while training on other sets")
            for example, part in zip(examples, torch.split(state[kind].cpu(), counts), strict=True):
                setattr(example, kind, part.numpy().copy())

    def alike(self, tool: int, others: Iterable[int]) -> bool:
        """Whether a tool's name says nearly what that of one of `others` says."""
        words = self.names[tool]
        return any(2 * len(words & self.names[at]) >= len(words | self.names[at]) for at in others)

    def _add_siblings(self, each: ToolSet, start: int) -> None:
        """Other tools of the same server: the look-alikes that a request must be told apart from."""
        servers: dict[str, list[int]] = defaultdict(list)
        for at, tool in enumerate(each.tools, start):
            servers[tool.server].append(at)
        for members in servers.values():
            self.siblings.update(dict.fromkeys(members, members))

    def _twins(self, tools: Sequence[int]) -> frozenset[int]:
        return frozenset(at for tool in tools for at in self._members[int(self.twin[tool])])

    def _labelled(self, each: ToolSet, start: int) -> list[Example]:
        at = {tool.id: index for index, tool in enumerate(each.tools, start)}
        ranked = lexical_ranks(each.tools, [query.text for query in each.queries], HARD_RANKS + 8)
        examples = []
        for query, (order, _) in zip(each.queries, ranked, strict=True):
            positives = tuple(at[key] for key in query.relevant)
            excluded = self._twins([at[key] for key in query.acceptable if key in at])
            examples.append(Example(query.text, positives, excluded, _without(order + start, excluded)))
        return examples

    def _made_up(self, each: ToolSet, start: int) -> list[Example]:
        texts = [f"{words_of(tool.name)} {tool.description[:300]}" for tool in each.tools]
        examples = []
        for index, (order, scores) in enumerate(lexical_ranks(each.tools, texts, HARD_RANKS + 8), start):
            excluded = self._twins([index])
            # A tool that matches the text nearly as well as its owner probably does the same thing.
            different = order[scores < 0.7 * scores[0]] if len(scores) else order
            examples.append(Example(None, (index,), excluded, _without(different + start, excluded)))
        return examples


def _without(order: NDArray[Any], excluded: frozenset[int]) -> Ranks:
    kept = [at for at in order.tolist() if at not in excluded]
    return np.array(kept[:HARD_RANKS], dtype=np.int32)
