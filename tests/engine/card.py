"""A card that is not there: torch's allocator, streams and captures by their rules, tensors without data.

Code that would run on a card runs here on tensors of the device `meta`. What it allocates is counted as
torch's caching allocator would: sizes are multiples of 512; up to 1 MiB they lie in segments of 2 MiB, up to
10 MiB in segments of 20 MiB, above in one of their own, a multiple of 2 MiB; a segment serves one stream and
one pool, and each capture that names no pool has its own. Beside what Python sees, matrix products keep 32
MiB for each thread and stream, and a reduction that is split across blocks takes scratch (Reduce.cuh).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

MIB = 1 << 20
WORKSPACE = 32 * MIB  # of the matrix library on Hopper
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
THREADS, MOST_EACH, LEAST_EACH = 512, 256, 16  # of a reduction's block; values a thread
SLOTS = 132 * 2048 // THREADS  # blocks of a reduction that an H200 runs at once
DEFAULT, GENERAL = 0, 0  # the stream and the pool of whoever names none


class ProcessEnds(Exception):
    """Memory ran out inside a capture: torch aborts there."""


@dataclass
class Block:
    size: int
    free: bool = True


@dataclass
class Segment:
    key: tuple[int, int, bool]  # pool, stream, small
    blocks: list[Block]

    @property
    def size(self) -> int:
        return sum(block.size for block in self.blocks)

    def merge(self) -> None:
        merged: list[Block] = []
        for block in self.blocks:
            if merged and merged[-1].free and block.free:
                merged[-1].size += block.size
            else:
                merged.append(block)
        self.blocks = merged


@dataclass
class CachingAllocator:
    cap: int
    segments: list[Segment] = field(default_factory=list)
    peak: int = 0

    @property
    def reserved(self) -> int:
        return sum(segment.size for segment in self.segments)

    def allocate(self, size: int, stream: int, pool: int) -> Block:
        size = max(-(-size // 512) * 512, 512)
        small = size <= MIB
        key = (pool, stream, small)
        fitting = [
            (block.size, place, at)
            for place, segment in enumerate(self.segments)
            if segment.key == key
            for at, block in enumerate(segment.blocks)
            if block.free and block.size >= size
        ]
        if not fitting:
            self._reserve(size, key)
            return self.allocate(size, stream, pool)
        _, place, at = min(fitting)
        segment = self.segments[place]
        block = segment.blocks[at]
        rest = block.size - size
        if rest >= 512 if small else rest > MIB:
            block.size = size
            segment.blocks.insert(at + 1, Block(rest))
        block.free = False
        return block

    def _reserve(self, size: int, key: tuple[int, int, bool]) -> None:
        if size <= MIB:
            size = 2 * MIB
        elif size < 10 * MIB:
            size = 20 * MIB
        else:
            size = -(-size // (2 * MIB)) * 2 * MIB
        if self.reserved + size > self.cap and key[0] == GENERAL:
            self.empty_cache()
        if self.reserved + size > self.cap:
            if key[0] != GENERAL:
                raise ProcessEnds
            raise torch.OutOfMemoryError(f"Tried to allocate {size / MIB:.2f} MiB.")
        self.segments.append(Segment(key, [Block(size)]))
        self.peak = max(self.peak, self.reserved)

    def free(self, block: Block) -> None:
        block.free = True
        for segment in self.segments:
            segment.merge()

    def empty_cache(self) -> None:
        """Captures keep what their pools hold."""
        self.segments = [
            segment
            for segment in self.segments
            if segment.key[0] != GENERAL or not all(block.free for block in segment.blocks)
        ]


def scratch_bytes(rows: int, columns: int) -> tuple[int, int]:
    """(partial results, semaphores) of a float32 maximum with its index over the last axis (Reduce.cuh)."""
    each = -(-columns // THREADS)
    if each < MOST_EACH or rows > SLOTS:
        return (0, 0)
    blocks = max(min(-(-SLOTS // rows), -(-each // LEAST_EACH)), -(-each // MOST_EACH))
    return 16 * rows * blocks, 4 * rows


class Card:
    """Counts; `watching` makes this thread's tensors of the device `meta` those of the card."""

    def __init__(self) -> None:
        self.numbers = count(1)
        self._streams = threading.local()
        self.clear(0)

    def clear(self, cap: int) -> None:
        """As in a new process, with at most `cap` bytes for torch."""
        self.allocator = CachingAllocator(cap)
        self.pool = GENERAL  # that allocations come from: a capture's while one runs
        self._live: dict[int, tuple[StorageWeakRef, Block]] = {}
        self._workspaces: dict[tuple[int, int], Block] = {}

    @property
    def stream(self) -> int:
        return getattr(self._streams, "current", DEFAULT)

    @contextmanager
    def on_stream(self, stream: int) -> Iterator[None]:
        before, self._streams.current = self.stream, stream
        try:
            yield
        finally:
            self._streams.current = before

    @contextmanager
    def capturing(self, pool: int) -> Iterator[None]:
        self.sweep()
        self.allocator.empty_cache()
        self.pool = pool
        try:
            yield
        finally:
            self.pool = GENERAL

    def sweep(self) -> None:
        """Frees what nobody references any more."""
        for number in [number for number, (held, _) in self._live.items() if held.expired()]:
            self.allocator.free(self._live.pop(number)[1])

    def see(self, tensor: Tensor) -> None:
        """Counts the tensor's storage where it is new."""
        storage = tensor.untyped_storage()
        self.sweep()
        if storage._cdata not in self._live:
            block = self.allocator.allocate(storage.nbytes(), self.stream, self.pool)
            self._live[storage._cdata] = (StorageWeakRef(storage), block)

    def take_inside(self, operation: str, arguments: tuple[Any, ...]) -> None:
        """What an operation takes and Python does not see."""
        self.sweep()
        user = (threading.get_ident(), self.stream)
        if operation in PRODUCTS and user not in self._workspaces:
            self._workspaces[user] = self.allocator.allocate(WORKSPACE, self.stream, self.pool)
        if operation == "max" and len(arguments) > 1 and arguments[1] in (-1, arguments[0].dim() - 1):
            rows, columns = arguments[0].shape
            sizes = [size for size in scratch_bytes(rows, columns) if size]
            for block in [self.allocator.allocate(size, self.stream, self.pool) for size in sizes]:
                self.allocator.free(block)

    @contextmanager
    def watching(self) -> Iterator[None]:
        with _Watch(self):
            yield


class _Watch(TorchDispatchMode):
    """Runs nothing that has a place for its result; of all others sees what they allocate."""

    def __init__(self, card: Card) -> None:
        super().__init__()
        self._card = card

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with self:  # what torch composes of other operations, as its parts
            outputs = func.decompose(*args, **kwargs)
        if outputs is not NotImplemented:
            return outputs
        given = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
        schema = func._schema
        operation = schema.name.removeprefix("aten::")
        for tensor in given:  # that of `torch.tensor` is first seen here
            if tensor.is_meta:
                self._card.see(tensor)
        if any(tensor.is_meta for tensor in given):
            self._card.take_inside(operation, args)
            results = [kwargs[each.name] for each in schema.arguments if each.is_out]
            if results:
                return results[0] if len(results) == 1 else tuple(results)
            if operation.endswith("_") and not operation.startswith("_"):
                return args[0]
            if operation == "_to_copy" and kwargs.get("device") == torch.device("cpu"):
                return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        outputs = func(*args, **kwargs)
        for tensor in tree_flatten(outputs)[0]:
            if isinstance(tensor, Tensor) and tensor.is_meta:
                self._card.see(tensor)
        return outputs


class _Graph:
    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


def install(patch: pytest.MonkeyPatch, card: Card) -> None:
    """Puts `card` in the place of torch's for the length of a test."""
    zeros = torch.zeros

    @contextmanager
    def graph(cuda_graph: _Graph, pool: int | None = None, stream: Any = None) -> Iterator[None]:
        with card.capturing(next(card.numbers) if pool is None else pool), card.on_stream(stream.number):
            yield

    def unpinned(*size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return zeros(*size, **options)

    nothing = SimpleNamespace(record=lambda stream: None, synchronize=lambda: None)
    cuda = {
        "Stream": lambda device: SimpleNamespace(number=next(card.numbers), synchronize=lambda: None),
        "stream": lambda stream: card.on_stream(stream.number),
        "graph": graph,
        "CUDAGraph": _Graph,
        "graph_pool_handle": lambda: next(card.numbers),
        "Event": lambda: nothing,
        "memory_reserved": lambda: card.allocator.reserved,
        "get_device_properties": lambda device: SimpleNamespace(multi_processor_count=132),
    }
    for name, value in cuda.items():
        patch.setattr(torch.cuda, name, value)
    patch.setattr(torch, "zeros", unpinned)
    kernels = ModuleType("engine.cuda.kernels")
    for name in ("rms_norm", "rotate_append", "silu_mul"):
        setattr(kernels, name, lambda *arguments, **named: None)
    patch.setitem(sys.modules, "engine.cuda.kernels", kernels)
    module = SimpleNamespace(plan=lambda *arguments: [0] * 15, paged_run=lambda *arguments: None)
    patch.setattr("engine.attention.flashinfer.load_module", lambda *arguments: module)
