"""The choice of the next token: greedy, sampled with a seed, or among allowed tokens. Pure functions."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.errors import EngineFault


def greedy(logits: Tensor) -> Tensor:
    """The likeliest token of each row: logits [..., vocabulary] -> int64 [...]."""
    return logits.argmax(dim=-1)


def choose(
    logits: Tensor,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    index: int = 0,
    allowed: Sequence[int] | None = None,
) -> int:
    """The next token of one row of logits [vocabulary], among the ids `allowed` where given.

    Greedy at temperature 0, else drawn from softmax(logits / temperature). `index` counts the tokens
    of the output so far: (seed, index) alone fix the draw, not the row's place in a batch or its
    arrival. Raises ValueError where `allowed` is empty or not of the vocabulary, or the temperature
    is negative; EngineFault where a logit that counts is not a number.
    """
    if temperature < 0.0:
        raise ValueError(f"temperature must not be negative, it is {temperature}")
    ids = _ids(allowed, logits.shape[0])
    open_logits = logits if ids is None else logits[ids.to(logits.device)]
    if not open_logits.max().isfinite():
        raise EngineFault("the model's logits are not finite; its weights or pages are damaged")
    place = _draw(open_logits, temperature, seed, index) if temperature else int(greedy(open_logits))
    return place if ids is None else int(ids[place])


def _ids(allowed: Sequence[int] | None, vocabulary: int) -> Tensor | None:
    if allowed is None:
        return None
    if not allowed:
        raise ValueError("a constraint allows no token")
    ids = torch.tensor(sorted(allowed), dtype=torch.int64)
    if ids[0] < 0 or ids[-1] >= vocabulary:
        raise ValueError(f"a constraint allows a token outside the vocabulary of {vocabulary}")
    return ids


def _draw(logits: Tensor, temperature: float, seed: int, index: int) -> int:
    """Inverse transform sampling: where the cumulative probability passes one uniform number."""
    weights = torch.softmax(logits.double().cpu() / temperature, dim=-1)
    cumulative = weights.cumsum(dim=-1)
    mark = uniform(seed, index) * cumulative[-1]
    return min(int(torch.searchsorted(cumulative, mark, right=True)), logits.shape[0] - 1)


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that depends on (seed, index) alone: 53 bits of a hash of the two."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) * 2.0**-53
