"""Where the bytes of an allowance go: one line a buffer, pages the rest, and the allocation of just that.

`plan_memory` is pure. What a device costs besides weights and pages is told by its `DeviceCosts`;
a line that is a tensor is allocated as the plan has it, the others are what libraries and the
steps themselves take.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from resource import getpagesize
from typing import Protocol

import torch
from torch import Tensor

from engine.batch import KVCache
from engine.config import EngineConfig, ModelShape
from engine.errors import LoadRefused
from engine.model import PaddedOps
from engine.model_files import weight_tensors

MIB = 1 << 20
_ALIGNMENT = 256  # bytes: each weight starts on a multiple of it in the one buffer of weights
_PIECE = 512  # bytes: each tensor of one allocation starts on a multiple of it
_TORCH = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
}
LOGIT_ROWS = 64  # rows of full logits at once
_KERNEL_BYTES = 704 << 10  # oneDNN's for one size of a bfloat16 product; measured with the embedded model
_PRODUCTS = 4  # different ones of a layer


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """One buffer. `shape` and `dtype` say what is allocated; both are empty for what is not ours to
    allocate. `why` is the formula or the measurement that the bytes come from."""

    name: str
    bytes: int
    why: str
    shape: tuple[int, ...] = ()
    dtype: str = ""


def tensor_line(name: str, shape: tuple[int, ...], dtype: str, why: str) -> MemoryLine:
    return MemoryLine(name, math.prod(shape) * element_bytes(dtype), why, shape, dtype)


def element_bytes(dtype: str) -> int:
    return _TORCH[dtype].itemsize


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Lines in the order of their allocation, the pages last. All sizes are bytes."""

    allowance: int
    page_bytes: int
    pages: int
    lines: tuple[MemoryLine, ...]

    @property
    def total(self) -> int:
        return sum(line.bytes for line in self.lines)

    @property
    def tensor_bytes(self) -> int:
        """Of the one allocation of all lines that are tensors (`allocate_at_once`)."""
        return sum(_piece(line) for line in self.lines if line.dtype)

    def pieces(self) -> Iterator[tuple[MemoryLine, int]]:
        """Each of those lines, and where it begins in the allocation."""
        lines = [line for line in self.lines if line.dtype]
        return zip(lines, accumulate(map(_piece, lines), initial=0), strict=False)

    def table(self) -> str:
        """For people: a line each, then the sum and the allowance."""
        wide = max(len(line.name) for line in self.lines)
        rows = [
            f"{line.name:<{wide}}  {line.bytes / MIB:>9.1f} MiB  {_describe(line)}{line.why}"
            for line in self.lines
        ]
        rows.append(
            f"{'total':<{wide}}  {self.total / MIB:>9.1f} MiB  of {self.allowance / MIB:,.0f} allowed"
        )
        return "\n".join(rows)


def _piece(line: MemoryLine) -> int:
    """The bytes of a line in an allocation of several."""
    return -(-line.bytes // _PIECE) * _PIECE


def _describe(line: MemoryLine) -> str:
    return f"{line.dtype} {list(line.shape)}: " if line.dtype else ""


class DeviceCosts(Protocol):
    """What a device and its backend cost besides weights, rope table and pages."""

    @property
    def dtype(self) -> str:
        """Where the configuration leaves it open."""
        ...

    @property
    def step_tokens(self) -> int:
        """Where the configuration leaves it open."""
        ...

    def lines(self, shape: ModelShape, config: EngineConfig) -> list[MemoryLine]: ...


def compute_dtype(config: EngineConfig, costs: DeviceCosts) -> str:
    return costs.dtype if config.dtype == "auto" else config.dtype


def page_dtype(config: EngineConfig, costs: DeviceCosts) -> str:
    return compute_dtype(config, costs) if config.kv_dtype == "auto" else config.kv_dtype


def step_tokens(config: EngineConfig, costs: DeviceCosts) -> int:
    return config.step_tokens or costs.step_tokens


def plan_memory(shape: ModelShape, config: EngineConfig, costs: DeviceCosts) -> MemoryPlan:
    """The plan of an engine. Raises LoadRefused where everything else leaves less than one page.

    One page more than is handed out is allocated: what pads a step is written there.
    """
    dtype, kv_dtype = compute_dtype(config, costs), page_dtype(config, costs)
    fixed = [
        *costs.lines(shape, config),
        tensor_line(
            "weights", (_weight_elements(shape, dtype),), dtype, f"{shape.layers} layers, embeddings"
        ),
        tensor_line("rope table", (shape.context, shape.head_dim), "float32", "cos, sin of each position"),
    ]
    page_bytes = config.page_tokens * shape.kv_bytes_per_token(element_bytes(kv_dtype))
    allowance = config.allowance_mib * MIB
    rest = allowance - sum(line.bytes for line in fixed)
    pages = rest // page_bytes - 1
    if pages < 1:
        _refuse(allowance - rest + 2 * page_bytes, config.allowance_mib)
    if config.max_pages is not None:
        pages = min(pages, config.max_pages)
    cells = (shape.layers, pages + 1, 2, config.page_tokens, shape.kv_heads, shape.head_dim)
    why = f"{pages:,} pages of {config.page_tokens} tokens, and one for padding"
    return MemoryPlan(allowance, page_bytes, pages, (*fixed, tensor_line("pages", cells, kv_dtype, why)))


def _refuse(needed: int, allowance_mib: int) -> None:
    needed_mib = -(-needed // MIB)
    raise LoadRefused(
        f"the engine needs {needed_mib:,} MiB to hold one page and is allowed {allowance_mib:,} MiB: "
        f"{needed_mib - allowance_mib:,} MiB short; raise engine.allowance_mib or choose a smaller model",
        needed_mib=needed_mib,
        free_mib=allowance_mib,
    )


@dataclass(frozen=True, slots=True)
class CPUCosts:
    """A process on a CPU. `process_bytes` is its resident size before the engine: interpreter,
    libraries, and whatever else it holds."""

    process_bytes: int
    dtype: str = "float32"
    step_tokens: int = 512

    def lines(self, shape: ModelShape, config: EngineConfig) -> list[MemoryLine]:
        tokens = step_tokens(config, self)
        width = element_bytes(compute_dtype(config, self))
        keys = min(shape.context, 16_384)
        heads = shape.heads + 2 * shape.kv_heads
        activations = (
            tokens * (4 * shape.hidden + 3 * heads * shape.head_dim + 4 * shape.intermediate) * width
        )
        gathered = 2 * 2 * 16_384 * shape.kv_heads * shape.head_dim * width
        masks = 5 * 2 * tokens * keys * (shape.heads // shape.kv_heads)
        indices = 8 * (8 * tokens + min(config.step_rows, tokens) * -(-shape.context // config.page_tokens))
        sizes = -(-tokens // PaddedOps.ROWS) * _PRODUCTS if compute_dtype(config, self) == "bfloat16" else 0
        return [
            MemoryLine("process", self.process_bytes, "resident before the engine, measured"),
            MemoryLine("serving", config.serving_mib * MIB, "callers' connections and calls, as configured"),
            MemoryLine("activations", activations, f"{tokens} tokens x (4 hidden + 3 qkv + 4 MLP)"),
            MemoryLine("logits", LOGIT_ROWS * shape.vocabulary * 4, f"{LOGIT_ROWS} rows x vocabulary"),
            MemoryLine("attention", gathered + masks, "gathered keys and values of a block, masks"),
            MemoryLine("indices", indices, "positions, slots, page tables of a step"),
            MemoryLine("kernels", sizes * _KERNEL_BYTES, f"oneDNN's for {sizes} sizes of products, measured"),
            MemoryLine("guard", 64 * MIB, "allocator slack"),
        ]


def cpu_costs() -> CPUCosts:
    """Of this process on this machine: bfloat16 where the processor multiplies it, else float32."""
    return CPUCosts(resident_bytes(), "bfloat16" if _multiplies_bfloat16() else "float32")


def _multiplies_bfloat16() -> bool:
    """By the processor's flags and the library behind torch's products; elsewhere bfloat16 is emulated."""
    try:
        flags = re.search(r"^flags\s*:(.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except (OSError, ValueError):
        return False
    native = flags is not None and bool({"avx512_bf16", "amx_bf16"} & set(flags[1].split()))
    return native and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def resident_bytes() -> int:
    """The resident size of this process; 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * getpagesize()


@dataclass(frozen=True, slots=True)
class Allocation:
    """The tensors of a plan, by the names of its lines."""

    plan: MemoryPlan
    tensors: Mapping[str, Tensor]

    @property
    def kv(self) -> KVCache:
        return KVCache(self.tensors["pages"])

    def weights(self, shape: ModelShape) -> dict[str, Tensor]:
        """Views of the one buffer of weights, a tensor for each of `weight_tensors(shape)`."""
        flat = self.tensors["weights"]
        views, start = {}, 0
        for name, size in weight_tensors(shape):
            count = math.prod(size)
            views[name] = flat[start : start + count].view(size)
            start += _aligned(count, flat.dtype.itemsize)
        return views


def allocate(plan: MemoryPlan, device: torch.device) -> Allocation:
    """The tensor lines of a plan and nothing else, zeroed: a kernel may multiply what it masks by zero."""
    return Allocation(
        plan,
        {
            line.name: torch.zeros(line.shape, dtype=_TORCH[line.dtype], device=device)
            for line in plan.lines
            if line.dtype
        },
    )


def allocate_at_once(plan: MemoryPlan, device: torch.device) -> Allocation:
    """As `allocate`, in one piece of device memory: it is there whole or not at all, and what the driver
    gives for it is the sum of the lines, not a rounding of each."""
    whole = torch.zeros(plan.tensor_bytes, dtype=torch.uint8, device=device)
    return Allocation(
        plan,
        {
            line.name: whole[start : start + line.bytes].view(_TORCH[line.dtype]).view(line.shape)
            for line, start in plan.pieces()
        },
    )


def _weight_elements(shape: ModelShape, dtype: str) -> int:
    return sum(_aligned(math.prod(size), element_bytes(dtype)) for _, size in weight_tensors(shape))


def _aligned(elements: int, width: int) -> int:
    step = _ALIGNMENT // width
    return -(-elements // step) * step
