"""What a server process and its children take of this machine, read from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

PROC = Path("/proc")
TICKS = os.sysconf("SC_CLK_TCK")


def tree(pid: int) -> list[int]:
    """The process and all its descendants that are alive."""
    children: dict[int, list[int]] = {}
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            fields = _fields(folder / "stat")
            if fields:
                children.setdefault(int(fields[1]), []).append(int(folder.name))
    found, new = [], [pid] if (PROC / str(pid)).exists() else []
    while new:
        found += new
        new = [child for parent in new for child in children.get(parent, [])]
    return found


def thread_seconds(pids: Iterable[int]) -> dict[str, float]:
    """CPU seconds so far of each thread, under `process/thread name`; a process's first thread is `main`."""
    found: dict[str, float] = {}
    for pid in pids:
        try:
            threads = list((PROC / str(pid) / "task").iterdir())
        except OSError:
            continue
        for thread in threads:
            fields = _fields(thread / "stat")
            if fields:
                name = "main" if thread.name == str(pid) else f"thread {thread.name}"
                found[f"{pid}/{name}"] = (int(fields[11]) + int(fields[12])) / TICKS
    return found


def busy_seconds() -> float:
    """Seconds so far that the cores this process may use were busy, whoever used them."""
    ours = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    lines = (line.split() for line in (PROC / "stat").read_text(encoding="ascii").splitlines())
    counters = [[int(field) for field in fields] for name, *fields in lines if name in ours]
    idle = 3, 4  # idle, and idle while a disk works
    busy = sum(n for each in counters for at, n in enumerate(each[:8]) if at not in idle)
    return busy / TICKS


def resident_bytes(pids: Iterable[int]) -> int:
    """Resident memory of the largest of these processes: where the engine is."""
    return max((_resident(pid) for pid in pids), default=0)


def _resident(pid: int) -> int:
    try:
        pages = int((PROC / str(pid) / "statm").read_text(encoding="ascii").split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _fields(stat: Path) -> list[str]:
    """The fields of a stat file from the state on, [] where the process is gone."""
    try:
        return stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
