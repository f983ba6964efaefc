"""A child of the server whose card fails for good: `python -m tests.gpu.faulty_child FILE CHANNEL`.

A step that finds FILE waits as long as it reads `hold`, and then reads outside a tensor on the card: a
device-side assertion, after which every call of this process to the card fails.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from engine.batch import StepRow
from engine.cuda.runner import CudaRunner
from engine.runner import InFlight, Read
from mcp_discovery.processes import child
from tests.faults.child import fails_now

if __name__ == "__main__":
    file, launch = Path(sys.argv[1]), CudaRunner.launch

    def failing(self: CudaRunner, rows: list[StepRow], reads: list[Read]) -> InFlight:
        if fails_now(file):
            with torch.cuda.stream(self._stream):
                outside = torch.full((32,), 1 << 30, device="cuda")
                torch.zeros(4, device="cuda")[outside]
        return launch(self, rows, reads)

    CudaRunner.launch = failing  # type: ignore[method-assign, assignment]
    sys.exit(child.main(int(sys.argv[-1])))
