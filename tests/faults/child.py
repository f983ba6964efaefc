"""A child of the server whose device fails where a file says so: `python -m tests.faults.child FILE CHANNEL`.

A step that finds FILE waits as long as it reads `hold`, and then fails: once, where it reads `once`, not
at all where it reads `go`, else for ever.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from engine.batch import StepRow
from engine.runner import InFlight, Read, TorchRunner
from mcp_discovery.processes import child


def fails_now(file: Path) -> bool:
    """Whether a step is to fail; waits as long as it is to be held."""
    if not file.exists():
        return False
    while (text := file.read_text()) == "hold":
        threading.Event().wait(0.02)  # another process's file has no event to wait for
    if text == "once":
        file.unlink()
    return text != "go"


if __name__ == "__main__":
    file, launch = Path(sys.argv[1]), TorchRunner.launch

    def failing(self: TorchRunner, rows: list[StepRow], reads: list[Read]) -> InFlight:
        if fails_now(file):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return launch(self, rows, reads)

    TorchRunner.launch = failing  # type: ignore[method-assign]
    sys.exit(child.main(int(sys.argv[-1])))
