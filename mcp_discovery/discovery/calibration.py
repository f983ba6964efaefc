"""How a trained model's two readings of a tool become one order and one probability.

The readings are the probability p of the score prompt and the cosine c between the vectors of query
and tool. The order is by `logit(p) + COSINE_WEIGHT * c`, the published score is
`sigmoid(slope * (logit(p) + COSINE_WEIGHT * c) + offset)` (Platt, 1999), which keeps that order.

Whether any tool serves a request is judged by the best candidate, and more by its cosine: requests in
words that the score prompt takes for another subject ("export the movies" of a database) still lie
near their tools. A threshold on each tool's score would lose the second and third tool of a request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

Number = TypeVar("Number", float, NDArray[np.float64])

COSINE_WEIGHT = 10.0
"""Best nDCG@10 on the mean of the dev sets among orders by p alone, by p fused with the candidates' order
and by this sum (.811, .798, .801 at the end of training). Vectors were trained at temperature 0.03, so
a cosine difference of 0.1 is one of 3.3 in their own log odds; here it counts 1.0."""
USUAL_TOOLS = 100
BY_WORDS = 8
_LEAST = 1e-12  # of a probability, so that its logit is a number


@dataclass(frozen=True, slots=True)
class Calibration:
    """Constants of one adapter, fitted on sets that it was not trained on.

    Where no candidate has an `assurance` of at least `bound(tools)`, a request counts as one that no tool
    serves. Assurance is `max(logit(p), doubt_floor) + doubt_weight * c`, and `doubt_words` more for one of
    the first `BY_WORDS` in BM25's order, a witness of its own. The bound grows with the tools in reach: of
    more tools the nearest one is nearer, whether it serves or not. The defaults never doubt.
    """

    slope: float = 1.0
    offset: float = -COSINE_WEIGHT / 2
    doubt_weight: float = 50.0
    doubt_below: float = -1e6  # the bound among `USUAL_TOOLS` tools
    doubt_growth: float = 0.0  # of the bound with each doubling of the tools
    doubt_floor: float = -9.0  # below it the score prompt tells strangers from relatives no better
    doubt_words: float = 0.0

    def probability(self, evidence: Number) -> Number:
        """The published score of a tool with this evidence, from 0 to 1; of many at once by an array."""
        log_odds: Any = _between(-700.0, self.slope * evidence + self.offset, 700.0)
        return cast(Number, 1.0 / (1.0 + np.exp(-log_odds)))

    def doubts(
        self, logits: Mapping[int, float], cosines: Mapping[int, float], by_words: Sequence[int], tools: int
    ) -> bool:
        """Whether no candidate of `tools` in reach seems to serve the request; candidates without a vector
        are not doubted. `by_words` are positions in BM25's order, best first."""
        bound, told = self.bound(tools), frozenset(by_words[:BY_WORDS])
        return all(
            position in cosines and self.assurance(value, cosines[position], position in told) < bound
            for position, value in logits.items()
        )

    def bound(self, tools: int) -> float:
        """What the best candidate's assurance must reach where so many tools are in reach."""
        return self.doubt_below + self.doubt_growth * math.log2(max(tools, 1) / USUAL_TOOLS)

    def assurance(self, logit: float, cosine: float, by_words: bool) -> float:
        """What doubt looks at, of one candidate; `by_words`: whether it is one of the first `BY_WORDS`."""
        return max(logit, self.doubt_floor) + self.doubt_weight * cosine + self.doubt_words * by_words


def evidence(logits: Mapping[int, float], cosines: Mapping[int, float]) -> dict[int, float]:
    """`logit(p) + COSINE_WEIGHT * c` of each of `logits`.

    A tool without a vector yet counts with the mean cosine of the others, so that it neither gains nor
    loses by the lack.
    """
    usual = sum(cosines.values()) / len(cosines) if cosines else 0.0
    return {
        position: value + COSINE_WEIGHT * cosines.get(position, usual) for position, value in logits.items()
    }


def logit(p: Number) -> Number:
    """log(p / (1 - p)), of a probability kept off 0 and 1; of many at once by an array."""
    kept: Any = _between(_LEAST, p, 1.0 - _LEAST)
    return cast(Number, np.log(kept / (1.0 - kept)))


def _between(least: float, value: Any, most: float) -> Any:
    """`np.clip`, which takes three times as long of a few numbers."""
    return np.minimum(np.maximum(value, least), most)
