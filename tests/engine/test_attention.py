"""Attention over pages against a float64 brute force."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.attention.torch import TorchAttention
from engine.batch import KVCache, StepRow, build_batch
from engine.config import ModelShape

CPU = torch.device("cpu")
LAYERS = 2


@dataclass(frozen=True)
class Case:
    """Rows of (tokens before, new tokens) over pages in random order; row 1 may share row 0's prefix."""

    rows: tuple[tuple[int, int], ...]
    page_tokens: int
    kv_heads: int
    group: int
    head_dim: int
    share: bool
    layer: int
    page_dtype: torch.dtype
    seed: int


cases = st.builds(
    Case,
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=8).map(tuple),
    page_tokens=st.sampled_from([1, 2, 3, 16]),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    head_dim=st.sampled_from([2, 8]),
    share=st.booleans(),
    layer=st.integers(0, LAYERS - 1),
    page_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1 << 30),
)


def brute_force(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention of the last n positions: q [n, heads, D]; keys, values [length, kv_heads, D]."""
    q, keys, values = q.double(), keys.double(), values.double()
    count, heads, width = q.shape
    length, kv_heads, _ = keys.shape
    out = torch.empty_like(q)
    for query in range(count):
        seen = length - count + query + 1
        for head in range(heads):
            shared = head * kv_heads // heads
            scores = keys[:seen, shared] @ q[query, head] / math.sqrt(width)
            weights = (scores - scores.max()).exp()
            out[query, head] = weights @ values[:seen, shared] / weights.sum()
    return out


class Setting:
    """Pages full of NaN but for what came before the step, and the step's own q, k, v."""

    def __init__(self, case: Case) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(case.seed)

        def draw(*size: int) -> Tensor:
            return torch.randn(size, generator=generator)

        needs = [-(-(start + new) // case.page_tokens) for start, new in case.rows]
        order = torch.randperm(sum(needs) + 3, generator=generator).tolist()
        pages = [[order.pop() for _ in range(need)] for need in needs]
        self.history = [draw(start + new, 2, case.kv_heads, case.head_dim) for start, new in case.rows]
        if case.share and len(case.rows) > 1:
            shared = min(case.rows[0][0], case.rows[1][0]) // case.page_tokens
            pages[1][:shared] = pages[0][:shared]
            self.history[1][: shared * case.page_tokens] = self.history[0][: shared * case.page_tokens]
        total = sum(needs) + 3
        data = torch.full((LAYERS, total + 1, 2, case.page_tokens, case.kv_heads, case.head_dim), math.nan)
        self.kv = KVCache(data.to(case.page_dtype))
        for (start, _), own, kept in zip(case.rows, pages, self.history, strict=True):
            for position in range(start):
                page, offset = own[position // case.page_tokens], position % case.page_tokens
                self.kv.data[case.layer, page, :, offset] = kept[position].to(case.page_dtype)
        rows = [
            StepRow(array("i", (0,) * new), start, tuple(own), True)
            for (start, new), own in zip(case.rows, pages, strict=True)
        ]
        self.batch = build_batch(rows, case.page_tokens, CPU)
        heads = case.kv_heads * case.group
        self.q = draw(sum(new for _, new in case.rows), heads, case.head_dim)
        fresh = torch.cat([kept[start:] for (start, _), kept in zip(case.rows, self.history, strict=True)])
        self.k, self.v = fresh[:, 0], fresh[:, 1]
        self.attention = TorchAttention(self.kv, _shape(heads, case.kv_heads, case.head_dim))

    def expected(self) -> Tensor:
        parts, first = [], 0
        for (_, new), kept in zip(self.case.rows, self.history, strict=True):
            stored = kept.to(self.case.page_dtype)
            parts.append(brute_force(self.q[first : first + new], stored[:, 0], stored[:, 1]))
            first += new
        return torch.cat(parts)


def _shape(heads: int, kv_heads: int, head_dim: int) -> ModelShape:
    return ModelShape(
        "llama", LAYERS, heads * head_dim, heads, kv_heads, head_dim, 8, 8, 64, 1e4, 1e-5, True, False
    )


@given(case=cases)
@settings(max_examples=200, deadline=None)
def test_agrees_with_brute_force_and_never_reads_a_poisoned_slot(case: Case) -> None:
    setting = Setting(case)
    setting.attention.plan(setting.batch)
    out = setting.attention(case.layer, setting.q, setting.k, setting.v)
    torch.testing.assert_close(out.double(), setting.expected(), atol=2e-6, rtol=2e-6)


@given(case=cases)
@settings(max_examples=60, deadline=None)
def test_writes_its_own_slots_and_nothing_else(case: Case) -> None:
    setting = Setting(case)
    before = setting.kv.data.clone()
    setting.attention.plan(setting.batch)
    setting.attention(case.layer, setting.q, setting.k, setting.v)
    expected = before
    for token, slot in enumerate(setting.batch.slots.tolist()):
        page, offset = divmod(slot, case.page_tokens)
        expected[case.layer, page, 0, offset] = setting.k[token].to(case.page_dtype)
        expected[case.layer, page, 1, offset] = setting.v[token].to(case.page_dtype)
    assert torch.equal(torch.nan_to_num(setting.kv.data, 7e9), torch.nan_to_num(expected, 7e9))


@given(case=cases, cuts=st.lists(st.integers(1, 9), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_a_prompt_in_slices_equals_the_prompt_at_once(case: Case, cuts: list[int]) -> None:
    length = sum(cuts)
    case = replace(case, rows=((0, length),), share=False, page_dtype=torch.float32)
    whole = Setting(case)
    whole.attention.plan(whole.batch)
    expected = whole.attention(case.layer, whole.q, whole.k, whole.v)
    sliced = Setting(case)
    pages = tuple(sliced.batch.page_ids.tolist())
    start, parts = 0, []
    for cut in cuts:
        rows = [StepRow(array("i", (0,) * cut), start, pages, False)]
        sliced.attention.plan(build_batch(rows, case.page_tokens, CPU))
        now = slice(start, start + cut)
        parts.append(sliced.attention(case.layer, sliced.q[now], sliced.k[now], sliced.v[now]))
        start += cut
    torch.testing.assert_close(torch.cat(parts), expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("rows", [((70, 600),), ((0, 257), (5, 256), (0, 1)), ((700, 1),) * 40])
def test_long_and_many_rows(rows: tuple[tuple[int, int], ...]) -> None:
    case = Case(rows, 16, 1, 2, 8, False, 1, torch.float32, 3)
    setting = Setting(case)
    setting.attention.plan(setting.batch)
    out = setting.attention(case.layer, setting.q, setting.k, setting.v)
    torch.testing.assert_close(out.double(), setting.expected(), atol=5e-6, rtol=5e-6)


def test_activations_and_pages_in_bfloat16() -> None:
    case = Case(((30, 7), (0, 12)), 16, 2, 3, 8, False, 0, torch.bfloat16, 5)
    setting = Setting(case)
    setting.q = setting.q.bfloat16()
    setting.attention.plan(setting.batch)
    out = setting.attention(case.layer, setting.q, setting.k.bfloat16(), setting.v.bfloat16())
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), setting.expected(), atol=2e-2, rtol=2e-2)
