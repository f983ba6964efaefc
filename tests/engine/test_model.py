"""The decoder against transformers, on tiny random models and on the embedded one."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from engine.attention.torch import TorchAttention
from engine.batch import KVCache, StepBatch, StepRow, build_batch
from engine.config import ModelShape
from engine.model import Model, PaddedOps, TorchOps, rotary_table
from engine.tokenizer import Tokenizer
from engine.weights import Weights, load_weights

CPU = torch.device("cpu")
PAGE_TOKENS = 16


def new_pages(shape: ModelShape, pages: int, dtype: torch.dtype = torch.float32) -> KVCache:
    size = (shape.layers, pages + 1, 2, PAGE_TOKENS, shape.kv_heads, shape.head_dim)
    return KVCache(torch.full(size, math.nan, dtype=dtype))


def reading_all(batch: StepBatch) -> StepBatch:
    """The same step with every token's hidden state read."""
    return replace(batch, outputs=torch.arange(batch.tokens.shape[0]))


def pages_of(lengths: list[int]) -> list[tuple[int, ...]]:
    """Pages for each length, interleaved so that no row's lie in order."""
    needs = [-(-length // PAGE_TOKENS) for length in lengths]
    order = list(range(sum(needs)))
    random.Random(2).shuffle(order)
    return [tuple(order.pop() for _ in range(need)) for need in needs]


@torch.inference_mode()
def hidden_in_slices(model: Model, prompts: list[list[int]], most: int = 10_000) -> list[Tensor]:
    """Final hidden states of every token, all prompts in shared steps of `most` new tokens a row."""
    pages = pages_of([len(prompt) for prompt in prompts])
    cache = new_pages(model.shape, sum(map(len, pages)))
    attention = TorchAttention(cache, model.shape)
    parts: list[list[Tensor]] = [[] for _ in prompts]
    start = 0
    while going := [index for index, prompt in enumerate(prompts) if len(prompt) > start]:
        rows = [StepRow(array("i", prompts[i][start : start + most]), start, pages[i], True) for i in going]
        batch = reading_all(build_batch(rows, PAGE_TOKENS, CPU))
        hidden = model.forward(batch, attention)
        for index, part in zip(going, hidden.split([len(row.tokens) for row in rows]), strict=True):
            parts[index].append(part)
        start += most
    return [torch.cat(part) for part in parts]


def dense(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one sequence, without pages."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (k, v))
    return functional.scaled_dot_product_attention(q.transpose(0, 1), k, v, is_causal=True).transpose(0, 1)


def in_transformers(model: Model) -> Any:
    """The same weights in transformers' own implementation."""
    shape, weights = model.shape, model.weights
    kind = (Qwen3Config, Qwen3ForCausalLM) if shape.qk_norm else (LlamaConfig, LlamaForCausalLM)
    config = kind[0](
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context,
        rms_norm_eps=shape.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=shape.tied_embeddings,
    )
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    state = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.final_norm}
    state["lm_head.weight"] = weights.head
    for index, layer in enumerate(weights.layers):
        q, k, v = layer.qkv.split([queries, keys, keys])
        gate, up = layer.gate_up.chunk(2)
        named = {
            "input_layernorm": layer.attention_norm,
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": layer.o,
            "post_attention_layernorm": layer.mlp_norm,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.down,
        }
        if layer.q_norm is not None and layer.k_norm is not None:
            named |= {"self_attn.q_norm": layer.q_norm, "self_attn.k_norm": layer.k_norm}
        state |= {f"model.layers.{index}.{name}.weight": tensor for name, tensor in named.items()}
    reference = kind[1](config).eval()
    reference.load_state_dict(state)
    return reference


@torch.inference_mode()
def test_tiny_models_agree_with_transformers(tiny_model: Model) -> None:
    reference = in_transformers(tiny_model)
    rng = random.Random(1)
    prompts = [[rng.randrange(tiny_model.shape.vocabulary) for _ in range(n)] for n in (1, 2, 17, 64, 300)]
    for most in (10_000, 7):
        for prompt, hidden in zip(prompts, hidden_in_slices(tiny_model, prompts, most), strict=True):
            expected = reference(torch.tensor([prompt])).logits[0]
            torch.testing.assert_close(tiny_model.logits(hidden), expected, atol=2e-5, rtol=1e-5)


def real_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """32 prompts of 1 to 600 tokens, lengths evenly spaced in the logarithm: text and random ids in turn."""
    rng = random.Random(7)
    text = tokenizer.encode(Path(__file__).read_text())
    prompts = []
    for index in range(32):
        length = round(600 ** (index / 31))
        at = rng.randrange(len(text) - length)
        noise = [rng.randrange(49_152) for _ in range(length)]
        prompts.append(noise if index % 3 == 0 else text[at : at + length])
    return prompts


@torch.inference_mode()
def test_logits_of_32_prompts_agree_with_transformers(
    model: Model, tokenizer: Tokenizer, reference: Any
) -> None:
    """At the first, the last and some thirty positions between, whole vocabulary each."""
    prompts = real_prompts(tokenizer)
    assert (len(prompts[0]), len(prompts[-1])) == (1, 600)
    worst = 0.0
    for prompt, hidden in zip(prompts, hidden_in_slices(model, prompts, 256), strict=True):
        positions = torch.linspace(0, len(prompt) - 1, min(len(prompt), 32)).long()
        expected = reference(torch.tensor([prompt]), logits_to_keep=positions).logits[0]
        worst = max(worst, float((model.logits(hidden[positions]) - expected).abs().max()))
    assert worst < 1e-3


@torch.inference_mode()
def test_bfloat16_stays_near_float32(model: Model, model_path: Path, tokenizer: Tokenizer) -> None:
    shape, weights = load_weights(model_path, torch.bfloat16, CPU)
    rounded = Model(shape, weights)
    prompt = tokenizer.encode("List the open pull requests of a repository, newest first.")
    batch = reading_all(build_batch([StepRow(array("i", prompt), 0, (1, 0), True)], PAGE_TOKENS, CPU))
    probabilities = []
    for candidate, dtype in ((model, torch.float32), (rounded, torch.bfloat16)):
        cache = new_pages(shape, 2, dtype)
        hidden = candidate.forward(batch, TorchAttention(cache, shape))
        assert hidden.dtype == dtype
        probabilities.append(torch.softmax(candidate.logits(hidden), dim=-1))
    total_variation = 0.5 * (probabilities[0] - probabilities[1]).abs().sum(dim=-1)
    assert float(total_variation.max()) < 0.15
    assert float(total_variation.mean()) < 0.05


@torch.inference_mode()
def test_reading_some_rows_equals_reading_all(tiny_model: Model) -> None:
    pages = pages_of([20, 5, 33])
    attention = TorchAttention(new_pages(tiny_model.shape, 16), tiny_model.shape)
    rows = [StepRow(array("i", range(n)), 0, own, n != 5) for n, own in zip((20, 5, 33), pages, strict=True)]
    batch = build_batch(rows, PAGE_TOKENS, CPU)
    assert batch.outputs.tolist() == [19, 57]
    every = tiny_model.forward(reading_all(batch), attention)
    torch.testing.assert_close(tiny_model.forward(batch, attention), every[[19, 57]])
    none = replace(batch, outputs=torch.empty(0, dtype=torch.int64))
    assert tiny_model.forward(none, attention).shape == (0, tiny_model.shape.hidden)


@torch.inference_mode()
def test_columns_of_the_head_equal_those_of_all_logits(tiny_model: Model) -> None:
    hidden = torch.randn(5, tiny_model.shape.hidden)
    columns = torch.tensor([96, 3])
    torch.testing.assert_close(tiny_model.logits(hidden, columns), tiny_model.logits(hidden)[:, columns])


@torch.inference_mode()
def test_columns_of_a_bfloat16_head_are_not_rounded(tiny_model: Model) -> None:
    tiny = tiny_model.weights
    head = 10 * tiny.head.bfloat16()
    model = Model(tiny_model.shape, Weights(head, tiny.layers, tiny.final_norm, head))
    hidden = torch.randn(50, tiny_model.shape.hidden, generator=torch.Generator().manual_seed(3)).bfloat16()
    exact = hidden.double() @ head[[96, 3]].double().T
    assert float(exact.abs().max()) > 16
    assert float((model.logits(hidden, torch.tensor([96, 3])) - exact).abs().max()) < 1e-3


def test_gradients_flow_to_adapters_through_a_dense_callback(tiny_model: Model) -> None:
    """A low-rank update inside `linear` learns: the loss falls along its gradient."""
    weights = tiny_model.weights
    target = weights.layers[0].qkv
    down = torch.full((2, target.shape[1]), 0.01, requires_grad=True)
    up = torch.zeros(target.shape[0], 2, requires_grad=True)

    class LowRank(TorchOps):
        def linear(self, x: Tensor, weight: Tensor) -> Tensor:
            plain = super().linear(x, weight)
            return plain + x @ down.T @ up.T if weight is target else plain

    model = Model(tiny_model.shape, weights, LowRank())
    tokens = torch.randint(0, 97, (24,), generator=torch.Generator().manual_seed(0))

    def loss() -> Tensor:
        hidden = model.hidden_states(tokens[:-1], torch.arange(23), dense)
        return functional.cross_entropy(model.logits(model.final_norm(hidden)), tokens[1:])

    before = loss()
    (gradient,) = torch.autograd.grad(before, up)
    assert gradient.abs().sum() > 0
    with torch.no_grad():
        up -= 1e-2 * gradient
    assert loss() < before


@torch.inference_mode()
def test_pages_and_dense_attention_agree(make_tiny_model: Callable[..., Model]) -> None:
    model = make_tiny_model("qwen3", seed=3)
    tokens = torch.arange(70)
    hidden = model.final_norm(model.hidden_states(tokens, torch.arange(70), dense))
    torch.testing.assert_close(hidden_in_slices(model, [tokens.tolist()], 9)[0], hidden)


def test_rotary_table_is_exact_at_the_end_of_the_context(tiny_shape: ModelShape) -> None:
    table = rotary_table(tiny_shape, 8192, CPU)
    for position in (0, 1, 4095, 8191):
        for pair in range(4):
            angle = position * 10_000 ** (-2 * pair / 8)
            assert table[position, pair] == pytest.approx(math.cos(angle), abs=1e-6)
            assert table[position, pair + 4] == pytest.approx(math.sin(angle), abs=1e-6)


def test_tied_head_is_the_embedding_itself(model: Model) -> None:
    assert model.shape.tied_embeddings
    assert isinstance(model.weights, Weights)
    assert model.weights.head is model.weights.embedding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padded_products_are_the_products(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(24, 32, generator=generator).to(dtype)
    for rows in (0, 1, 31, 32, 33, 100):
        x = torch.randn(rows, 32, generator=generator).to(dtype)
        padded = PaddedOps().linear(x, weight)
        assert padded.shape == (rows, 24)
        torch.testing.assert_close(padded, TorchOps().linear(x, weight), rtol=1e-2, atol=1e-2)


def test_products_of_steps_on_a_cpu_come_in_few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the library keeps a kernel for each of them."""
    sizes: set[int] = set()
    product = functional.linear

    def watched(x: Tensor, weight: Tensor) -> Tensor:
        sizes.add(x.shape[0])
        return product(x, weight)

    monkeypatch.setattr(functional, "linear", watched)
    weight = torch.zeros(8, 8, dtype=torch.bfloat16)
    for rows in range(1, 513):
        PaddedOps().linear(torch.zeros(rows, 8, dtype=torch.bfloat16), weight)
    assert sizes == set(range(32, 513, 32))
