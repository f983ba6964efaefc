"""Whether an answer given under load is the answer to its own query.

A reference is what the query gets alone, in float32 on a CPU (`benchmarks.references`). Under load the
arithmetic may differ, by a little and in a known way: every score may be off by less than a tolerance,
so that tools whose scores lie closer may change places, also across the end of the list. Anything
else is somebody else's answer, or an answer computed from somebody else's pages.

Scores are compared as log odds, in which the noise of a model's outputs is about the same everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcp_discovery.discovery.calibration import logit


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Most that arithmetic may make of a difference.

    `log_odds` is of a score and of the distance of two; `doubt` of the assurance by which the server
    judges whether any tool serves a request. In bfloat16 on a CPU 0.06 and 0.13 were the most that was
    seen in 8 queries against all tools; pages in eight bits are coarser.
    """

    log_odds: float = 0.25
    doubt: float = 1.0

    def agree(self, one: float, other: float) -> bool:
        """Of two scores, from 0 to 1."""
        return abs(logit(one) - logit(other)) <= self.log_odds

    def exceeds(self, one: float, other: float) -> bool:
        """Whether the first score is above the second beyond doubt."""
        return logit(one) - logit(other) > self.log_odds


@dataclass(frozen=True, slots=True)
class Reference:
    """The answer to a query alone, best tool first.

    `tools` has every tool that may be among the first `limit`: the best `limit` of those that are
    candidates for certain, and above the last of these also the `uncertain` ones, which the slightest
    change of a vector makes candidates or not. Whatever is not listed has a score of at most the last.
    The first `named` are named by the query and always offered. `assurance` is by how much the best
    candidate is above doubt; below 0 nothing else is offered unless the call sets `min_score`. None:
    the server's model does not doubt.
    """

    tools: tuple[str, ...]
    scores: tuple[float, ...]
    limit: int
    uncertain: frozenset[str] = frozenset()
    assurance: float | None = None
    named: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether there is no further tool to be offered."""
        return len(self.tools) - len(self.uncertain) < self.limit


@dataclass(frozen=True, slots=True)
class Answer:
    """The tools of an answer, best first, and what was asked for besides the query."""

    tools: tuple[str, ...]
    scores: tuple[float, ...]
    limit: int
    min_score: float | None = None

    @classmethod
    def of(cls, result: Mapping[str, Any], limit: int, min_score: float | None = None) -> Answer:
        """From the structured content of an answer to `discover_tools`."""
        found = result["tools"]
        tools, scores = (tuple(each[key] for each in found) for key in ("id", "score"))
        return cls(tools, scores, limit, min_score)


@dataclass(frozen=True, slots=True)
class Verdict:
    """`sentence` says what is wrong; it is empty where the answer is clean."""

    sentence: str = ""

    @property
    def clean(self) -> bool:
        return not self.sentence


def compare(reference: Reference, answer: Answer, tolerance: Tolerance) -> Verdict:
    """Whether `answer` differs from its reference by no more than arithmetic.

    Raises ValueError where the answer was asked with a larger limit than the reference.
    """
    if answer.limit > reference.limit:
        raise ValueError(f"the answer has limit {answer.limit}, its reference only {reference.limit}")
    checks = (_form, _doubt, _offered, _missing, _order)
    return Verdict(next((wrong for check in checks if (wrong := check(reference, answer, tolerance))), ""))


def answer_of(reference: Reference, limit: int) -> Answer:
    """The answer that a server which computes just as the reference gives to its query."""
    pairs = [
        (tool, round(score, 4))
        for tool, score in zip(reference.tools, reference.scores, strict=True)
        if tool not in reference.uncertain
    ][:limit]
    if reference.assurance is not None and reference.assurance < 0.0:
        pairs = pairs[: reference.named]
    return Answer(tuple(tool for tool, _ in pairs), tuple(score for _, score in pairs), limit)


def indistinguishable(
    references: Sequence[Reference], limit: int, tolerance: Tolerance, *, pairs: int = 100_000, seed: int = 0
) -> float:
    """The share of pairs of queries whose answers could be swapped unnoticed, of a random sample of
    `pairs`; of all pairs where these are fewer. 0.0 for fewer than two queries."""
    count = len(references)
    if count < 2:
        return 0.0
    answers = [answer_of(reference, limit) for reference in references]
    if count * (count - 1) // 2 <= pairs:
        sample = [(i, j) for i in range(count) for j in range(i)]
    else:
        rng = random.Random(seed)
        sample = [tuple(rng.sample(range(count), 2)) for _ in range(pairs)]  # type: ignore[misc]
    unnoticed = sum(
        compare(references[i], answers[j], tolerance).clean
        and compare(references[j], answers[i], tolerance).clean
        for i, j in sample
    )
    return unnoticed / len(sample)


def _form(reference: Reference, answer: Answer, tolerance: Tolerance) -> str:
    if len(answer.tools) > max(answer.limit, reference.named):
        return f"It has {len(answer.tools)} tools, {answer.limit} were asked for."
    if len(set(answer.tools)) < len(answer.tools):
        return "It offers a tool twice."
    if list(answer.scores) != sorted(answer.scores, reverse=True):
        return "Its tools are not in the order of their scores."
    return ""


def _doubt(reference: Reference, answer: Answer, tolerance: Tolerance) -> str:
    if answer.min_score is not None or reference.assurance is None:
        return ""
    if len(answer.tools) > reference.named and reference.assurance < -tolerance.doubt:
        return "It offers tools for a request that no tool serves."
    return ""


def _offered(reference: Reference, answer: Answer, tolerance: Tolerance) -> str:
    """Every tool offered has the score it should have."""
    known = dict(zip(reference.tools, reference.scores, strict=True))
    for tool, score in zip(answer.tools, answer.scores, strict=True):
        if tool in known:
            if not tolerance.agree(score, known[tool]):
                return f"It gives {tool} {score:.4f}, alone it gets {known[tool]:.4f}."
        elif reference.is_complete or tolerance.exceeds(score, reference.scores[-1]):
            return f"It offers {tool} with {score:.4f}, which alone is not among the first {reference.limit}."
    return ""


def _missing(reference: Reference, answer: Answer, tolerance: Tolerance) -> str:
    """Every tool not offered has lost its place to tools that are as good, or is below the threshold."""
    due = reference.tools
    if len(answer.tools) <= reference.named and answer.min_score is None and _may_doubt(reference, tolerance):
        due = due[: reference.named]
    least = min(answer.scores, default=0.0) if len(answer.tools) >= answer.limit else 0.0
    least = max(least, answer.min_score or 0.0)
    for tool, score in zip(due, reference.scores, strict=False):
        if tool in answer.tools or tool in reference.uncertain:
            continue
        if tolerance.exceeds(score, least):
            return f"It lacks {tool}, which alone gets {score:.4f}."
    return ""


def _may_doubt(reference: Reference, tolerance: Tolerance) -> bool:
    return reference.assurance is not None and reference.assurance <= tolerance.doubt


def _order(reference: Reference, answer: Answer, tolerance: Tolerance) -> str:
    """No tool stands behind one that alone is worse beyond doubt."""
    known = dict(zip(reference.tools, reference.scores, strict=True))
    worst: tuple[str, float] | None = None
    for tool in answer.tools:
        score = known.get(tool)
        if score is None:
            continue
        if worst is not None and tolerance.exceeds(score, worst[1]):
            return f"It has {tool} behind {worst[0]}, alone they get {score:.4f} and {worst[1]:.4f}."
        if worst is None or score < worst[1]:
            worst = (tool, score)
    return ""
