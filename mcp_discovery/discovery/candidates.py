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
    """Positions of all `orders`, which hold each once, best first; equal weights keep catalogue order."""
    arrays = [np.asarray(order, dtype=np.intp) for order in orders]
    votes = np.zeros(max((int(array.max()) + 1 for array in arrays if len(array)), default=0))
    held = np.zeros(len(votes), dtype=bool)
    for array, weight in zip(arrays, weights or [1.0] * len(arrays), strict=True):
        votes[array] += weight / np.arange(k + 1, k + 1 + len(array))
        held[array] = True
    found = np.flatnonzero(held)
    best: list[int] = found[np.argsort(-votes[found], kind="stable")].tolist()
    return best


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
