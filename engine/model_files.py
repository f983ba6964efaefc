"""A model's files: their format, the shape they state, the tensors they hold, their digest.

Torch is imported only where tensors are read, so that a process without an engine can look at a model.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from safetensors import SafetensorError, safe_open

from engine.config import ModelShape
from engine.errors import ModelError
from engine.gguf_file import GGUFFile

if TYPE_CHECKING:
    from torch import Tensor

_UNUSED_SUFFIX = ".rotary_emb.inv_freq"  # a table that old conversions stored; computed here


def weight_tensors(shape: ModelShape) -> list[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor of a model, in the order they are loaded. Pure."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    tensors: list[tuple[str, tuple[int, ...]]] = [("embedding", (shape.vocabulary, shape.hidden))]
    for index in range(shape.layers):
        at = f"layers.{index}."
        tensors.append((at + "attention_norm", (shape.hidden,)))
        tensors.append((at + "qkv", (queries + 2 * keys, shape.hidden)))
        if shape.qk_norm:
            tensors.append((at + "q_norm", (shape.head_dim,)))
            tensors.append((at + "k_norm", (shape.head_dim,)))
        tensors.append((at + "o", (shape.hidden, queries)))
        tensors.append((at + "mlp_norm", (shape.hidden,)))
        tensors.append((at + "gate_up", (2 * shape.intermediate, shape.hidden)))
        tensors.append((at + "down", (shape.hidden, shape.intermediate)))
    tensors.append(("final_norm", (shape.hidden,)))
    if not shape.tied_embeddings:
        tensors.append(("head", (shape.vocabulary, shape.hidden)))
    return tensors


class Source(Protocol):
    """A model on disk, whatever its format. Names are the format's own."""

    shape: ModelShape
    stored: dict[str, tuple[int, ...]]
    names: Mapping[str, tuple[str, ...]]  # our name without `layers.{i}.` -> the parts it is fused of

    def layer(self, index: int) -> str:
        """What the names of a layer's tensors begin with."""
        ...

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop), whole heads of them, on the CPU in any floating dtype."""
        ...


class _GGUFSource:
    names: Mapping[str, tuple[str, ...]] = {
        "embedding": ("token_embd.weight",),
        "attention_norm": ("attn_norm.weight",),
        "qkv": ("attn_q.weight", "attn_k.weight", "attn_v.weight"),
        "q_norm": ("attn_q_norm.weight",),
        "k_norm": ("attn_k_norm.weight",),
        "o": ("attn_output.weight",),
        "mlp_norm": ("ffn_norm.weight",),
        "gate_up": ("ffn_gate.weight", "ffn_up.weight"),
        "down": ("ffn_down.weight",),
        "final_norm": ("output_norm.weight",),
        "head": ("output.weight",),
    }

    def __init__(self, path: Path) -> None:
        self._file = GGUFFile(path)
        self.stored: dict[str, tuple[int, ...]] = {
            name: tensor.shape for name, tensor in self._file.tensors.items()
        }
        self.shape = _gguf_shape(self._file)

    def layer(self, index: int) -> str:
        return f"blk.{index}."

    def read(self, name: str, start: int, stop: int) -> Tensor:
        import torch

        if len(self.stored[name]) == 1:
            return torch.from_numpy(self._file.rows(name, 0, 1)[0, start:stop])
        rows = torch.from_numpy(self._file.rows(name, start, stop))
        if self.shape.architecture == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
            # The converter stored each head's rotary pairs side by side: (d, d + half) at (2d, 2d + 1).
            half = self.shape.head_dim // 2
            rows = rows.view(-1, half, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
        return rows


def _gguf_shape(file: GGUFFile) -> ModelShape:
    values = file.metadata
    architecture = str(values.get("general.architecture", ""))
    if architecture not in ("llama", "qwen3"):
        raise ModelError(f"{file.path} holds a model of type {architecture!r}; llama and qwen3 are supported")
    scaling = values.get(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none":
        raise ModelError(f"{file.path} uses rope scaling {scaling!r}, which is not supported")

    def value(key: str, default: float | None = None) -> Any:
        found = values.get(f"{architecture}.{key}", default)
        if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
            raise ModelError(f"{file.path} does not state {architecture}.{key} as a number")
        return found

    heads, hidden = int(value("attention.head_count")), int(value("embedding_length"))
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path} lacks the tensor token_embd.weight")
    shape = ModelShape(
        architecture=architecture,
        layers=int(value("block_count")),
        hidden=hidden,
        heads=heads,
        kv_heads=int(value("attention.head_count_kv", heads)),
        head_dim=int(value("attention.key_length", hidden // max(heads, 1))),
        intermediate=int(value("feed_forward_length")),
        vocabulary=file.tensors["token_embd.weight"].shape[0],
        context=int(value("context_length")),
        rope_theta=float(value("rope.freq_base", 10_000.0)),
        norm_eps=float(value("attention.layer_norm_rms_epsilon")),
        tied_embeddings="output.weight" not in file.tensors,
        qk_norm=architecture == "qwen3",
    )
    if value("rope.dimension_count", shape.head_dim) != shape.head_dim:
        raise ModelError(f"{file.path} rotates a part of each head, which is not supported")
    return shape


class _FolderSource:
    names: Mapping[str, tuple[str, ...]] = {
        "embedding": ("model.embed_tokens.weight",),
        "attention_norm": ("input_layernorm.weight",),
        "qkv": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        "q_norm": ("self_attn.q_norm.weight",),
        "k_norm": ("self_attn.k_norm.weight",),
        "o": ("self_attn.o_proj.weight",),
        "mlp_norm": ("post_attention_layernorm.weight",),
        "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "down": ("mlp.down_proj.weight",),
        "final_norm": ("model.norm.weight",),
        "head": ("lm_head.weight",),
    }

    def __init__(self, folder: Path) -> None:
        self.shape = _folder_shape(folder)
        self._folder = folder
        self._slices: dict[str, Any] = {}
        self.stored: dict[str, tuple[int, ...]] = {
            name: tuple(part.get_shape()) for name, part in self._open("np").items()
        }
        if self.shape.tied_embeddings:
            self.stored.pop("lm_head.weight", None)  # some publishers store the tied head as well

    def _open(self, framework: str) -> dict[str, Any]:
        slices: dict[str, Any] = {}
        for path in tensor_files(self._folder):
            try:
                file: Any = safe_open(path, framework=framework)
                slices |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            except (OSError, SafetensorError) as error:
                raise ModelError(f"model file {path} is damaged: {error}; fetch or copy it again") from error
        return slices

    def layer(self, index: int) -> str:
        return f"model.layers.{index}."

    def read(self, name: str, start: int, stop: int) -> Tensor:
        import torch

        self._slices = self._slices or self._open("pt")
        rows: Tensor = self._slices[name][start:stop]
        if rows.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            raise ModelError(
                f"{name} is stored as {rows.dtype}, which is not supported; use a bfloat16 model"
            )
        return rows


def _folder_shape(folder: Path) -> ModelShape:
    config = _read_json(folder / "config.json")
    try:
        shape = ModelShape.from_config(config)
    except KeyError as error:
        raise ModelError(f"{folder / 'config.json'} lacks the key {error}") from error
    except (TypeError, ValueError) as error:
        raise ModelError(f"{folder / 'config.json'} holds a value of the wrong kind: {error}") from error
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{folder / 'config.json'}: activation {config['hidden_act']!r} is not supported")
    return shape


def tensor_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: those of the index where there is one, else all."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ModelError(f"model folder {folder} holds no .safetensors file")
        return files
    places = _read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ModelError(f"{index} has no weight_map")
    files = [folder / Path(name).name for name in sorted({str(name) for name in places.values()})]
    for file in files:
        if not file.is_file():
            raise ModelError(f"model file {file} is missing; {index.name} lists it")
    return files


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"model file {path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelError(f"model file {path} is damaged: it is not JSON") from error
    if not isinstance(value, dict):
        raise ModelError(f"model file {path} is damaged: it is not a JSON object")
    return value


def open_model(path: Path) -> Source:
    if path.is_dir():
        return _FolderSource(path)
    if not path.is_file():
        raise ModelError(f"there is no model at {path}")
    return _GGUFSource(path)


def parts_of(source: Source, name: str) -> list[str]:
    """The stored tensors that the tensor `name` is fused of, top to bottom."""
    if not name.startswith("layers."):
        return list(source.names[name])
    _, index, short = name.split(".")
    return [source.layer(int(index)) + part for part in source.names[short]]


def _part_shapes(source: Source, name: str, fused: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The shapes of `parts_of`: a fused matrix split by rows."""
    shape = source.shape
    if name.endswith(".qkv"):
        keys = shape.kv_heads * shape.head_dim
        return [(shape.heads * shape.head_dim, fused[1]), (keys, fused[1]), (keys, fused[1])]
    if name.endswith(".gate_up"):
        return [(shape.intermediate, fused[1])] * 2
    return [fused]


def check_tensors(path: Path, source: Source) -> None:
    """Every tensor there, of the right shape, and none besides. Raises ModelError by name."""
    if source.shape.head_dim % 2:
        raise ModelError(f"{path}: heads of {source.shape.head_dim} cannot be rotated in pairs")
    if source.shape.layers > len(source.stored):  # a damaged count could make the list below endless
        raise ModelError(f"{path} states {source.shape.layers} layers but holds {len(source.stored)} tensors")
    left = {name for name in source.stored if not name.endswith(_UNUSED_SUFFIX)}
    for name, fused in weight_tensors(source.shape):
        for part, expected in zip(parts_of(source, name), _part_shapes(source, name, fused), strict=True):
            if part not in source.stored:
                raise ModelError(f"{path} lacks the tensor {part}")
            if source.stored[part] != expected:
                raise ModelError(
                    f"{path}: tensor {part} is {list(source.stored[part])}, "
                    f"the model's shape needs {list(expected)}"
                )
            left.discard(part)
    if left:
        raise ModelError(f"{path} holds tensors that no {source.shape.architecture} model has: {_some(left)}")


def _some(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def read_shape(path: Path) -> ModelShape:
    """The shape of the model at `path`, its tensors checked by name and shape, none of them read.

    Raises ModelError where the file is missing, damaged or of another kind.
    """
    source = open_model(path)
    check_tensors(path, source)
    return source.shape


def digest(path: Path) -> str:
    """SHA-256 of a model or adapter, in hexadecimal: what an adapter names as its base.

    Of a file, its own. Of a folder, that of the lines "<sha256>  <name>" of its safetensors files in
    order of name, as `sha256sum *.safetensors | sha256sum` prints it.
    """
    try:
        if path.is_dir():
            lines = (f"{digest(file)}  {file.name}\n" for file in tensor_files(path))
            return hashlib.sha256("".join(lines).encode()).hexdigest()
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"model file {path} cannot be read: {error.strerror or error}") from error
