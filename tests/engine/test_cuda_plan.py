"""Plan, admission and staging for a card, on a machine without one: the probe says what it is told."""

from __future__ import annotations

from array import array
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.flashinfer import int_workspace_bytes, query_tile, query_tiles
from engine.batch import Part, StepBlock, StepRow, build_batch, single_rows
from engine.config import EngineConfig, ModelShape
from engine.cuda import admission
from engine.cuda.admission import (
    MEASURED_LINES,
    admit,
    admit_graphs,
    held_bytes,
    out_of_memory,
    torch_bytes,
)
from engine.cuda.costs import CardConstants, CudaCosts, shipped_constants
from engine.cuda.nvml import CardMemory
from engine.cuda.sizes import Bucket, buckets
from engine.cuda.staging import FlatStep, Sections, fill
from engine.errors import LoadRefused
from engine.memory import MIB, MemoryPlan, allocate_at_once, plan_memory

SMOLLM2 = ModelShape(
    architecture="llama", layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, intermediate=1536,
    vocabulary=49_152, context=8192, rope_theta=1e5, norm_eps=1e-5, tied_embeddings=True, qk_norm=False,
)  # fmt: skip
QWEN3 = ModelShape(
    architecture="qwen3", layers=28, hidden=1024, heads=16, kv_heads=8, head_dim=128, intermediate=3072,
    vocabulary=151_936, context=4096, rope_theta=1e6, norm_eps=1e-6, tied_embeddings=True, qk_norm=True,
)  # fmt: skip
CONSTANTS = CardConstants(527.0, 230.0, 16.0, "told by the test")


def planned(config: EngineConfig, shape: ModelShape = SMOLLM2) -> MemoryPlan:
    return plan_memory(shape, config, CudaCosts(CONSTANTS))


def card(free_mib: int) -> CardMemory:
    return CardMemory("NVIDIA H200", "580", total=143_771 * MIB, free=free_mib * MIB)


@pytest.mark.parametrize("shape", [SMOLLM2, QWEN3], ids=["smollm2", "qwen3"])
def test_a_plan_stays_within_its_allowance_and_leaves_less_than_a_page(shape: ModelShape) -> None:
    plan = planned(EngineConfig(), shape)
    assert plan.total <= 2740 * MIB < plan.total + plan.page_bytes
    assert plan.pages > 200
    assert {"CUDA context", "modules", "graphs", "guard", "weights", "pages"} <= {x.name for x in plan.lines}


def test_fp8_pages_are_twice_as_many() -> None:
    half, full = planned(EngineConfig(kv_dtype="fp8_e4m3")), planned(EngineConfig())
    assert abs(half.pages - 2 * full.pages) <= 2


def test_an_allowance_too_small_is_refused_with_the_shortfall() -> None:
    with pytest.raises(LoadRefused) as refused:
        planned(EngineConfig(allowance_mib=1000))
    assert refused.value.short_mib > 0
    assert f"{refused.value.short_mib:,} MiB short" in str(refused.value)
    enough = planned(EngineConfig(allowance_mib=1000 + refused.value.short_mib))
    assert enough.pages >= 1
    with pytest.raises(LoadRefused):
        planned(EngineConfig(allowance_mib=999 + refused.value.short_mib))


@pytest.mark.parametrize(("free", "short"), [(2739, 1), (2000, 740), (0, 2740)])
def test_a_card_with_less_free_is_refused_by_the_exact_shortfall(free: int, short: int) -> None:
    with pytest.raises(LoadRefused) as refused:
        admit(planned(EngineConfig()), card(free), held=0)
    assert (refused.value.needed_mib, refused.value.free_mib, refused.value.short_mib) == (2740, free, short)
    assert f"{short:,} MiB short" in str(refused.value)


@pytest.mark.parametrize("free", [2740, 2900])
def test_a_card_with_the_whole_allowance_free_is_admitted(free: int) -> None:
    admit(planned(EngineConfig()), card(free), held=0)


def test_what_the_process_holds_already_is_not_asked_for_twice() -> None:
    plan, context = planned(EngineConfig()), 527 * MIB
    admit(plan, card(2740 - 527), held=context)
    with pytest.raises(LoadRefused) as refused:
        admit(plan, card(2740 - 528), held=context)
    assert refused.value.short_mib == 1


@pytest.mark.parametrize(("listed", "held"), [(900 * MIB, 900), (None, 527 + 40)])
def test_a_process_that_has_a_context_holds_it_whether_nvml_lists_the_process_or_not(
    monkeypatch: pytest.MonkeyPatch, listed: int | None, held: int
) -> None:
    plan = planned(EngineConfig())
    monkeypatch.setattr(admission, "process_bytes", lambda pid: listed)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 40 * MIB)
    assert held_bytes(plan) == 0
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert held_bytes(plan) == held * MIB


def test_torch_is_held_to_the_plan_less_what_is_not_torchs() -> None:
    plan = planned(EngineConfig())
    others = sum(line.bytes for line in plan.lines if line.name in (*MEASURED_LINES, "guard"))
    assert torch_bytes(plan) == plan.total - others


def test_captures_are_refused_where_they_would_run_out_of_memory() -> None:
    """An exactly full allowance still leaves what the plan counts for graphs."""
    plan = planned(EngineConfig())
    cap, graphs = torch_bytes(plan), 16 * MIB
    admit_graphs(plan, reserved=cap - 2 * MIB, cap=cap, free=graphs)
    with pytest.raises(LoadRefused, match="need 1 MiB more"):
        admit_graphs(plan, reserved=cap - 2 * MIB, cap=cap, free=graphs - 1)
    with pytest.raises(LoadRefused, match="need 1 MiB more"):
        admit_graphs(plan, reserved=cap - 2 * MIB + 1, cap=cap, free=graphs)


def test_the_lines_of_a_plan_are_one_allocation() -> None:
    plan = planned(EngineConfig(max_pages=2, step_tokens=64, step_rows=8))
    allocation = allocate_at_once(plan, torch.device("cpu"))
    spans = []
    for line in plan.lines:
        if line.dtype:
            tensor = allocation.tensors[line.name]
            assert tuple(tensor.shape) == line.shape
            assert tensor.numel() * tensor.element_size() == line.bytes
            spans.append((tensor.data_ptr(), tensor.data_ptr() + line.bytes))
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert len({t.untyped_storage().data_ptr() for t in allocation.tensors.values()}) == 1


def test_constants_of_an_unmeasured_card_are_refused_by_name() -> None:
    with pytest.raises(LoadRefused, match="no memory constants were measured for Some Card"):
        shipped_constants("Some Card", "1", "2")
    assert shipped_constants("NVIDIA H200", "other", "other").context_mib > 500


def test_the_default_plan_of_the_embedded_model_on_an_h200() -> None:
    constants = shipped_constants("NVIDIA H200", "580.159.04", "2.11.0+cu130")
    assert (constants.context_mib, constants.modules_mib, constants.graphs_mib) == (527.0, 230.0, 16.0)
    plans = [
        plan_memory(SMOLLM2, EngineConfig(kv_dtype=kv), CudaCosts(constants)) for kv in ("auto", "fp8_e4m3")
    ]
    assert [plan.pages for plan in plans] == [4355, 8711]


def block(rows: list[StepRow]) -> StepBlock:
    """Rows as one block, which has of each exactly the pages that its tokens fill."""
    used = [row.pages[: -(-(row.start + len(row.tokens)) // 16)] for row in rows]
    return StepBlock(
        tokens=array("i", [token for row in rows for token in row.tokens]),
        counts=array("i", [len(row.tokens) for row in rows]),
        starts=array("i", [row.start for row in rows]),
        pages=array("i", [page for pages in used for page in pages]),
        page_counts=array("i", map(len, used)),
    )


rows_of_steps = st.lists(
    st.tuples(st.integers(1, 60), st.integers(0, 80), st.booleans()), min_size=1, max_size=20
)


@given(rows_of_steps, st.integers(0, 2**32 - 1))
def test_staging_holds_what_a_batch_holds_and_its_padding_touches_nobody(
    drawn: list[tuple[int, int, bool]], seed: int
) -> None:
    source = np.random.default_rng(seed)
    parts: list[Part] = []
    for count, start, output in drawn:
        pages = tuple(int(page) for page in source.permutation(500)[: -(-(start + count) // 16) + 1])
        row = StepRow(array("i", source.integers(1, 9000, count).tolist()), start, pages, output)
        parts.append(block([row, row]) if output and count % 3 == 0 else row)
    rows = single_rows(parts)
    total = sum(len(row.tokens) for row in rows)
    bucket = Bucket(total + 7, len(rows) + 3, total + 7)
    at = Sections.of(total + 7, len(rows) + 3, 4000)
    out = np.full(at.end, -1, dtype=np.int32)
    used = fill(out, at, FlatStep.of(parts, 16), bucket, 16, scratch_page=500)
    batch = build_batch(rows, 16, torch.device("cpu"))

    def part(start: int, size: int) -> list[int]:
        return [int(value) for value in out[start : start + size]]

    assert part(at.tokens, total) == batch.tokens.tolist()
    assert part(at.positions, total) == batch.positions.tolist()
    assert part(at.slots, total) == batch.slots.tolist()
    assert part(at.outputs, batch.outputs.numel()) == batch.outputs.tolist()
    assert part(at.query_starts, len(rows) + 1) == batch.query_starts.tolist()
    assert part(at.page_starts, len(rows) + 1) == batch.page_starts.tolist()
    assert part(at.lengths, len(rows)) == batch.lengths.tolist()
    assert part(at.last_page, len(rows)) == ((batch.lengths - 1) % 16 + 1).tolist()
    assert part(at.page_ids, batch.page_ids.numel()) == batch.page_ids.tolist()
    assert used == at.page_ids + batch.page_ids.numel()
    assert set(part(at.slots + total, 7)) == {500 * 16}
    assert part(at.lengths + len(rows), 3) == [0, 0, 0]
    assert set(part(at.query_starts + len(rows), 4)) == {total}


@pytest.mark.parametrize("page_tokens", [1, 16])
def test_as_many_rows_as_a_step_may_have_share_a_prefix_as_long_as_the_context(page_tokens: int) -> None:
    config = EngineConfig(page_tokens=page_tokens)
    costs = CudaCosts(CONSTANTS)
    at, bucket = costs.sections(SMOLLM2, config), costs.sizes(SMOLLM2, config)[-1]
    rows, pages = config.step_rows, SMOLLM2.context // page_tokens
    step = StepBlock(
        tokens=array("i", [7] * rows),
        counts=array("i", [1] * rows),
        starts=array("i", [SMOLLM2.context - 1] * rows),
        pages=array("i", range(pages)) * rows,
        page_counts=array("i", [pages] * rows),
    )
    out = np.zeros(at.end, np.int32)
    used = fill(out, at, FlatStep.of([step], page_tokens), bucket, page_tokens, scratch_page=pages)
    assert used == at.page_ids + rows * pages <= at.end
    assert out[at.page_ids : used].reshape(rows, pages).tolist() == [list(range(pages))] * rows


@given(st.integers(1, 8), st.lists(st.integers(1, 300), min_size=1, max_size=60))
def test_a_captured_size_has_a_tile_for_every_query_that_fits_it(group: int, lengths: list[int]) -> None:
    """The bound of FlashInfer's plan, against a count of the tiles that rows of these lengths need."""
    for bucket in buckets(8192, 512, group):
        if sum(lengths) > bucket.tokens or len(lengths) >= bucket.rows:
            continue
        tile = query_tile(bucket.plan_tokens, bucket.rows, group)
        needed = sum(-(-length * group // tile) for length in lengths)
        assert bucket.plan_tokens < bucket.tokens or needed <= bucket.tiles(group)
        tiles = query_tiles(bucket.plan_tokens, bucket.rows, group)
        assert int_workspace_bytes(bucket.plan_tokens, bucket.rows, group) >= 12 * tiles + 4 * bucket.rows


def test_every_step_within_the_limits_fits_a_captured_size() -> None:
    largest = max(buckets(8192, 512, 3))
    assert (largest.tokens, largest.rows) == (8192, 513)
    assert largest.tiles(3) >= 8192 * 3 // 128 + 512


@pytest.mark.parametrize(
    ("free_mib", "message"),
    [(900, "something else took what was free"), (140_000, "more than the plan of 2,740 MiB has")],
)
def test_memory_that_runs_out_in_a_load_is_told_by_who_has_the_rest(free_mib: int, message: str) -> None:
    refused = out_of_memory(2740, free_mib, "CUDA out of memory. Tried to allocate 298.00 MiB. GPU 0 has")
    assert message in str(refused)
    assert "298.00 MiB more" in str(refused)
    assert (refused.needed_mib, refused.free_mib) == (2740, free_mib)
