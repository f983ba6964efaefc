"""The training pass is the engine's arithmetic, and an adapter is trained on the weights it will make."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.config import ModelShape
from engine.model import Model
from engine.model_files import weight_tensors
from engine.weights import Weights, load_weights, read_adapter
from mcp_discovery.training.batches import Layout
from mcp_discovery.training.forward import Decoder, attend
from mcp_discovery.training.lora import MATRICES, Base, LoRA, adapter_bytes, kept_rows

CPU = torch.device("cpu")
LAYOUT = Layout.of([(3, 5), (2, 9)])


def make_shape(architecture: str) -> ModelShape:
    return ModelShape(
        architecture=architecture,
        layers=2,
        hidden=24,
        heads=4,
        kv_heads=2,
        head_dim=8,
        intermediate=40,
        vocabulary=61,
        context=64,
        rope_theta=10_000.0,
        norm_eps=1e-5,
        tied_embeddings=True,
        qk_norm=architecture == "qwen3",
    )


def make_weights(shape: ModelShape) -> Weights:
    generator = torch.Generator().manual_seed(1)
    drawn = {name: torch.randn(size, generator=generator) for name, size in weight_tensors(shape)}
    tensors = {name: x * x.shape[-1] ** -0.5 if x.dim() > 1 else 1 + 0.1 * x for name, x in drawn.items()}
    return Weights.from_tensors(shape, tensors)


def alone(model: Model, tokens: Tensor) -> Tensor:
    """Final-normed states of one row by the engine's own decoder and plain attention."""

    def dense(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        future = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), v)

    return model.final_norm(model.hidden_states(tokens, torch.arange(len(tokens)), dense))


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_rows_of_a_layout_are_what_the_engine_makes_of_each_row_alone(architecture: str) -> None:
    shape = make_shape(architecture)
    weights = make_weights(shape)
    tokens = torch.randint(0, shape.vocabulary, (LAYOUT.tokens,), generator=torch.Generator().manual_seed(2))
    adapter = LoRA.create(weights, rank=3, alpha=6.0, seed=0)
    states = Decoder(shape, weights, 16, compiled=False).hidden_states(
        tokens,
        LAYOUT.positions(),
        LAYOUT,
        Base(weights, torch.float32).merged(adapter),
        torch.arange(LAYOUT.tokens),
    )
    model = Model(shape, weights)
    for start, rows, length in LAYOUT.blocks:
        for row in range(rows):
            part = slice(start + row * length, start + (row + 1) * length)
            torch.testing.assert_close(states[part], alone(model, tokens[part]), rtol=1e-4, atol=1e-5)


def test_what_stands_after_a_token_never_reaches_it() -> None:
    q, k, v = torch.randn(3, LAYOUT.tokens, 4, 8, generator=torch.Generator().manual_seed(3)).unbind()
    before = attend(q, k, v, LAYOUT.blocks)
    late = LAYOUT.positions() >= 3
    k, v = k.clone(), v.clone()
    k[late], v[late] = 7.0, -7.0
    after = attend(q, k, v, LAYOUT.blocks)
    torch.testing.assert_close(after[~late], before[~late])
    assert not torch.allclose(after[late], before[late])


def test_gradients_of_merged_weights_are_those_of_two_small_products() -> None:
    weights = make_weights(make_shape("llama"))
    adapter = LoRA.create(weights, rank=3, alpha=6.0, seed=0)
    with torch.no_grad():
        for b in adapter.b.values():
            b.normal_(generator=torch.Generator().manual_seed(4))
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(5))
    merged = Base(weights, torch.float32).merged(adapter)[1].gate_up
    (x @ merged.T).square().sum().backward()
    a = adapter.a["gate_up"].detach()[1].requires_grad_()
    b = adapter.b["gate_up"].detach()[1].requires_grad_()
    (x @ weights.layers[1].gate_up.T + 2.0 * (x @ a.T) @ b.T).square().sum().backward()
    for stacked, single in ((adapter.a, a), (adapter.b, b)):
        grad = stacked["gate_up"].grad
        assert grad is not None
        torch.testing.assert_close(grad[1], single.grad, rtol=1e-3, atol=1e-3)


def test_a_row_that_a_step_leaves_out_changes_nothing_and_the_others_make_up_for_it() -> None:
    weights = make_weights(make_shape("llama"))
    adapter = LoRA.create(weights, rank=40, alpha=40.0, seed=0)
    with torch.no_grad():
        for b in adapter.b.values():
            b.normal_(generator=torch.Generator().manual_seed(4))
    kept = kept_rows(adapter, 0.25, "7/3")
    again, other = kept_rows(adapter, 0.25, "7/3"), kept_rows(adapter, 0.25, "7/4")
    assert all(torch.equal(kept[name], again[name]) for name in MATRICES)
    assert not all(torch.equal(kept[name], other[name]) for name in MATRICES)
    base = Base(weights, torch.float32)
    for name in MATRICES:
        values = kept[name].unique().tolist()
        assert values == pytest.approx([0.0, 1 / 0.75])
        assert 0.6 < float((kept[name] > 0).float().mean()) < 0.9
        for index, layer in enumerate(base.merged(adapter, kept)):
            update = adapter.b[name][index] @ (kept[name][index] * adapter.a[name][index])
            torch.testing.assert_close(
                getattr(layer, name), getattr(weights.layers[index], name) + update, rtol=1e-4, atol=1e-4
            )


def test_a_saved_adapter_makes_the_weights_it_was_trained_on(tiny_base: Path, tmp_path: Path) -> None:
    shape, weights = load_weights(tiny_base, torch.float32, CPU)
    adapter = LoRA.create(weights, rank=4, alpha=8.0, seed=1)
    with torch.no_grad():
        for name in MATRICES:
            adapter.b[name].normal_(std=0.1, generator=torch.Generator().manual_seed(6))
            for part in (adapter.a[name], adapter.b[name]):
                part.copy_(part.bfloat16())  # what is stored is rounded
    path = tmp_path / "adapter.safetensors"
    adapter.save(path, {"base_sha256": "abc", "prompt_version": "1"})
    assert path.stat().st_size == pytest.approx(adapter_bytes(shape, 4), abs=4000)
    stored = read_adapter(path, "abc")
    _, served = load_weights(tiny_base, torch.bfloat16, CPU, adapter=stored)
    trained = Base(weights, torch.bfloat16).merged(adapter)
    for layer, matrices in zip(served.layers, trained, strict=True):
        for name in MATRICES:
            assert torch.equal(getattr(layer, name), getattr(matrices, name)), name


def test_the_default_rank_fits_fifteen_megabytes() -> None:
    shape = ModelShape("llama", 30, 576, 9, 3, 64, 1536, 49152, 2048, 1e5, 1e-5, True, False)
    assert adapter_bytes(shape, 24) == 12_165_120
    assert adapter_bytes(shape, 29) < 15_000_000 < adapter_bytes(shape, 30)
