"""A model folder that loads in a moment: random weights, and a tokenizer that knows little but bytes."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine.config import ModelShape

CPU_SHAPE = ModelShape(
    architecture="llama", layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128,
    vocabulary=320, context=2048, rope_theta=1e4, norm_eps=1e-5, tied_embeddings=True, qk_norm=False,
)  # fmt: skip


def make_model(folder: Path, shape: ModelShape = CPU_SHAPE) -> Path:
    """Writes config, weights and tokenizer into `folder`."""
    folder.mkdir(exist_ok=True)
    config = {
        "model_type": "llama", "num_hidden_layers": shape.layers, "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim, "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocabulary, "max_position_embeddings": shape.context,
        "rope_theta": shape.rope_theta, "rms_norm_eps": shape.norm_eps, "tie_word_embeddings": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(shape), folder / "model.safetensors")
    _tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def _weights(shape: ModelShape) -> dict[str, torch.Tensor]:
    sizes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocabulary, shape.hidden),
        "model.norm.weight": (shape.hidden,),
    }
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        sizes |= {
            at + "input_layernorm.weight": (shape.hidden,),
            at + "post_attention_layernorm.weight": (shape.hidden,),
            at + "self_attn.q_proj.weight": (queries, shape.hidden),
            at + "self_attn.k_proj.weight": (keys, shape.hidden),
            at + "self_attn.v_proj.weight": (keys, shape.hidden),
            at + "self_attn.o_proj.weight": (shape.hidden, queries),
            at + "mlp.gate_proj.weight": (shape.intermediate, shape.hidden),
            at + "mlp.up_proj.weight": (shape.intermediate, shape.hidden),
            at + "mlp.down_proj.weight": (shape.hidden, shape.intermediate),
        }
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(size, generator=generator) * 0.04 for name, size in sizes.items()}


def _tokenizer() -> Tokenizer:
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ye", "yes", "no"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("y", "e"), ("ye", "s"), ("n", "o")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return tokenizer
