"""The envelope of every result file: machine, versions, commit, and the targets beside what was measured."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

FOLDER = Path(__file__).parent
CHANGED = "+changes"  # of a commit from which tracked files differ
UNKNOWN = "unknown"  # a commit where there is no repository
PACKAGES = (
    "torch",
    "flashinfer-python",
    "mcp",
    "starlette",
    "uvicorn",
    "uvloop",
    "httptools",
    "pydantic",
    "msgspec",
    "numpy",
)


@dataclass(frozen=True, slots=True)
class Target:
    """A key of `targets.toml`, such as `cpu.p50_s`, what was measured for it, and which side is good."""

    key: str
    measured: float
    good: Literal["at most", "at least"]

    def as_json(self, targets: Mapping[str, Any]) -> dict[str, Any]:
        table, _, name = self.key.rpartition(".")
        target = targets[table][name]
        hit = self.measured <= target if self.good == "at most" else self.measured >= target
        return {
            "key": self.key,
            "target": target,
            "good": self.good,
            "measured": round(self.measured, 4),
            "hit": hit,
        }


def write(
    benchmark: str,
    results: Mapping[str, Any],
    targets: Sequence[Target] = (),
    *,
    out: Path | None = None,
    top: Mapping[str, Any] | None = None,
) -> Path:
    """Writes `benchmarks/results/BENCHMARK.json` (or `out`) and prints each target's verdict. `top` are
    further keys that stand beside `results`."""
    known = tomllib.loads((FOLDER / "targets.toml").read_text(encoding="utf-8"))
    stood = [target.as_json(known) for target in targets]
    envelope = {
        "benchmark": benchmark,
        "command": command_line(benchmark),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "hardware": hardware(),
        "versions": versions(),
        "targets": stood,
        "results": dict(results),
        **(top or {}),
    }
    path = out or FOLDER / "results" / f"{benchmark}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(envelope, indent=2) + "\n", encoding="utf-8")
    for target in stood:
        verdict = "hit" if target["hit"] else "MISS"
        print(f"{verdict}: {target['key']} {target['measured']} ({target['good']} {target['target']})")
    print(f"wrote {path}")
    return path


def command_line(benchmark: str) -> str:
    """That which started this process."""
    return shlex.join([Path(sys.executable).name, "-m", f"benchmarks.{benchmark}", *sys.argv[1:]])


def commit() -> str:
    """The commit that is checked out, `+changes` where tracked files differ from it; where there is no
    repository, what BENCHMARK_COMMIT says."""
    if told := os.environ.get("BENCHMARK_COMMIT"):
        return told
    try:
        head = _git("rev-parse", "HEAD")
        return head + (CHANGED if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN


def hardware() -> dict[str, Any]:
    """Processor, cores, memory and cards, and how busy the machine is."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_mib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20,
        "cards": _cards(),
        "system": f"{platform.system()} {platform.machine()}",
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def versions() -> dict[str, str]:
    """Python and the packages that matter, as far as they are installed."""
    found = {"python": platform.python_version(), "engine's core": _core()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _core() -> str:
    """How the engine's core runs (docs/operations.md). Nothing is imported for it."""
    spec = find_spec("engine.core")
    return "compiled" if spec and spec.origin and not spec.origin.endswith(".py") else "interpreted"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=FOLDER, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _cards() -> list[str]:
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]
