"""The embedded model, loaded once a session, and tiny random models for everything else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from engine.config import ModelShape
from engine.model import Model
from engine.model_files import weight_tensors
from engine.tokenizer import Tokenizer
from engine.weights import Weights, load_weights
from mcp_discovery import model_store

CPU = torch.device("cpu")

TINY = {
    architecture: ModelShape(
        architecture=architecture,
        layers=3,
        hidden=32,
        heads=4 if architecture == "llama" else 6,
        kv_heads=2,
        head_dim=8,
        intermediate=48,
        vocabulary=97,
        context=512,
        rope_theta=10_000.0,
        norm_eps=1e-5,
        tied_embeddings=architecture == "llama",
        qk_norm=architecture == "qwen3",
    )
    for architecture in ("llama", "qwen3")
}


def random_weights(shape: ModelShape, seed: int = 0) -> dict[str, torch.Tensor]:
    """float32 tensors of a model whose activations stay near 1."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, size in weight_tensors(shape):
        drawn = torch.randn(size, generator=generator)
        tensors[name] = drawn * size[-1] ** -0.5 if len(size) > 1 else 1 + 0.1 * drawn
    tensors["embedding"] *= shape.hidden**0.5
    return tensors


@pytest.fixture(params=["llama", "qwen3"])
def tiny_shape(request: pytest.FixtureRequest) -> ModelShape:
    return TINY[request.param]


@pytest.fixture
def tiny_model(tiny_shape: ModelShape) -> Model:
    """A random model in float32."""
    return Model(tiny_shape, Weights.from_tensors(tiny_shape, random_weights(tiny_shape)))


@pytest.fixture
def make_tiny_model() -> Callable[..., Model]:
    """`make(architecture="llama", seed=0)`: a random model in float32."""

    def make(architecture: str = "llama", seed: int = 0) -> Model:
        shape = TINY[architecture]
        return Model(shape, Weights.from_tensors(shape, random_weights(shape, seed)))

    return make


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The GGUF file of the embedded model, fetched where the machine has none."""
    return model_store.fetch()


@pytest.fixture(scope="session")
def model(model_path: Path) -> Model:
    """The embedded model in float32 on the CPU."""
    shape, weights = load_weights(model_path, torch.float32, CPU)
    return Model(shape, weights)


@pytest.fixture(scope="session")
def tokenizer(model_path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(model_path)


@pytest.fixture(scope="session")
def reference(model_path: Path) -> Any:
    """The embedded model as transformers itself reads it from the GGUF file."""
    config = LlamaConfig(**load_gguf_checkpoint(str(model_path))["config"])
    loaded = LlamaForCausalLM(config).eval()
    state = load_gguf_checkpoint(str(model_path), return_tensors=True, model_to_load=loaded)["tensors"]
    missing, unexpected = loaded.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"]  # tied
    assert unexpected == []
    return loaded
