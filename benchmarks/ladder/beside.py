"""The neighbour on the card, started and asked from outside (`benchmarks.neighbour`)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any


class Neighbour:
    """The process; a context manager that ends it. Raises RuntimeError where it does not answer."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.neighbour", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.started = self._line()

    def __enter__(self) -> Neighbour:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(30.0)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def busy(self) -> dict[str, Any]:
        """Lets it decode; what it did since it was last asked."""
        return self._ask("busy")

    def idle(self) -> dict[str, Any]:
        return self._ask("idle")

    def report(self) -> dict[str, Any]:
        return self._ask("report")

    def _ask(self, order: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(order + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError(f"the neighbour has ended with code {self._process.wait()}") from None
        return self._line()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the neighbour has ended with code {self._process.wait()}")
        told: dict[str, Any] = json.loads(line)
        return told
