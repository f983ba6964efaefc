"""Reads a GGUF file (version 2 or 3, little-endian): metadata, tensor shapes, rows as float32.

The format is that of ggml's `docs/gguf.md`. Every count and offset is checked against the file's
size before it is used, so a damaged file ends in a `ModelError` and never in a long loop.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from engine.errors import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32


class _Damaged(Exception):
    """What is wrong, as the end of a sentence."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """`shape` is in row-major order (the file stores it reversed); `offset` is from the file's start."""

    shape: tuple[int, ...]
    quantisation: GGMLQuantizationType
    offset: int

    @property
    def row_bytes(self) -> int:
        block, block_bytes = GGML_QUANT_SIZES[self.quantisation]
        return int(self.shape[-1] // block * block_bytes)

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])


class _Cursor:
    """Walks the header. Reading past the end raises `_Damaged`."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.offset = 0

    def _take(self, size: int) -> int:
        start, self.offset = self.offset, self.offset + size
        if self.offset > len(self._data):
            raise _Damaged("its header ends early")
        return start

    def number(self, code: str) -> Any:
        form = struct.Struct("<" + code)
        return form.unpack_from(self._data, self._take(form.size))[0]

    def string(self) -> str:
        size = int(self.number("Q"))
        start = self._take(size)
        try:
            return str(self._data[start : start + size], "utf-8")
        except UnicodeDecodeError as error:
            raise _Damaged("a string of its header is not UTF-8") from error

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.number(self._scalar(kind))
        kind, count = int(self.number("I")), int(self.number("Q"))
        if kind == _STRING:
            self._fits(count, 8)
            return [self.string() for _ in range(count)]
        form = self._scalar(kind)
        self._fits(count, struct.calcsize("<" + form))
        values = struct.Struct(f"<{count}{form}")
        return list(values.unpack_from(self._data, self._take(values.size)))

    def _scalar(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise _Damaged(f"its header holds a value of unknown kind {kind}")
        return _SCALARS[kind]

    def _fits(self, count: int, least_bytes: int) -> None:
        if count * least_bytes > len(self._data) - self.offset:
            raise _Damaged("its header ends early")


class GGUFFile:
    """An open GGUF file. `metadata` and `tensors` are read at once, tensor data on demand."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._data: NDArray[np.uint8] = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
        except OSError as error:
            raise ModelError(f"model file {path} cannot be read: {error.strerror or error}") from error
        except ValueError as error:  # an empty file cannot be mapped
            raise ModelError(f"model file {path} is empty; fetch or copy it again") from error
        try:
            self.metadata, self.tensors = self._header()
        except _Damaged as error:
            raise ModelError(f"model file {path} is damaged: {error}; fetch or copy it again") from error

    def _header(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        cursor = _Cursor(self._data.data)
        if cursor.number("I") != 0x46554747:
            raise _Damaged("it is not a GGUF file")
        version = cursor.number("I")
        if version not in (2, 3):
            raise _Damaged(f"its version is {version}, 2 and 3 are known")
        tensor_count, value_count = cursor.number("Q"), cursor.number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(value_count):
            key = cursor.string()
            metadata[key] = cursor.value(cursor.number("I"))
        found = {}
        for _ in range(tensor_count):
            name = cursor.string()
            found[name] = self._tensor(name, cursor)
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise _Damaged(f"its alignment is {alignment}")
        start = -(-cursor.offset // alignment) * alignment
        tensors = {name: GGUFTensor(t.shape, t.quantisation, t.offset + start) for name, t in found.items()}
        for name, tensor in tensors.items():
            if tensor.offset + tensor.rows * tensor.row_bytes > len(self._data):
                raise _Damaged(f"it ends before the data of {name}")
        return metadata, tensors

    @staticmethod
    def _tensor(name: str, cursor: _Cursor) -> GGUFTensor:
        dimensions = int(cursor.number("I"))
        if not 1 <= dimensions <= 4:
            raise _Damaged(f"{name} has {dimensions} dimensions")
        shape = tuple(int(cursor.number("Q")) for _ in range(dimensions))[::-1]
        kind = cursor.number("I")
        try:
            quantisation = GGMLQuantizationType(kind)
        except ValueError as error:
            raise _Damaged(f"{name} is stored in the unknown type {kind}") from error
        if shape[-1] % GGML_QUANT_SIZES[quantisation][0]:
            raise _Damaged(f"rows of {name} are not whole blocks of {quantisation.name}")
        return GGUFTensor(shape, quantisation, int(cursor.number("Q")))

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        """Rows [start, stop) of a tensor as float32 [stop - start, columns], a copy; a vector is one row."""
        tensor = self.tensors[name]
        size = tensor.row_bytes
        raw = self._data[tensor.offset + start * size : tensor.offset + stop * size].reshape(-1, size)
        dequantise: Callable[..., NDArray[np.float32]] = quants.dequantize
        if tensor.quantisation is GGMLQuantizationType.F32:
            return raw.view(np.float32).copy()
        try:
            with np.errstate(all="ignore"):  # what comes out is checked for numbers that are none
                return dequantise(raw, tensor.quantisation)
        except NotImplementedError as error:
            raise ModelError(
                f"{self.path} stores {name} as {tensor.quantisation.name}, which cannot be read; "
                "use a file in another quantisation"
            ) from error
