"""Weights of a Llama-family decoder, from a GGUF file or a safetensors folder.

The tensors of a loaded model (`weight_tensors` lists them), names and shapes:

    embedding              [vocabulary, hidden]
    layers.{i}.attention_norm  [hidden]
    layers.{i}.qkv         [(heads + 2 kv_heads) head_dim, hidden]   queries, keys, values
    layers.{i}.q_norm      [head_dim]                                 Qwen3 only, as k_norm
    layers.{i}.k_norm      [head_dim]
    layers.{i}.o           [hidden, heads head_dim]
    layers.{i}.mlp_norm    [hidden]
    layers.{i}.gate_up     [2 intermediate, hidden]
    layers.{i}.down        [hidden, intermediate]
    final_norm             [hidden]
    head                   [vocabulary, hidden]                       absent where tied to embedding

Matrices are [out, in]. Rotary pairs are (d, d + head_dim / 2) whatever the file's order.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.config import ModelShape
from engine.errors import ModelError
from engine.gguf_file import GGUFFile

_ROWS_AT_ONCE = 4096  # rows dequantised together: bounds what a load needs beyond its result
_UNUSED_SUFFIX = ".rotary_emb.inv_freq"  # a table that old conversions stored; computed here


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Shapes as in the module's table."""

    attention_norm: Tensor
    qkv: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """A whole model. `head` is `embedding` itself where the two are tied."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Tensor

    @classmethod
    def from_tensors(cls, shape: ModelShape, tensors: Mapping[str, Tensor]) -> Weights:
        """From the tensors that `weight_tensors(shape)` names. Raises KeyError where one is missing."""

        def layer(index: int) -> LayerWeights:
            at = f"layers.{index}."
            return LayerWeights(
                attention_norm=tensors[at + "attention_norm"],
                qkv=tensors[at + "qkv"],
                q_norm=tensors[at + "q_norm"] if shape.qk_norm else None,
                k_norm=tensors[at + "k_norm"] if shape.qk_norm else None,
                o=tensors[at + "o"],
                mlp_norm=tensors[at + "mlp_norm"],
                gate_up=tensors[at + "gate_up"],
                down=tensors[at + "down"],
            )

        return cls(
            embedding=tensors["embedding"],
            layers=tuple(layer(index) for index in range(shape.layers)),
            final_norm=tensors["final_norm"],
            head=tensors["embedding" if shape.tied_embeddings else "head"],
        )


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


class _Source(Protocol):
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
        self._slices: dict[str, Any] = {}
        for path in tensor_files(folder):
            try:
                file: Any = safe_open(path, framework="pt")
                self._slices |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            except (OSError, SafetensorError) as error:
                raise ModelError(f"model file {path} is damaged: {error}; fetch or copy it again") from error
        self.stored: dict[str, tuple[int, ...]] = {
            name: tuple(part.get_shape()) for name, part in self._slices.items()
        }
        if self.shape.tied_embeddings:
            self.stored.pop("lm_head.weight", None)  # some publishers store the tied head as well

    def layer(self, index: int) -> str:
        return f"model.layers.{index}."

    def read(self, name: str, start: int, stop: int) -> Tensor:
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


def _open(path: Path) -> _Source:
    if path.is_dir():
        return _FolderSource(path)
    if not path.is_file():
        raise ModelError(f"there is no model at {path}")
    return _GGUFSource(path)


def _parts(source: _Source, name: str) -> list[str]:
    """The stored tensors that the tensor `name` is fused of, top to bottom."""
    if not name.startswith("layers."):
        return list(source.names[name])
    _, index, short = name.split(".")
    return [source.layer(int(index)) + part for part in source.names[short]]


def _part_shapes(source: _Source, name: str, fused: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The shapes of `_parts`: a fused matrix split by rows."""
    shape = source.shape
    if name.endswith(".qkv"):
        keys = shape.kv_heads * shape.head_dim
        return [(shape.heads * shape.head_dim, fused[1]), (keys, fused[1]), (keys, fused[1])]
    if name.endswith(".gate_up"):
        return [(shape.intermediate, fused[1])] * 2
    return [fused]


def _check(path: Path, source: _Source) -> None:
    """Every tensor there, of the right shape, and none besides. Raises ModelError by name."""
    if source.shape.head_dim % 2:
        raise ModelError(f"{path}: heads of {source.shape.head_dim} cannot be rotated in pairs")
    if source.shape.layers > len(source.stored):  # a damaged count could make the list below endless
        raise ModelError(f"{path} states {source.shape.layers} layers but holds {len(source.stored)} tensors")
    left = {name for name in source.stored if not name.endswith(_UNUSED_SUFFIX)}
    for name, fused in weight_tensors(source.shape):
        for part, expected in zip(_parts(source, name), _part_shapes(source, name, fused), strict=True):
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
    source = _open(path)
    _check(path, source)
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


def load_weights(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    into: Mapping[str, Tensor] | None = None,
    adapter: Adapter | None = None,
) -> tuple[ModelShape, Weights]:
    """Loads a GGUF file or a safetensors folder, tensor by tensor.

    `into` holds a tensor for each of `weight_tensors(shape)`, to be written in place: nothing is
    allocated on the device then. An `adapter` is merged in float32, before the cast to `dtype`.
    Raises ModelError where the file is missing, damaged or of another kind.
    """
    source = _open(path)
    _check(path, source)
    listed = weight_tensors(source.shape)
    if into is None:
        into = {name: torch.empty(size, dtype=dtype, device=device) for name, size in listed}
    if adapter is not None:
        adapter.check(dict(listed))
    for name, size in listed:
        target = into[name]
        if tuple(target.shape) != size or target.dtype != dtype:
            raise ValueError(f"{name} needs {dtype} {size}, was given {target.dtype} {tuple(target.shape)}")
        if adapter is not None and name in adapter.pairs:
            whole = torch.empty(size, dtype=torch.float32)
            _fill(path, source, name, whole)
            adapter.merge(name, whole)
            target.copy_(whole)
        else:
            _fill(path, source, name, target)
    return source.shape, Weights.from_tensors(source.shape, into)


def _fill(path: Path, source: _Source, name: str, target: Tensor) -> None:
    """Writes the parts of `name` into `target`, top to bottom."""
    base = 0
    for part, start, stop in _chunks(source, name):
        try:
            chunk = source.read(part, start, stop)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path} is damaged: {part} cannot be read ({error}); copy it again") from error
        if not chunk.sum(dtype=torch.float32).isfinite():
            raise ModelError(f"{path} is damaged: {part} holds values that are not numbers; copy it again")
        target[base : base + stop - start].copy_(chunk)
        base += stop - start


def _chunks(source: _Source, name: str) -> Iterator[tuple[str, int, int]]:
    """(part, start, stop): a tensor in runs of rows, each a whole number of heads."""
    head = source.shape.head_dim
    step = max(_ROWS_AT_ONCE // head, 1) * head
    for part in _parts(source, name):
        rows = source.stored[part][0]
        for start in range(0, rows, step):
            yield part, start, min(start + step, rows)


@dataclass(frozen=True, slots=True)
class Adapter:
    """Low-rank updates of fused matrices: W + (alpha / rank) B A for each name in `pairs`.

    On disk: a safetensors file with `{name}.lora_a` [rank, in] and `{name}.lora_b` [out, rank], name
    being `layers.{i}.qkv`, `.o`, `.gate_up` or `.down`, and metadata `base_sha256`, `rank`, `alpha`,
    `prompt_version` and whatever else describes it.
    """

    path: Path
    metadata: Mapping[str, str]
    scale: float
    pairs: Mapping[str, tuple[Tensor, Tensor]]  # name -> (A, B), float32 on the CPU

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises ModelError where a pair belongs to no matrix in `shapes` or does not fit it."""
        for name, (down, up) in self.pairs.items():
            size = shapes.get(name)
            if size is None or len(size) != 2:
                raise ModelError(f"adapter {self.path} changes {name}, which the model does not have")
            if (up.shape[0], down.shape[1]) != size:
                raise ModelError(
                    f"adapter {self.path}: {name} is [{up.shape[0]}, {down.shape[1]}], "
                    f"the model's is {list(size)}"
                )

    def merge(self, name: str, matrix: Tensor) -> None:
        """Adds the update of `name` to `matrix`, in place, computed in float32."""
        down, up = (part.to(matrix.device) for part in self.pairs[name])
        matrix.copy_(torch.addmm(matrix.float(), up, down, alpha=self.scale))


def read_adapter(path: Path, base_sha256: str) -> Adapter:
    """Reads an adapter trained for the base whose digest is `base_sha256`.

    Raises ModelError where the file is missing, damaged, incomplete or trained for another base.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ModelError(f"adapter {path} cannot be read: {error}") from error
    base = metadata.get("base_sha256", "")
    if base != base_sha256:
        raise ModelError(
            f"adapter {path} was trained for the base model {base[:12] or 'of no stated digest'}, "
            f"this one is {base_sha256[:12]}; use its own base or another adapter"
        )
    try:
        rank, alpha = int(metadata["rank"]), float(metadata["alpha"])
    except (KeyError, ValueError) as error:
        raise ModelError(f"adapter {path} does not state its rank and alpha as numbers") from error
    if rank < 1 or not math.isfinite(alpha):
        raise ModelError(f"adapter {path} states rank {rank} and alpha {alpha}")
    return Adapter(path, metadata, alpha / rank, _pairs(path, tensors, rank))


def _pairs(path: Path, tensors: Mapping[str, Tensor], rank: int) -> dict[str, tuple[Tensor, Tensor]]:
    pairs = {}
    for name in sorted({name.removesuffix(".lora_a").removesuffix(".lora_b") for name in tensors}):
        down, up = tensors.get(f"{name}.lora_a"), tensors.get(f"{name}.lora_b")
        if down is None or up is None:
            raise ModelError(f"adapter {path} lacks one of {name}.lora_a and {name}.lora_b")
        if down.dim() != 2 or up.dim() != 2 or down.shape[0] != rank or up.shape[1] != rank:
            raise ModelError(
                f"adapter {path}: {name} is not of rank {rank}: "
                f"lora_a {list(down.shape)}, lora_b {list(up.shape)}"
            )
        if not (torch.isfinite(down).all() and torch.isfinite(up).all()):
            raise ModelError(f"adapter {path} is damaged: {name} holds values that are not numbers")
        pairs[name] = (down, up)
    if not pairs:
        raise ModelError(f"adapter {path} holds no tensors")
    return pairs


def merge_adapter(weights: Weights, path: Path, base_sha256: str) -> Adapter:
    """Merges an adapter into loaded weights, in place, and returns it.

    Weights in bfloat16 are rounded once more by this than by `load_weights(..., adapter=...)`.
    Raises ModelError as `read_adapter` does, or where a matrix does not fit; nothing is merged then.
    """
    adapter = read_adapter(path, base_sha256)
    matrices = {
        f"layers.{index}.{short}": getattr(layer, short)
        for index, layer in enumerate(weights.layers)
        for short in ("qkv", "o", "gate_up", "down")
    }
    adapter.check({name: tuple(matrix.shape) for name, matrix in matrices.items()})
    for name in adapter.pairs:
        adapter.merge(name, matrices[name])
    return adapter
