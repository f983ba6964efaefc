"""Stacks of a running process, sampled from outside by py-spy, and what they add up to.

py-spy is a tool for development and no dependency: `pip install py-spy`. It needs the right to trace the
process (root, or CAP_SYS_PTRACE in a container), and stops it for a moment at each sample.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

START_S = 30.0  # most that py-spy takes beside its samples
_THREAD = re.compile(r"thread \((0x[0-9A-Fa-f]+|\d+)\)(?:: (.*))?")
_FRAME = re.compile(r"(.*) \((.*?)(?::(\d+))?\)")
_ERRORS = re.compile(r"Errors: (\d+)")
ROOMS = {  # the first whose pattern begins a file's name
    "engine: core": r"engine/(core|task|sequence|queue|pages|rate|admission)\.py",
    "engine: schedule and batch": r"engine/(schedule|batch|decode)\.py",
    "engine: loop": r"engine/(engine|local|client)\.py",
    "engine: runner": r"engine/(runner|model|cuda/|attention/)",
    "engine: wire": r"engine/wire/",
    "engine: validation, tokenizer": r"engine/(validate|tokenizer|request)\.py|tokenizers/",
    "discovery": r"mcp_discovery/(discovery/|tool\.py|service\.py|gate\.py|arguments\.py)",
    "transport": r"mcp_discovery/transport/",
    "observation": r"mcp_discovery/observe/",
    "processes": r"mcp_discovery/",
    "torch, FlashInfer": r"torch/|flashinfer/|triton/",
    "HTTP (uvicorn, starlette)": r"uvicorn/|starlette/|httptools/|sse_starlette/",
    "MCP and its types": r"mcp/|mcp_types/|pydantic/|anyio/|jsonschema/",
    "asyncio": r"asyncio/|uvloop/|selectors\.py|ssl\.py",
    "JSON": r"json/|msgspec/",
    "threading": r"threading\.py|queue\.py|concurrent/",
}
OTHER = "other"

Key = TypeVar("Key", bound=Hashable)


class SpyFailed(Exception):
    """Why there are no samples, in a sentence."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A function, the file it is in as py-spy shortens it, and the line it was at (0: not known)."""

    function: str
    file: str
    line: int

    @property
    def room(self) -> str:
        return next((name for name, begins in ROOMS.items() if re.match(begins, self.file)), OTHER)


@dataclass(frozen=True, slots=True)
class Stack:
    """Frames from the outermost to the innermost, and how many samples found them so."""

    thread: str
    tid: int  # of the system
    frames: tuple[Frame, ...]
    samples: int


@dataclass(frozen=True, slots=True)
class Profile:
    """Samples of one process; `moments` are how often it was looked at."""

    stacks: list[Stack]
    moments: int

    def share(self, samples: int) -> float:
        return round(samples / self.moments, 4)

    def threads(self) -> dict[tuple[int, str], float]:
        """(system's number, name) -> share of the moments at which a stack of the thread was found."""
        return self._shares(lambda stack: [(stack.tid, stack.thread)])

    def rooms_self(self) -> dict[str, float]:
        """By the innermost frame's room."""
        return self._shares(lambda stack: [stack.frames[-1].room])

    def rooms_inclusive(self) -> dict[str, float]:
        """By every room that a stack goes through, once."""
        return self._shares(lambda stack: {frame.room for frame in stack.frames})

    def functions_self(self, tid: int | None = None) -> dict[tuple[str, str], float]:
        """By the innermost (function, file), of all threads or of one."""
        return self._shares(
            lambda stack: (
                [(stack.frames[-1].function, stack.frames[-1].file)] if tid in (None, stack.tid) else []
            )
        )

    def hottest_line(self, function: str, file: str) -> int:
        """The line at which the function itself was found most often."""
        lines: Counter[int] = Counter()
        for stack in self.stacks:
            last = stack.frames[-1]
            if (last.function, last.file) == (function, file):
                lines[last.line] += stack.samples
        return lines.most_common(1)[0][0] if lines else 0

    def _shares(self, keys: Callable[[Stack], Iterable[Key]]) -> dict[Key, float]:
        """Highest first."""
        found: Counter[Key] = Counter()
        for stack in self.stacks:
            for key in keys(stack):
                found[key] += stack.samples
        return {key: self.share(samples) for key, samples in found.most_common()}


@dataclass(frozen=True, slots=True)
class Spy:
    """py-spy with what all its runs have in common."""

    seconds: float = 5.0
    rate: int = 500  # moments a second
    program: str = "py-spy"

    def holding_the_lock(self, pid: int) -> Profile:
        """The stack of the thread that holds the interpreter lock, at the moments at which one does."""
        return self._record(pid, "--gil")

    def all_threads(self, pid: int) -> Profile:
        """The stacks of all Python threads at every moment, of those that wait too."""
        return self._record(pid, "--idle")

    def running(self, pid: int) -> Profile:
        """The stacks of the threads that run, with the interpreter lock or without it."""
        return self._record(pid)

    def _record(self, pid: int, *what: str) -> Profile:
        """Raises SpyFailed."""
        if shutil.which(self.program) is None:
            raise SpyFailed(f"{self.program} is not installed: pip install py-spy")
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "stacks"
            command = [self.program, "record", "--pid", str(pid), "--format", "raw", "--threads", *what]
            command += ["--duration", f"{self.seconds:g}", "--rate", str(self.rate), "--output", str(out)]
            try:
                ran = subprocess.run(
                    command, capture_output=True, text=True, timeout=3 * self.seconds + START_S, check=False
                )
            except subprocess.TimeoutExpired:
                raise SpyFailed(f"{self.program} did not end in time") from None
            if ran.returncode != 0 or not out.exists():
                raise SpyFailed(f"{self.program} failed: {_cause(ran.stderr)}")
            found = _ERRORS.search(ran.stdout + ran.stderr)
            errors = int(found[1]) if found else 0
            return Profile(list(parse(out.read_text("utf-8"))), round(self.seconds * self.rate) - errors)


def _cause(stderr: str) -> str:
    """py-spy's own words, on one line."""
    return " ".join(stderr.split()) or "it said nothing"


def parse(text: str) -> Iterator[Stack]:
    """py-spy's raw format: a line for each different stack, its frames between semicolons, the thread first,
    and how often it was found."""
    for line in text.splitlines():
        stack, _, samples = line.rpartition(" ")
        thread, *frames = stack.split(";")
        found = _THREAD.fullmatch(thread)
        if found is None or not frames:
            continue
        tid = int(found[1], 16 if found[1].startswith("0x") else 10)
        yield Stack(found[2] or "unnamed", tid, tuple(map(_frame, frames)), int(samples))


def _frame(text: str) -> Frame:
    found = _FRAME.fullmatch(text)
    return Frame(found[1], found[2], int(found[3] or 0)) if found else Frame(text, "", 0)
