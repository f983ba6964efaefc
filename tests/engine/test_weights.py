"""Loading: formats against each other, damage, preallocated tensors, adapters."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.config import ModelShape
from engine.errors import ModelError
from engine.model import Model
from engine.model_files import read_shape, weight_tensors
from engine.weights import Weights, load_weights, read_adapter

CPU = torch.device("cpu")
BASE = "ab" * 32
FOLDER_NAMES = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "o": "self_attn.o_proj",
    "down": "mlp.down_proj",
}
GGUF_NAMES = {
    "attention_norm": "attn_norm",
    "mlp_norm": "ffn_norm",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "o": "attn_output",
    "down": "ffn_down",
}


def named(shape: ModelShape, weights: Weights) -> dict[str, Tensor]:
    """Every tensor under the name that `weight_tensors` gives it."""
    found = {}
    for name, _ in weight_tensors(shape):
        owner: Any = weights
        if name.startswith("layers."):
            owner = weights.layers[int(name.split(".")[1])]
        found[name] = getattr(owner, name.split(".")[-1])
    return found


def folder_tensors(model: Model) -> dict[str, Tensor]:
    shape, weights = model.shape, model.weights
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    tensors = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.final_norm}
    if not shape.tied_embeddings:
        tensors["lm_head.weight"] = weights.head
    for index, layer in enumerate(weights.layers):
        parts = dict(zip("qkv", layer.qkv.split([queries, keys, keys]), strict=True))
        parts = {f"self_attn.{part}_proj": tensor for part, tensor in parts.items()}
        parts |= dict(zip(("mlp.gate_proj", "mlp.up_proj"), layer.gate_up.chunk(2), strict=True))
        for ours, theirs in FOLDER_NAMES.items():
            if getattr(layer, ours) is not None:
                parts[theirs] = getattr(layer, ours)
        tensors |= {f"model.layers.{index}.{name}.weight": tensor for name, tensor in parts.items()}
    return {name: tensor.contiguous().clone() for name, tensor in tensors.items()}


def write_folder(folder: Path, model: Model, **changes: Any) -> Path:
    shape = model.shape
    config = {
        "model_type": shape.architecture,
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.context,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.norm_eps,
        "tie_word_embeddings": shape.tied_embeddings,
        "hidden_act": "silu",
    } | changes
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    save_file(folder_tensors(model), folder / "model.safetensors")
    return folder


def write_sharded(folder: Path, model: Model) -> Path:
    write_folder(folder, model)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    places = {}
    for shard in range(3):
        file = f"model-{shard + 1:05}-of-00003.safetensors"
        save_file({name: tensors[name] for name in names[shard::3]}, folder / file)
        places |= dict.fromkeys(names[shard::3], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def interleaved(matrix: Tensor, heads: int) -> Tensor:
    """llama.cpp's order of rows: element d of a head's first half, then of its second, in turn."""
    size = matrix.shape[0] // heads
    rows = [
        head * size + half * (size // 2) + d
        for head in range(heads)
        for d in range(size // 2)
        for half in (0, 1)
    ]
    return matrix[rows]


def write_gguf(
    path: Path, model: Model, kind: GGMLQuantizationType = GGMLQuantizationType.F32, **changes: Any
) -> Path:
    shape, weights = model.shape, model.weights
    writer = gguf.GGUFWriter(path, shape.architecture)
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    for key, value in changes.items():
        writer.add_string(key.replace("__", "."), value)

    def add(name: str, tensor: Tensor) -> None:
        array = tensor.contiguous().numpy()
        if tensor.dim() == 1:
            writer.add_tensor(f"{name}.weight", array)
        else:
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(array, kind), raw_dtype=kind)

    add("token_embd", weights.embedding)
    add("output_norm", weights.final_norm)
    if not shape.tied_embeddings:
        add("output", weights.head)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for index, layer in enumerate(weights.layers):
        q, k, v = layer.qkv.split([queries, keys, keys])
        if shape.architecture == "llama":
            q, k = interleaved(q, shape.heads), interleaved(k, shape.kv_heads)
        gate, up = layer.gate_up.chunk(2)
        parts = {"attn_q": q, "attn_k": k, "attn_v": v, "ffn_gate": gate, "ffn_up": up}
        parts |= {theirs: getattr(layer, ours) for ours, theirs in GGUF_NAMES.items()}
        for name, tensor in parts.items():
            if tensor is not None:
                add(f"blk.{index}.{name}", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("write", [write_folder, write_sharded])
def test_a_folder_round_trips(tmp_path: Path, tiny_model: Model, write: Callable[..., Path]) -> None:
    folder = write(tmp_path / "model", tiny_model)
    shape, weights = load_weights(folder, torch.float32, CPU)
    assert shape == tiny_model.shape == read_shape(folder)
    expected = named(shape, tiny_model.weights)
    assert {name: tuple(t.shape) for name, t in expected.items()} == dict(weight_tensors(shape))
    for name, tensor in named(shape, weights).items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
def test_a_gguf_file_round_trips(tmp_path: Path, tiny_model: Model, kind: str) -> None:
    # Rows of whole blocks of 32: the down projection has 48 columns, widened here.
    shape = replace(tiny_model.shape, intermediate=64, head_dim=16)
    generator = torch.Generator().manual_seed(1)
    drawn = {name: torch.randn(size, generator=generator) for name, size in weight_tensors(shape)}
    model = Model(shape, Weights.from_tensors(shape, drawn))
    path = write_gguf(tmp_path / "model.gguf", model, GGMLQuantizationType[kind])
    loaded, weights = load_weights(path, torch.float32, CPU)
    assert replace(loaded, norm_eps=shape.norm_eps) == shape
    assert loaded.norm_eps == pytest.approx(shape.norm_eps)
    bound = {"F32": 0.0, "F16": 2e-3, "BF16": 2e-2, "Q8_0": 2e-2, "Q4_1": 0.35}[kind]
    for name, tensor in named(shape, weights).items():
        assert float((tensor - drawn[name]).abs().max()) <= bound, name


def test_tensors_given_are_written_in_place(tmp_path: Path, tiny_model: Model) -> None:
    folder = write_folder(tmp_path / "model", tiny_model)
    listed = weight_tensors(tiny_model.shape)
    into = {name: torch.zeros(size, dtype=torch.bfloat16) for name, size in listed}
    _, weights = load_weights(folder, torch.bfloat16, CPU, into=into)
    expected = named(tiny_model.shape, tiny_model.weights)
    for name, tensor in named(tiny_model.shape, weights).items():
        assert tensor is into[name]
        assert torch.equal(tensor, expected[name].bfloat16())
    into["final_norm"] = torch.zeros(7, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="final_norm needs"):
        load_weights(folder, torch.bfloat16, CPU, into=into)


def test_a_tied_head_that_is_stored_as_well_is_passed_over(
    tmp_path: Path, make_tiny_model: Callable[..., Model]
) -> None:
    model = make_tiny_model("llama")
    folder = write_folder(tmp_path / "model", model)
    file = folder / "model.safetensors"
    extra = {
        "lm_head.weight": model.weights.embedding,
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    save_file(load_file(file) | extra, file)
    assert load_weights(folder, torch.float32, CPU)[0].tied_embeddings


def change(file: Path, name: str, tensor: Tensor | None) -> None:
    tensors = load_file(file)
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (
            "model.layers.1.mlp.up_proj.weight",
            None,
            r"lacks the tensor model\.layers\.1\.mlp\.up_proj\.weight",
        ),
        ("model.norm.weight", torch.ones(31), r"model\.norm\.weight is \[31\], .* needs \[32\]"),
        ("model.layers.0.self_attn.q_proj.bias", torch.ones(48), r"no llama model has: .*q_proj\.bias"),
        (
            "model.norm.weight",
            torch.full((32,), torch.nan),
            r"model\.norm\.weight holds values that are not numbers",
        ),
        ("model.norm.weight", torch.ones(32, dtype=torch.int32), r"stored as torch\.int32"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, make_tiny_model: Callable[..., Model], name: str, tensor: Tensor | None, message: str
) -> None:
    folder = write_folder(tmp_path / "model", make_tiny_model("llama"))
    change(folder / "model.safetensors", name, tensor)
    with pytest.raises(ModelError, match=message):
        load_weights(folder, torch.float32, CPU)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "'gpt2' is not supported"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope scaling"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "rope scaling"),
        ({"num_hidden_layers": None}, "lacks the key 'num_hidden_layers'"),
        ({"hidden_size": "many"}, "wrong kind"),
        ({"num_hidden_layers": 1 << 40}, "layers but holds"),
        ({"intermediate_size": 47}, r"gate_proj\.weight is \[48, 32\]"),
        ({"head_dim": 7}, "cannot be rotated"),
    ],
)
def test_a_config_that_does_not_fit_is_one_sentence(
    tmp_path: Path, make_tiny_model: Callable[..., Model], changes: dict[str, Any], message: str
) -> None:
    folder = write_folder(tmp_path / "model", make_tiny_model("llama"), **changes)
    with pytest.raises(ModelError, match=message):
        read_shape(folder)


def test_missing_files_are_one_sentence(tmp_path: Path, make_tiny_model: Callable[..., Model]) -> None:
    with pytest.raises(ModelError, match="there is no model at"):
        read_shape(tmp_path / "nothing")
    with pytest.raises(ModelError, match=r"config\.json cannot be read: No such file"):
        read_shape(tmp_path)
    folder = write_sharded(tmp_path / "model", make_tiny_model())
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00003\.safetensors is missing"):
        read_shape(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"model.norm.weight": ["a"]}}')
    with pytest.raises(ModelError, match="is missing"):
        read_shape(folder)
    (folder / "model.safetensors.index.json").unlink()
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ModelError, match=r"holds no \.safetensors file"):
        read_shape(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="it is not JSON"):
        read_shape(folder)


def test_a_gguf_file_of_another_kind_is_one_sentence(
    tmp_path: Path, make_tiny_model: Callable[..., Model]
) -> None:
    model = make_tiny_model()
    path = write_gguf(tmp_path / "a.gguf", model, llama__rope__scaling__type="yarn")
    with pytest.raises(ModelError, match="rope scaling 'yarn'"):
        read_shape(path)
    other = Model(replace(model.shape, architecture="phi3"), model.weights)
    with pytest.raises(ModelError, match="of type 'phi3'"):
        read_shape(write_gguf(tmp_path / "b.gguf", other))
    (tmp_path / "c.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match="is empty"):
        read_shape(tmp_path / "c.gguf")
    (tmp_path / "d.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelError, match="not a GGUF file"):
        read_shape(tmp_path / "d.gguf")


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A small file of each format, as bytes."""
    shape = ModelShape("llama", 1, 32, 2, 1, 16, 32, 8, 64, 1e4, 1e-5, True, False)
    drawn = {name: torch.randn(size) for name, size in weight_tensors(shape)}
    model = Model(shape, Weights.from_tensors(shape, drawn))
    folder = tmp_path_factory.mktemp("stored")
    write_folder(folder / "model", model)
    return {
        "gguf": write_gguf(folder / "model.gguf", model, GGMLQuantizationType.Q8_0).read_bytes(),
        "safetensors": (folder / "model" / "model.safetensors").read_bytes(),
        "config": (folder / "model" / "config.json").read_bytes(),
    }


def load_bytes(folder: Path, stored: dict[str, bytes], kind: str, content: bytes) -> None:
    path = folder / "model.gguf"
    if kind == "safetensors":
        (folder / "config.json").write_bytes(stored["config"])
        path = folder / "model.safetensors"
    path.write_bytes(content)
    load_weights(folder if kind == "safetensors" else path, torch.float32, CPU)
    path.unlink()


@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_truncated_file_is_always_refused(
    tmp_path: Path, stored: dict[str, bytes], kind: str, data: st.DataObject
) -> None:
    length = data.draw(st.integers(0, len(stored[kind]) - 1))
    with pytest.raises(ModelError):
        load_bytes(tmp_path, stored, kind, stored[kind][:length])


@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
@given(data=st.data())
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_changed_bytes_load_or_are_refused_but_never_crash(
    tmp_path: Path, stored: dict[str, bytes], kind: str, data: st.DataObject
) -> None:
    content = bytearray(stored[kind])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(content), 3000) - 1))
        content[at] = data.draw(st.integers(0, 255))
    with suppress(ModelError):
        load_bytes(tmp_path, stored, kind, bytes(content))


def write_adapter(path: Path, pairs: dict[str, Tensor], **metadata: str) -> Path:
    stated = {"base_sha256": BASE, "rank": "4", "alpha": "6.0", "prompt_version": "1"} | metadata
    save_file(pairs, path, metadata=stated)
    return path


def adapter_pairs(shape: ModelShape, rank: int = 4) -> dict[str, Tensor]:
    """Updates of every fused matrix of layers 0 and 2."""
    generator = torch.Generator().manual_seed(9)
    pairs = {}
    for name, size in weight_tensors(shape):
        if name.startswith(("layers.0.", "layers.2.")) and len(size) == 2:
            pairs[f"{name}.lora_a"] = torch.randn(rank, size[1], generator=generator)
            pairs[f"{name}.lora_b"] = torch.randn(size[0], rank, generator=generator)
    return pairs


def dense_sum(before: Tensor, name: str, pairs: dict[str, Tensor]) -> Tensor:
    """W + alpha / r B A in float64."""
    if f"{name}.lora_a" not in pairs:
        return before.double()
    return before.double() + 6.0 / 4 * pairs[f"{name}.lora_b"].double() @ pairs[f"{name}.lora_a"].double()


def test_an_adapter_equals_dense_arithmetic(tmp_path: Path, tiny_model: Model) -> None:
    shape = tiny_model.shape
    pairs = adapter_pairs(shape)
    path = write_adapter(tmp_path / "adapter.safetensors", pairs)
    folder = write_folder(tmp_path / "model", tiny_model)
    before = named(shape, load_weights(folder, torch.float32, CPU)[1])
    adapter = read_adapter(path, BASE)
    assert adapter.metadata["prompt_version"] == "1"
    _, merged = load_weights(folder, torch.float32, CPU, adapter=adapter)
    _, rounded = load_weights(folder, torch.bfloat16, CPU, adapter=adapter)
    for name, tensor in before.items():
        expected = dense_sum(tensor, name, pairs)
        torch.testing.assert_close(named(shape, merged)[name].double(), expected, atol=1e-5, rtol=1e-5)
        # Summed in float32 and rounded once: at most half a unit in the last of 8 bits away.
        error = (named(shape, rounded)[name].double() - expected).abs()
        assert (error <= expected.abs() * 2.0**-8 + 1e-5).all()


def test_an_adapter_of_another_base_is_refused(tmp_path: Path, tiny_model: Model) -> None:
    pairs = adapter_pairs(tiny_model.shape)
    path = write_adapter(tmp_path / "adapter.safetensors", pairs, base_sha256="cd" * 32)
    with pytest.raises(ModelError, match="trained for the base model cdcdcdcdcdcd, this one is abababababab"):
        read_adapter(path, BASE)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("layers.0.qkv.lora_a", None, r"lacks one of layers\.0\.qkv\.lora_a"),
        ("layers.7.qkv.lora_a", torch.ones(4, 32), r"lacks one of layers\.7\.qkv\.lora_a"),
        ("layers.0.qkv.lora_a", torch.ones(3, 32), r"layers\.0\.qkv is not of rank 4"),
        (
            "layers.0.qkv.lora_a",
            torch.ones(4, 31),
            r"layers\.0\.qkv is \[64, 31\], the model's is \[64, 32\]",
        ),
        ("layers.0.qkv.lora_a", torch.full((4, 32), torch.inf), r"layers\.0\.qkv holds values that are not"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, make_tiny_model: Callable[..., Model], name: str, tensor: Tensor | None, message: str
) -> None:
    model = make_tiny_model()
    pairs = adapter_pairs(model.shape)
    pairs.pop(name, None)
    if tensor is not None:
        pairs[name] = tensor
    path = write_adapter(tmp_path / "adapter.safetensors", pairs)
    folder = write_folder(tmp_path / "model", model)
    with pytest.raises(ModelError, match=message):
        load_weights(folder, torch.float32, CPU, adapter=read_adapter(path, BASE))


def test_an_adapter_for_a_matrix_that_is_not_there_is_refused(
    tmp_path: Path, make_tiny_model: Callable[..., Model]
) -> None:
    pairs = {"layers.3.o.lora_a": torch.ones(4, 48), "layers.3.o.lora_b": torch.ones(32, 4)}
    path = write_adapter(tmp_path / "adapter.safetensors", pairs)
    folder = write_folder(tmp_path / "model", make_tiny_model())
    with pytest.raises(ModelError, match=r"changes layers\.3\.o, which the model does not have"):
        load_weights(folder, torch.float32, CPU, adapter=read_adapter(path, BASE))


@pytest.mark.parametrize(
    "metadata", [{"rank": "many"}, {"rank": "0"}, {"alpha": "nan"}, {"alpha": "x"}, {"base_sha256": ""}]
)
def test_an_adapter_with_bad_metadata_is_refused(tmp_path: Path, metadata: dict[str, str]) -> None:
    pairs = {"layers.0.o.lora_a": torch.ones(4, 48), "layers.0.o.lora_b": torch.ones(32, 4)}
    path = write_adapter(tmp_path / "adapter.safetensors", pairs, **metadata)
    with pytest.raises(ModelError, match=r"adapter .*adapter\.safetensors"):
        read_adapter(path, BASE)


def test_a_missing_or_empty_adapter_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        read_adapter(tmp_path / "nothing.safetensors", BASE)
    with pytest.raises(ModelError, match="holds no tensors"):
        read_adapter(write_adapter(tmp_path / "empty.safetensors", {}), BASE)
