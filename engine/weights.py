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

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.config import ModelShape
from engine.errors import ModelError
from engine.model_files import Source, check_tensors, open_model, parts_of, weight_tensors

_ROWS_AT_ONCE = 4096  # rows dequantised together: bounds what a load needs beyond its result


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
    source = open_model(path)
    check_tensors(path, source)
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


def _fill(path: Path, source: Source, name: str, target: Tensor) -> None:
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


def _chunks(source: Source, name: str) -> Iterator[tuple[str, int, int]]:
    """(part, start, stop): a tensor in runs of rows, each a whole number of heads."""
    head = source.shape.head_dim
    step = max(_ROWS_AT_ONCE // head, 1) * head
    for part in parts_of(source, name):
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
