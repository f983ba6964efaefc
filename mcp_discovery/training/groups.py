"""Draws training groups: a request, the tools that serve it and tools that do not.

A draw is a function of the generator it is given, so that step s of a run always sees the same groups.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from mcp_discovery.discovery.catalogue import Tool
from mcp_discovery.training.augment import augmented_query, augmented_tool, joined_queries, styled_name
from mcp_discovery.training.corpus import Corpus, Example, Ranks, Source
from mcp_discovery.training.data import DataError
from mcp_discovery.training.synthesis import first_sentence, made_up_request, product_of


@dataclass(frozen=True, slots=True)
class Mixture:
    """How often a draw takes each turn. Shares of wrong answers are relative to their sum."""

    no_answer: float = 0.08  # the right tools are left out, and what is near them
    foreign: float = 0.14  # the nearest tools of a catalogue that has no right one
    joined: float = 0.06  # two requests as one
    by_name: float = 0.03  # the tool's name, in some style, is the request
    lexical: float = 0.34
    mined: float = 0.34  # falls to lexical before the first mining
    sibling: float = 0.16
    same_set: float = 0.08
    any_set: float = 0.08
    augmentation: float = 1.0


@dataclass(frozen=True, slots=True)
class Group:
    """`tools[:positives]` serve the request, the others do not; indices are into the pool."""

    text: str
    tools: tuple[Tool, ...]
    indices: tuple[int, ...]
    positives: int
    excluded: frozenset[int]  # never wrong answers to this request, here or elsewhere in the batch
    sure: tuple[bool, ...]  # of each tool: whether it certainly does not serve the request


class GroupSampler:
    """Stateless but for the corpus, whose mined answers change between loaders."""

    def __init__(self, corpus: Corpus, mixture: Mixture) -> None:
        self._corpus = corpus
        self._mixture = mixture
        self._weights = [source.weight for source in corpus.sources]

    def draw(self, rng: random.Random, size: int, *, answered: bool = False) -> Group:
        """A group of exactly `size` tools; `answered`: always with a right one among them."""
        mixture, corpus = self._mixture, self._corpus
        source = rng.choices(corpus.sources, self._weights)[0]
        example = rng.choice(source.examples)
        text, from_text = self._request(example, rng)
        turn = math.inf if answered else rng.random()
        if turn < mixture.foreign and len(example.foreign) >= size:
            # the nearest ones, in no order that could tell
            wrong = dict.fromkeys(rng.sample(example.foreign[: 2 * size].tolist(), size), True)
            return self._group(text, from_text, [], wrong, example.excluded, rng)
        unanswered = mixture.foreign <= turn < mixture.foreign + mixture.no_answer
        examples = [example]
        if rng.random() < mixture.joined:
            examples.append(rng.choice(source.examples))
            second, _ = self._request(examples[1], rng)
            text = joined_queries(text, second, rng)
        excluded = frozenset().union(*(each.excluded for each in examples))
        positives = [] if unanswered else self._positives(examples, size, rng)
        wrong = self._wrong(source, examples, positives, excluded, size - len(positives), rng)
        return self._group(text, from_text, positives, wrong, excluded, rng)

    def _group(
        self,
        text: str,
        from_text: bool,
        positives: list[int],
        wrong: dict[int, bool],
        excluded: frozenset[int],
        rng: random.Random,
    ) -> Group:
        augmentation = self._mixture.augmentation
        without_first = (0.55 if from_text else 0.03) * min(augmentation, 1.0)
        indices = (*positives, *wrong)
        return Group(
            augmented_query(text, rng, augmentation),
            tuple(self._shown(self._corpus.tools[at], rng, without_first) for at in indices),
            indices,
            len(positives),
            excluded,
            (*[False] * len(positives), *wrong.values()),
        )

    def _request(self, example: Example, rng: random.Random) -> tuple[str, bool]:
        """The request's text, and whether it was taken from a tool's own description."""
        tool = self._corpus.tools[example.positives[0]]
        if rng.random() < self._mixture.by_name:
            name = styled_name(tool.name, rng)
            product = product_of(tool.server)
            return (f"{product} {name}" if product and rng.random() < 0.3 else name), False
        if example.text is not None:
            return example.text, False
        return made_up_request(tool, rng), True

    @staticmethod
    def _positives(examples: list[Example], size: int, rng: random.Random) -> list[int]:
        """At most two in all and never more than half of the group; one of each request at least."""
        if len(examples) > 1:
            chosen = [rng.choice(example.positives) for example in examples]
        else:
            every = examples[0].positives
            chosen = rng.sample(every, min(len(every), 1 if rng.random() < 0.5 else 2))
        return list(dict.fromkeys(chosen))[: max(size // 2, 1)]

    def _shown(self, tool: Tool, rng: random.Random, without_first: float) -> Tool:
        if without_first > 0.5 and not first_sentence(tool.description)[1]:
            without_first *= 0.6  # nothing would be left of it but name and parameters
        return augmented_tool(tool, rng, without_first, self._mixture.augmentation)

    def _wrong(
        self,
        source: Source,
        examples: list[Example],
        positives: list[int],
        excluded: frozenset[int],
        count: int,
        rng: random.Random,
    ) -> dict[int, bool]:
        """`count` tools that do not serve, each with whether that is sure. Without a right tool in the
        group every one is sure as long as there are such."""
        taken: dict[int, bool] = {}
        spare: dict[int, bool] = {}
        right = frozenset(at for example in examples for at in example.positives)
        near = frozenset(at for example in examples for at in example.near.tolist())
        for at in self._candidates(source, examples, positives, rng):
            if at in excluded or at in taken:
                continue
            sure = at not in near and self._is_sure(source, right, at)
            if not sure and not positives:
                spare[at] = False
                continue
            taken[at] = sure
            if len(taken) == count:
                return taken
        taken |= dict(list(spare.items())[: count - len(taken)])
        if len(taken) < count:
            raise DataError(f"set {source.name} has too few tools to give {count} wrong answers")
        return taken

    def _is_sure(self, source: Source, right: frozenset[int], at: int) -> bool:
        """A set whose labels are complete says what is wrong in it, a server's author what differs in it;
        elsewhere a tool that is called alike may serve as well."""
        corpus = self._corpus
        if source.exhaustive and source.first <= at < source.last:
            return True
        if any(corpus.siblings[at] is corpus.siblings[each] for each in right):
            return True
        return not corpus.alike(at, right)

    def _candidates(
        self, source: Source, examples: list[Example], positives: list[int], rng: random.Random
    ) -> Iterator[int]:
        """Wrong answers by kind; after many tries in vain, every tool of the pool once."""
        mixture, corpus = self._mixture, self._corpus
        example = rng.choice(examples)
        lexical, mined = example.hard, example.mined
        weights = (mixture.lexical, mixture.mined, mixture.sibling, mixture.same_set, mixture.any_set)
        for kind in rng.choices(range(5), weights, k=200):
            if kind == 1 and len(mined):
                yield _one(mined, rng)
            elif kind <= 1 and len(lexical):
                yield _one(lexical, rng)
            elif kind == 2:
                near = positives or example.positives
                yield rng.choice(corpus.siblings[rng.choice(near)])
            elif kind == 4:
                yield rng.randrange(len(corpus.tools))
            else:
                yield rng.randrange(source.first, source.last)
        yield from rng.sample(range(len(corpus.tools)), len(corpus.tools))


def _one(ranked: Ranks, rng: random.Random) -> int:
    """One of a ranking, the first ones twice as likely as the last."""
    return int(ranked[int(len(ranked) * rng.random() ** 1.4)])
