"""The plan adds up, is what is allocated, and refuses by the exact shortfall."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig, ModelShape
from engine.errors import LoadRefused
from engine.memory import (
    MIB,
    CPUCosts,
    MemoryLine,
    allocate,
    allocate_at_once,
    plan_memory,
    resident_bytes,
)
from engine.model_files import weight_tensors
from tests.engine.conftest import TINY

SMOLLM2 = ModelShape(
    architecture="llama",
    layers=30,
    hidden=576,
    heads=9,
    kv_heads=3,
    head_dim=64,
    intermediate=1536,
    vocabulary=49_152,
    context=8192,
    rope_theta=100_000.0,
    norm_eps=1e-5,
    tied_embeddings=True,
    qk_norm=False,
)
COSTS = CPUCosts(process_bytes=400 * MIB)


def line(plan: object, name: str) -> MemoryLine:
    return next(each for each in plan.lines if each.name == name)  # type: ignore[attr-defined]


@given(
    allowance=st.integers(1700, 8000),
    page_tokens=st.sampled_from((1, 8, 16, 64)),
    kv=st.sampled_from(("auto", "float32", "bfloat16")),
    step=st.one_of(st.none(), st.integers(1, 2048)),
)
def test_pages_are_all_of_the_rest(allowance: int, page_tokens: int, kv: str, step: int | None) -> None:
    config = EngineConfig(allowance_mib=allowance, page_tokens=page_tokens, kv_dtype=kv, step_tokens=step)  # type: ignore[arg-type]
    plan = plan_memory(SMOLLM2, config, COSTS)
    assert plan.total == sum(each.bytes for each in plan.lines)
    assert allowance * MIB - plan.page_bytes < plan.total <= allowance * MIB
    assert plan.page_bytes == page_tokens * SMOLLM2.kv_bytes_per_token(2 if kv == "bfloat16" else 4)
    assert line(plan, "pages").bytes == (plan.pages + 1) * plan.page_bytes
    for each in plan.lines:
        if each.dtype:
            assert each.bytes == math.prod(each.shape) * getattr(torch, each.dtype).itemsize


def test_a_page_of_the_embedded_model_is_360_kib_in_bfloat16() -> None:
    plan = plan_memory(SMOLLM2, EngineConfig(kv_dtype="bfloat16"), COSTS)
    assert plan.page_bytes == 360 << 10
    assert line(plan, "weights").bytes == pytest.approx(134_515_008 * 4, rel=1e-4)


def test_an_allowance_too_small_is_refused_by_the_exact_shortfall() -> None:
    config = EngineConfig(allowance_mib=100)
    with pytest.raises(LoadRefused) as caught:
        plan_memory(SMOLLM2, config, COSTS)
    needed = caught.value.needed_mib
    assert caught.value.short_mib == needed - 100
    assert f"{needed - 100:,} MiB short" in str(caught.value)
    assert plan_memory(SMOLLM2, replace(config, allowance_mib=needed), COSTS).pages >= 1
    with pytest.raises(LoadRefused):
        plan_memory(SMOLLM2, replace(config, allowance_mib=needed - 1), COSTS)


def test_what_serving_takes_is_a_line_and_costs_pages() -> None:
    plan = plan_memory(SMOLLM2, EngineConfig(serving_mib=128), COSTS)
    without = plan_memory(SMOLLM2, EngineConfig(), COSTS)
    assert line(plan, "serving").bytes == 128 * MIB
    assert line(without, "serving").bytes == 0
    fewer = without.pages - plan.pages
    assert (fewer - 1) * plan.page_bytes < 128 * MIB < (fewer + 1) * plan.page_bytes
    assert plan.total <= plan.allowance


def test_kernels_of_products_are_a_line_where_they_are_kept() -> None:
    plan = plan_memory(SMOLLM2, EngineConfig(dtype="bfloat16"), COSTS)
    assert line(plan, "kernels").bytes == 16 * 4 * (704 << 10)  # 512 tokens in multiples of 32 rows
    assert line(plan_memory(SMOLLM2, EngineConfig(dtype="float32"), COSTS), "kernels").bytes == 0


def test_fewer_pages_where_asked() -> None:
    plan = plan_memory(SMOLLM2, EngineConfig(max_pages=7), COSTS)
    assert (plan.pages, line(plan, "pages").shape[1]) == (7, 8)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("make", [allocate, allocate_at_once])
def test_the_allocation_is_the_plan(architecture: str, make: object) -> None:
    shape = TINY[architecture]
    plan = plan_memory(shape, EngineConfig(max_pages=5), COSTS)
    allocation = make(plan, torch.device("cpu"))  # type: ignore[operator]
    named = {each.name: each for each in plan.lines if each.dtype}
    assert set(allocation.tensors) == set(named)
    for name, tensor in allocation.tensors.items():
        assert tuple(tensor.shape) == named[name].shape
        assert tensor.nbytes == named[name].bytes
    assert not allocation.tensors["pages"].any()
    assert allocation.kv.pages == plan.pages
    views = allocation.weights(shape)
    assert {name: tuple(view.shape) for name, view in views.items()} == dict(weight_tensors(shape))
    for number, view in enumerate(views.values()):
        view.fill_(number + 1)
    assert all((view == number + 1).all() for number, view in enumerate(views.values())), "weights overlap"
    starts = [view.data_ptr() - allocation.tensors["weights"].data_ptr() for view in views.values()]
    assert all(start % 256 == 0 for start in starts)


def test_the_table_names_every_line_and_its_reason() -> None:
    plan = plan_memory(SMOLLM2, EngineConfig(), COSTS)
    table = plan.table()
    assert all(each.name in table and each.why in table for each in plan.lines)
    assert "2,740" in table.splitlines()[-1]


def test_the_process_is_measured() -> None:
    assert resident_bytes() > 50 * MIB
