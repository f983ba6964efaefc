"""Builds all kernels that the tests reach: a process that has loaded a model once compiles nothing more.

In a process of its own, so that the tests find the card as they expect it.
"""

from __future__ import annotations

from engine.config import EngineConfig
from engine.cuda.build import build_kernels
from tests.gpu.conftest import QWEN, SMOL


def main() -> None:
    for shape in (SMOL, QWEN):  # both sizes of heads
        for config in (EngineConfig(device="cuda"), EngineConfig(device="cuda", dtype="bfloat16")):
            for kernel in build_kernels(shape, config):
                print(f"building {kernel}", flush=True)


if __name__ == "__main__":
    main()
