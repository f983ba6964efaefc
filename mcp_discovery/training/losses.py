"""What training minimises: the right tool above the wrong ones, by score and by vector."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def ranking_loss(logits: Tensor, right: Tensor, wrong: Tensor) -> Tensor:
    """Mean over rows of the cross-entropy of each right entry against all wrong ones of its row.

    logits float32 [R, C]; right, wrong bool [R, C]. Right entries of one row do not compete; a row
    without a right or without a wrong entry counts nothing.
    """
    against = torch.logsumexp(logits.masked_fill(~wrong, -1e9), dim=1, keepdim=True)
    each = functional.softplus(against - logits)
    counted = right & wrong.any(1, keepdim=True)
    per_row = each.masked_fill(~counted, 0.0).sum(1) / counted.sum(1).clamp(min=1)
    return per_row.sum() / counted.any(1).sum().clamp(min=1)


def probability_loss(evidence: Tensor, right: Tensor, wrong: Tensor, smoothing: float = 0.0) -> Tensor:
    """Binary cross-entropy of `sigmoid(evidence)` over right and wrong entries; labels are 1 - s and s
    for a smoothing of s."""
    labels = right.to(evidence.dtype) * (1.0 - 2.0 * smoothing) + smoothing
    each = functional.binary_cross_entropy_with_logits(evidence, labels, reduction="none")
    counted = right | wrong
    return each.masked_fill(~counted, 0.0).sum() / counted.sum().clamp(min=1)


def matching_loss(
    requests: Tensor, tools: Tensor, right: Tensor, wrong: Tensor, temperature: float
) -> Tensor:
    """`ranking_loss` of cosines over the temperature. requests [Q, d], tools [N, d]: unit length."""
    return ranking_loss(requests @ tools.T / temperature, right, wrong)
