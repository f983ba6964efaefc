"""The losses against a plain reading of their definitions."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from mcp_discovery.training.losses import matching_loss, probability_loss, ranking_loss

LOGITS = torch.randn(5, 6, generator=torch.Generator().manual_seed(0)).double()
RIGHT = torch.zeros(5, 6, dtype=torch.bool)
RIGHT[0, 0] = RIGHT[1, 0] = RIGHT[1, 3] = RIGHT[2, 1] = True
WRONG = ~RIGHT
WRONG[0, 5] = False  # neither
WRONG[2] = False  # nothing to compare with
WRONG[4] = False  # an empty row


def test_each_right_entry_competes_with_the_wrong_ones_of_its_row_alone() -> None:
    rows = []
    for r in (0, 1):  # row 2 has no wrong entry, 3 and 4 no right one
        wrong = [math.exp(LOGITS[r, c]) for c in range(6) if WRONG[r, c]]
        each = [
            -math.log(math.exp(LOGITS[r, c]) / (math.exp(LOGITS[r, c]) + sum(wrong)))
            for c in range(6)
            if RIGHT[r, c]
        ]
        rows.append(sum(each) / len(each))
    assert ranking_loss(LOGITS, RIGHT, WRONG).item() == pytest.approx(sum(rows) / 2)


def test_empty_batches_lose_nothing_and_have_a_gradient() -> None:
    nothing = torch.zeros_like(RIGHT)
    logits = LOGITS.clone().requires_grad_()
    loss = ranking_loss(logits, nothing, nothing) + probability_loss(logits, nothing, nothing)
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None
    assert torch.equal(logits.grad, torch.zeros_like(LOGITS))


def test_gradients_are_finite_where_rows_are_empty() -> None:
    logits = LOGITS.clone().requires_grad_()
    ranking_loss(logits, RIGHT, WRONG).backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


def test_probability_loss_counts_right_and_wrong_alone() -> None:
    counted = RIGHT | WRONG
    expected = functional.binary_cross_entropy(LOGITS.sigmoid()[counted], RIGHT[counted].double())
    assert probability_loss(LOGITS, RIGHT, WRONG).item() == pytest.approx(expected.item())


def test_smoothing_moves_both_labels_towards_each_other() -> None:
    counted = RIGHT | WRONG
    labels = torch.where(RIGHT, 0.9, 0.1).double()[counted]
    expected = functional.binary_cross_entropy(LOGITS.sigmoid()[counted], labels)
    assert probability_loss(LOGITS, RIGHT, WRONG, 0.1).item() == pytest.approx(expected.item())


def test_matching_is_ranking_by_cosine() -> None:
    generator = torch.Generator().manual_seed(1)
    requests, tools = (functional.normalize(torch.randn(n, 8, generator=generator)) for n in (5, 6))
    expected = ranking_loss(requests @ tools.T / 0.03, RIGHT, WRONG)
    assert torch.equal(matching_loss(requests, tools, RIGHT, WRONG, 0.03), expected)
