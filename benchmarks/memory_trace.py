"""Memory over a run: a thread samples it all the time, and keeps the highest of each quarter second.

On a card the figure is NVML's, all processes together, less what was in use before the server started; on
a CPU it is the resident memory of the server's largest process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

MIB = 1 << 20
INTERVAL_S, KEPT_S = 0.02, 0.25


@dataclass(frozen=True, slots=True)
class Sample:
    """Bytes in use, and percent of the time that the card ran kernels, None where that is not known."""

    used: int
    busy_percent: int | None = None


class Probe(Protocol):
    """Something that can be sampled, and what it is."""

    @property
    def source(self) -> str: ...

    def read(self) -> Sample: ...


class CardProbe:
    """The first visible card. Raises EngineError where there is none."""

    source = "NVML, the whole card, less what was in use before the server"

    def __init__(self, baseline: int | None = None) -> None:
        import pynvml

        from engine.cuda.nvml import first_card, read_card

        self.baseline = read_card().used if baseline is None else baseline
        self._nvml = pynvml
        pynvml.nvmlInit()
        self._handle = first_card(pynvml)

    def read(self) -> Sample:
        memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        # As engine.cuda.nvml counts: what is reserved for the driver is not free either.
        used = int(memory.total) - int(memory.free) - self.baseline
        return Sample(used, int(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu))


@dataclass(frozen=True, slots=True)
class ProcessProbe:
    """The memory of a server on a CPU; `read_bytes` reads it."""

    read_bytes: Callable[[], int]
    source: str = "resident memory of the server's largest process"

    def read(self) -> Sample:
        return Sample(self.read_bytes())


@dataclass
class Trace:
    """Samples a probe until it is closed; a context manager. Points are (seconds, highest MiB)."""

    probe: Probe
    points: list[tuple[float, float]] = field(default_factory=list)
    marks: list[tuple[float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._highest = 0
        self._busy: list[int] = []
        self._error: Exception | None = None
        self.thread = threading.Thread(target=self._run, name="memory trace", daemon=True)

    def __enter__(self) -> Trace:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self.thread.join()

    def mark(self, text: str) -> None:
        """Names what begins now."""
        self.marks.append((round(time.monotonic() - self._began, 2), text))

    def take(self) -> tuple[float, float | None]:
        """Peak MiB, and the card's mean busy percent, since the last call. Raises RuntimeError where
        sampling stopped."""
        if self._error is not None:
            raise RuntimeError(f"the memory can no longer be sampled: {self._error}")
        with self._lock:
            highest, busy = self._highest, self._busy
            self._highest, self._busy = 0, []
        return highest / MIB, sum(busy) / len(busy) if busy else None

    def as_json(self, plan_mib: float | None) -> dict[str, Any]:
        """`plan_mib` is what the server may take."""
        return {
            "source": self.probe.source,
            "interval_ms": INTERVAL_S * 1000,
            "plan_mib": plan_mib,
            "peak_mib": max((mib for _, mib in self.points), default=None),
            "points": self.points,
            "marks": self.marks,
        }

    def _run(self) -> None:
        bucket, ends = 0, time.monotonic() + KEPT_S
        try:
            while not self._stop.wait(INTERVAL_S):
                sample = self.probe.read()
                bucket = max(bucket, sample.used)
                with self._lock:
                    self._highest = max(self._highest, sample.used)
                    if sample.busy_percent is not None:
                        self._busy.append(sample.busy_percent)
                now = time.monotonic()
                if now >= ends:
                    self.points.append((round(now - self._began, 2), round(bucket / MIB, 1)))
                    bucket, ends = 0, now + KEPT_S
        except Exception as error:  # noqa: BLE001 - whatever it is, `take` tells who asks for the peak
            self._error = error
