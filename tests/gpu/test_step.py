"""The captured step against the plain decoder in float32 on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.attention.flashinfer import FlashInferAttention
from engine.attention.torch import TorchAttention
from engine.batch import KVCache, StepRow, build_batch
from engine.config import ModelShape
from engine.cuda.sizes import activation_shapes, buckets
from engine.cuda.staging import Sections
from engine.cuda.step import CapturedSteps, scale_residual
from engine.model import Model, rotary_table
from tests.gpu.conftest import Sequences, empty_pages, random_weights, weights_on

pytestmark = pytest.mark.gpu
PAGES, STEP_TOKENS, STEP_ROWS = 400, 2048, 64


class Reference:
    """Float32 on the CPU, over its own pages."""

    def __init__(self, shape: ModelShape, tensors: dict[str, Tensor]) -> None:
        self._kv = empty_pages(shape, PAGES, torch.float32, "cpu")
        self._model = Model(shape, weights_on(tensors, shape, torch.float32, "cpu"))
        self._attention = TorchAttention(self._kv, shape)

    def run(self, rows: list[StepRow]) -> Tensor:
        with torch.no_grad():
            return self._model.forward(build_batch(rows, 16, torch.device("cpu")), self._attention)


def captured(
    shape: ModelShape,
    tensors: dict[str, Tensor],
    kv_dtype: torch.dtype,
    dtype: torch.dtype = torch.float16,
) -> CapturedSteps:
    weights = weights_on(tensors, shape, dtype, "cuda")
    scale_residual(weights)
    cache = KVCache(empty_pages(shape, PAGES, torch.float32, "cuda").data.to(kv_dtype))
    workspace = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    sections = Sections.of(STEP_TOKENS, STEP_ROWS, STEP_ROWS * 128)
    steps = CapturedSteps(
        shape,
        weights,
        cache,
        FlashInferAttention(cache, shape, dtype, workspace),
        table=rotary_table(shape, shape.context, torch.device("cuda")),
        activations={
            name: torch.zeros(size, dtype=dtype, device="cuda")
            for name, size in activation_shapes(shape, STEP_TOKENS, STEP_ROWS).items()
        },
        staging=torch.zeros(sections.end, dtype=torch.int32, device="cuda"),
        sections=sections,
        sizes=buckets(STEP_TOKENS, STEP_ROWS, shape.heads // shape.kv_heads),
        stream=torch.cuda.Stream(),
    )
    steps.warm_up()
    steps.capture(torch.cuda.graph_pool_handle())
    return steps


def run(steps: CapturedSteps, rows: list[StepRow], turn: int) -> Tensor:
    hidden = steps.launch(rows, turn)
    torch.cuda.synchronize()  # the step runs on a stream of its own
    return hidden.clone()


def error(got: Tensor, expected: Tensor) -> float:
    got = got.float().cpu()
    assert torch.isfinite(got).all()
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "limit"),
    [
        (torch.float16, torch.float16, 0.004),
        (torch.bfloat16, torch.bfloat16, 0.02),
        (torch.float16, torch.float8_e4m3fn, 0.12),
    ],
    ids=["fp16", "bf16", "fp8"],
)
def test_prefill_slices_and_decode_agree_with_the_reference(
    shape: ModelShape, dtype: torch.dtype, kv_dtype: torch.dtype, limit: float
) -> None:
    tensors = random_weights(shape)
    lengths = [1, 2, 16, 17, 40, 96, 130, 333, 601]
    sequences = Sequences.random(lengths, shape.vocabulary, PAGES, seed=1)
    reference, steps = Reference(shape, tensors), captured(shape, tensors, kv_dtype, dtype)
    plans = [
        [(s, 0, max(1, length // 2)) for s, length in enumerate(lengths)],
        [(s, max(1, n // 2), n - 1) for s, n in enumerate(lengths) if n - 1 > max(1, n // 2)],
        [(s, n - 1, n) for s, n in enumerate(lengths) if n > 2],
    ]
    for turn, plan in enumerate(plans):
        rows = sequences.rows(plan)
        assert error(run(steps, rows, turn % 2), reference.run(rows)) < limit


def test_a_row_does_not_depend_on_what_shares_its_step(shape: ModelShape) -> None:
    tensors = random_weights(shape)
    steps = captured(shape, tensors, torch.float16)
    sequences = Sequences.random([90] * 20, shape.vocabulary, PAGES, seed=2)
    together = run(steps, sequences.rows([(s, 0, 90) for s in range(20)]), 0)
    for s in (0, 7, 19):
        alone = run(steps, sequences.rows([(s, 0, 90)]), 1)
        assert error(alone, together[s : s + 1].float().cpu()) < 0.01


def test_poisoned_pages_of_others_change_nothing(shape: ModelShape) -> None:
    tensors = random_weights(shape)
    steps = captured(shape, tensors, torch.float16)
    sequences = Sequences.random([50, 33], shape.vocabulary, PAGES, seed=3)
    clean = run(steps, sequences.rows([(0, 0, 50), (1, 0, 33)]), 0)
    own = {page for table in sequences.pages for page in table}
    others = [page for page in range(PAGES) if page not in own]
    steps._kv.data[:, others] = float("nan")
    again = run(steps, sequences.rows([(0, 0, 50), (1, 0, 33)]), 1)
    assert torch.equal(clean, again)
