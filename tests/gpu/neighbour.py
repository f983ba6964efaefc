"""Another process on the card: holds as much memory as it is told on standard input, until it ends.

`leave N` fills the card so that N MiB are free by NVML and prints what is; `free` lets go of it all.
"""

from __future__ import annotations

import sys

import torch

from engine.cuda.nvml import MIB, read_card


def fill(leave_mib: int) -> list[torch.Tensor]:
    held: list[torch.Tensor] = []
    while (spare := read_card().free // MIB - leave_mib) >= 2:
        held.append(torch.empty((spare // 2 * 2) * MIB, dtype=torch.uint8, device="cuda"))
    return held


def main() -> None:
    torch.empty(1, device="cuda")
    held: list[torch.Tensor] = []
    print("ready", flush=True)
    for line in sys.stdin:
        held.clear()
        torch.cuda.empty_cache()
        if line.startswith("leave"):
            held.extend(fill(int(line.split()[1])))
        print(read_card().free // MIB, flush=True)


if __name__ == "__main__":
    main()
