"""How a trained model's two readings of a tool become one order and one probability.

The readings are the probability p of the score prompt and the cosine c between the vectors of query
and tool. The order is by `logit(p) + COSINE_WEIGHT * c`, the published score is
`sigmoid(slope * (logit(p) + COSINE_WEIGHT * c) + offset)` (Platt, 1999), which keeps that order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

COSINE_WEIGHT = 10.0
"""Best nDCG@10 on the mean of the dev sets among orders by p alone, by p fused with the candidates' order
and by this sum (.811, .798, .801 at the end of training). Vectors were trained at temperature 0.03, so
a cosine difference of 0.1 is one of 3.3 in their own log odds; here it counts 1.0."""
_LEAST = 1e-12  # of a probability, so that its logit is a number


@dataclass(frozen=True, slots=True)
class Calibration:
    """Constants of one adapter, fitted on training sets; `min_score` is the default threshold.

    The defaults leave the model's own probability as it is, and offer every tool.
    """

    slope: float = 1.0
    offset: float = -COSINE_WEIGHT / 2
    min_score: float = 0.0

    def probability(self, evidence: float) -> float:
        """The published score of a tool with this evidence, from 0 to 1."""
        return 1.0 / (1.0 + math.exp(-max(-700.0, min(700.0, self.slope * evidence + self.offset))))


def evidence(logits: Mapping[int, float], cosines: Mapping[int, float]) -> dict[int, float]:
    """`logit(p) + COSINE_WEIGHT * c` of each of `logits`.

    A tool without a vector yet counts with the mean cosine of the others, so that it neither gains nor
    loses by the lack.
    """
    usual = sum(cosines.values()) / len(cosines) if cosines else 0.0
    return {
        position: value + COSINE_WEIGHT * cosines.get(position, usual) for position, value in logits.items()
    }


def logit(p: float) -> float:
    """log(p / (1 - p)), of a probability kept off 0 and 1."""
    p = max(_LEAST, min(1.0 - _LEAST, p))
    return math.log(p / (1.0 - p))
