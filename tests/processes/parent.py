"""A parent in a process of its own, to be killed: `python -m tests.processes.parent FILE ACT...`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.processes.test_supervisor import supervise

if __name__ == "__main__":

    def say(served: int) -> None:
        print(served, "served", flush=True)

    sys.exit(asyncio.run(supervise(Path(sys.argv[1]), *sys.argv[2:], on_ready=say)))
