"""A server to load, started for one part and ended with it, and what is read of it from outside."""

from __future__ import annotations

import json
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.ladder.host import resident_bytes, tree
from benchmarks.ladder.wire import Endpoint
from benchmarks.memory_trace import MIB, ProcessProbe, Trace
from benchmarks.serving import Server, serving


@dataclass(frozen=True, slots=True)
class Running:
    """A warm server; `pids` are its processes."""

    server: Server
    endpoint: Endpoint
    pids: tuple[int, ...]
    trace: Trace

    @property
    def admin(self) -> str:
        return self.server.admin

    def status(self) -> dict[str, Any]:
        """The object of `/status.json`."""
        with urllib.request.urlopen(f"{self.admin}/status.json", timeout=30.0) as reply:
            shown: dict[str, Any] = json.load(reply)
        return shown

    def resident_mib(self) -> float:
        """Of the process with the engine."""
        return round(resident_bytes(self.pids) / MIB, 1)

    def at_rest(self) -> dict[str, int]:
        """What the engine still holds; all zero when it is idle."""
        engine = self.status()["engine"]
        return {
            "waiting": engine["waiting"],
            "running": engine["running"],
            "held_pages": engine["pages"]["held"],
        }

    def memory(self) -> dict[str, float]:
        """Highest resident MiB since the last call, and what the plan allows."""
        peak, _ = self.trace.take()
        planned = sum(line["bytes"] for line in self.status()["plan"]) / MIB
        return {"resident_peak_mib": round(peak, 1), "planned_mib": round(planned, 1)}


@contextmanager
def running(settings: Mapping[str, object]) -> Iterator[Running]:
    """A server on a CPU with `{"TABLE__KEY": value}`, once it is warm."""
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder), {"ENGINE__DEVICE": "cpu", **settings}) as server,
    ):
        server.await_warm()
        pids = tuple(tree(server.pid))
        endpoint = Endpoint(server.host, server.port, "/mcp", server.ca)
        with Trace(ProcessProbe(lambda: resident_bytes(pids))) as trace:
            yield Running(server, endpoint, pids, trace)
