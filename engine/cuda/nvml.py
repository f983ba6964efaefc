"""The card as NVML sees it: read to refuse and to verify, never to size."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from engine.errors import EngineError

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class CardMemory:
    """Bytes of one card, all processes together."""

    name: str
    driver: str
    total: int
    free: int

    @property
    def used(self) -> int:
        return self.total - self.free


def read_card() -> CardMemory:
    """The first visible card, without creating a CUDA context. Raises EngineError without NVML."""
    with _nvml() as nvml:
        handle = first_card(nvml)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        return CardMemory(
            name=str(nvml.nvmlDeviceGetName(handle)),
            driver=str(nvml.nvmlSystemGetDriverVersion()),
            total=int(memory.total),
            free=int(memory.free),
        )


def process_bytes(pid: int) -> int | None:
    """What NVML charges to a process; None where it does not list it (another PID namespace)."""
    with _nvml() as nvml:
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(first_card(nvml)):
            if process.pid == pid and process.usedGpuMemory is not None:
                return int(process.usedGpuMemory)
    return None


def first_card(nvml: Any) -> Any:
    """NVML's handle of the first entry of CUDA_VISIBLE_DEVICES, an index or a UUID."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0"
    if first.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(first))
    return nvml.nvmlDeviceGetHandleByUUID(first)


@contextmanager
def _nvml() -> Iterator[Any]:
    try:
        import pynvml
    except ImportError as error:
        raise EngineError("nvidia-ml-py is not installed: install mcp-discovery[cuda]") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise EngineError(f"no NVIDIA card can be read here ({error}): serve with --device cpu") from error
    try:
        yield pynvml
    except pynvml.NVMLError as error:
        raise EngineError(f"the card cannot be read ({error}): see CUDA_VISIBLE_DEVICES") from error
    finally:
        pynvml.nvmlShutdown()
