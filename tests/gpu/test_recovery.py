"""A card that fails for good: calls end, the memory comes back, and the next process serves."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.cuda.nvml import MIB, read_card
from mcp_discovery.certificates import Pki
from tests.clients.conftest import small_catalogue
from tests.clients.server import WAIT_S, running
from tests.conftest import pki
from tests.faults.test_recovery import ANSWERS, await_lines, call, children, replace, status
from tests.faults.tiny_model import make_model
from tests.gpu.conftest import SMOL
from tests.processes.test_supervisor import is_gone

__all__ = ["pki", "small_catalogue"]  # fixtures
pytestmark = pytest.mark.gpu
CALLS = 32
NOISE = 4 * MIB  # what NVML's figure may differ by between two looks at the same state
BACKOFF_S = 5.0  # long enough to look at the card between two processes


def test_a_sticky_error_ends_every_call_and_the_next_process_serves(
    pki: Pki, small_catalogue: Path, tmp_path: Path
) -> None:
    settings = {
        "CATALOG__PATHS": small_catalogue,
        "ENGINE__DEVICE": "cuda",
        "ENGINE__MODEL": make_model(tmp_path / "model", SMOL),
        "RECOVERY__BACKOFF_S": BACKOFF_S,
    }
    trip = tmp_path / "trip"
    command = ("tests.faults.serve", "tests.gpu.faulty_child", str(trip))
    before = read_card().used
    with running(pki, tmp_path, command, **settings) as server, ThreadPoolExecutor(CALLS) as pool:
        (first,) = children(server.popen.pid)
        assert call(server, "send an email")["status"] in ANSWERS
        trip.write_text("hold")
        answers = [pool.submit(call, server, f"send an email to number {n}") for n in range(CALLS)]
        server.until(lambda shown: shown["in_flight"] == CALLS)
        replace(trip, "once")
        results = [answer.result(WAIT_S) for answer in answers]
        assert {result["status"] for result in results} == {"failed"}
        assert {result["error"]["code"] for result in results} == {"device_fault"}
        assert is_gone(first)
        assert abs(read_card().used - before) <= NOISE
        await_lines(server, "try:", 2)
        assert call(server, "send an email")["status"] in ANSWERS
        (process,) = status(server)["processes"]
        assert (process["restarts"], process["last_failure"]) == (1, "a step failed on the device")
        assert children(server.popen.pid) != [first]
    assert server.popen.returncode == 0
    assert abs(read_card().used - before) <= NOISE
