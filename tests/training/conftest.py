"""A tiny base model on disk and a small tool set in the common format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

HIDDEN, LAYERS, HEADS, KV_HEADS, MLP = 48, 2, 3, 1, 96
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ACTIONS = {
    "create": "Creates a new {} in the workspace. It needs a name and an owner.",
    "delete": "Deletes a {} for good. There is no way back.",
    "list": "Lists every {} that the user may see. Results are paged.",
}
THINGS = ("issue", "calendar event", "invoice", "playlist", "server", "recipe")


def write_tiny_model(folder: Path, seed: int = 0) -> Path:
    """A Llama of two narrow layers with random weights and a byte-level tokenizer."""
    folder.mkdir(parents=True)
    merges = [("y", "e"), ("ye", "s"), ("n", "o")]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*SPECIALS, *alphabet, *(left + right for left, right in merges)]
    vocabulary = {word: index for index, word in enumerate(words)}
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(list(SPECIALS))
    bpe.save(str(folder / "tokenizer.json"))
    config = {
        "model_type": "llama",
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "intermediate_size": MLP,
        "vocab_size": len(vocabulary),
        "max_position_embeddings": 2048,
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    head = HIDDEN // HEADS

    def matrix(out: int, width: int) -> torch.Tensor:
        return torch.randn(out, width, generator=generator) * width**-0.5

    tensors = {
        "model.embed_tokens.weight": matrix(len(vocabulary), HIDDEN) * 3,
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for index in range(LAYERS):
        at = f"model.layers.{index}."
        tensors |= {
            at + "self_attn.q_proj.weight": matrix(HEADS * head, HIDDEN),
            at + "self_attn.k_proj.weight": matrix(KV_HEADS * head, HIDDEN),
            at + "self_attn.v_proj.weight": matrix(KV_HEADS * head, HIDDEN),
            at + "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * head),
            at + "mlp.gate_proj.weight": matrix(MLP, HIDDEN),
            at + "mlp.up_proj.weight": matrix(MLP, HIDDEN),
            at + "mlp.down_proj.weight": matrix(HIDDEN, MLP),
            at + "input_layernorm.weight": torch.ones(HIDDEN),
            at + "post_attention_layernorm.weight": torch.ones(HIDDEN),
        }
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_tool_set(folder: Path) -> Path:
    """Eighteen tools on six servers, two requests for each of half of them."""
    folder.mkdir(parents=True)
    tools, queries = [], []
    for number, thing in enumerate(THINGS):
        for action, description in ACTIONS.items():
            name = f"{action}_{thing.replace(' ', '_')}"
            server = f"{thing.split()[0]}s"
            schema = {"type": "object", "properties": {"name": {"type": "string", "description": "its name"}}}
            tool = {
                "server": server,
                "name": name,
                "description": description.format(thing),
                "inputSchema": schema,
            }
            tools.append(tool)
            if number % 2 == 0:
                for verb in (action, f"please {action}"):
                    query = f"{verb} the {thing} called Anna"
                    queries.append(
                        {"id": str(len(queries)), "query": query, "relevant": [f"{server}/{name}"]}
                    )
    (folder / "catalogue.jsonl").write_text("".join(json.dumps(tool) + "\n" for tool in tools))
    (folder / "queries.jsonl").write_text("".join(json.dumps(query) + "\n" for query in queries))
    return folder


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="session")
def tool_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tool_set(tmp_path_factory.mktemp("sets") / "office")
