"""Which tools the model scores: orders fused by reciprocal rank, then filled up.

Reciprocal rank fusion (Cormack, Clarke and Buettcher, 2009): a tool's weight is the sum over the
orders that hold it of 1 / (k + rank), ranks from 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mcp_discovery.discovery.lexical import Mask

RANK_CONSTANT = 20.0


def fuse(
    orders: Sequence[Sequence[int]], weights: Sequence[float] | None = None, k: float = RANK_CONSTANT
) -> list[int]:
    """Positions of all `orders`, best first; equal weights keep catalogue order."""
    votes: dict[int, float] = {}
    for order, weight in zip(orders, weights or [1.0] * len(orders), strict=True):
        for rank, position in enumerate(order, start=1):
            votes[position] = votes.get(position, 0.0) + weight / (k + rank)
    return sorted(sorted(votes), key=votes.__getitem__, reverse=True)  # equal ones stay in order


def choose(orders: Sequence[Sequence[int]], mask: Mask, wanted: int) -> list[int]:
    """`wanted` positions inside `mask`, fewer where it shows fewer.

    Where the orders hold fewer, further tools follow in catalogue order, so that a request which
    shares no word with the right tool still has a chance in a small catalogue.
    """
    chosen = list(orders[0] if len(orders) == 1 else fuse(orders))[:wanted]
    if len(chosen) < wanted:
        rest = mask.copy()
        rest[chosen] = False
        chosen += (int(position) for position in np.flatnonzero(rest)[: wanted - len(chosen)])
    return chosen
