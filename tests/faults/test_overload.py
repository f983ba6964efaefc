"""The whole server under more load than it can carry, and stopped in the middle of it."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.contamination import Tolerance
from benchmarks.ladder.host import resident_bytes, tree
from benchmarks.ladder.wire import Endpoint
from benchmarks.memory_trace import ProcessProbe, Trace
from benchmarks.overload.crowd import Crowd, beside_a_stop, of_all_kinds
from benchmarks.overload.known import Known, texts
from benchmarks.overload.site import Running
from benchmarks.serving import Server
from mcp_discovery.certificates import Pki
from tests.clients.conftest import small_catalogue
from tests.clients.raw import MODERN, call_message, headers, request
from tests.clients.server import WAIT_S, Process, running
from tests.faults.test_recovery import failing, options, replace

__all__ = ["small_catalogue"]  # a fixture
KNOWN = Known(texts(16, 2), {}, Tolerance())  # of a model that knows nothing, nothing is compared
CALLS = 5


def site_of(server: Process) -> Running:
    pids = tuple(tree(server.popen.pid))
    started = Server(server.host, server.port, server.pki.ca, server.popen.pid, 0.0, "", server.admin)
    endpoint = Endpoint(server.host, server.port, "/mcp", server.pki.ca)
    return Running(started, endpoint, pids, Trace(ProcessProbe(lambda: resident_bytes(pids))))


def test_a_crowd_that_hangs_up_and_hurries_is_accounted_for(
    pki: Pki, small_catalogue: Path, tmp_path: Path
) -> None:
    """In so few pages that calls wait for them."""
    settings = options(tmp_path, small_catalogue) | {"ENGINE__MAX_PAGES": 120}
    with running(pki, tmp_path, **settings) as server:
        asked = Crowd(30, 3.0, 5_000, hang_up_share=0.3, deadline_share=0.3)
        found = of_all_kinds(site_of(server), KNOWN, asked)
    assert found["failed"] == 0, found["failures"]
    assert found["imbalance"] == ""
    assert not any(found["at_rest"].values())
    assert found["refusals_wrong"] == 0, found["wrong_refusals"]
    assert min(found["answered"], found["hung_up"], found["refused"]) > 0
    assert 0 < found["account"]["cancelled"] <= found["hung_up"]


def test_a_server_that_is_stopped_loses_nothing(pki: Pki, small_catalogue: Path, tmp_path: Path) -> None:
    with running(pki, tmp_path, **options(tmp_path, small_catalogue)) as server:
        asked = Crowd(8, 2.0, 5_000, hang_up_share=0.0, deadline_share=0.0)
        found = beside_a_stop(site_of(server), KNOWN, asked, 1.0)
    assert found["failed"] == 0, found["failures"]
    assert found["imbalance"] == ""
    assert not any(found["at_rest"].values())
    assert found["account"]["received"] == found["calls"]


@pytest.mark.parametrize("timeout_ms", [300, 60_000])
def test_calls_that_run_when_the_server_is_stopped_end_once(
    pki: Pki, small_catalogue: Path, tmp_path: Path, timeout_ms: int
) -> None:
    """Their deadlines pass while no process runs, or do not: refused then, and answered else."""

    def call(number: int) -> dict[str, Any]:
        body = call_message(MODERN, f"send an email to number {number}", timeout_ms=timeout_ms)
        reply = request(server.host, server.port, pki.ca, body=body, fields=headers(MODERN))
        structured: dict[str, Any] = reply.json["result"]["structuredContent"]
        return structured

    with failing(pki, tmp_path, small_catalogue) as (server, trip), ThreadPoolExecutor(CALLS) as pool:
        before = server.accounting()
        pids = tree(server.popen.pid)
        trip.write_text("hold")  # whatever the machine does, no call has ended when the server is stopped
        answers = [pool.submit(call, number) for number in range(CALLS)]
        server.until(lambda shown: shown["received"] == before["received"] + CALLS)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        threading.Event().wait(0.5)  # what no process sees has no event to wait for
        replace(trip, "go")
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        results = [answer.result(WAIT_S) for answer in answers]
        after = server.until(lambda shown: shown["in_flight"] == 0 and shown["pages"]["held"] == 0)
    assert after["received"] == before["received"] + CALLS
    assert (after["failed"], after["cancelled"]) == (before["failed"], before["cancelled"])
    if timeout_ms < 500:
        assert {result["refusal"]["code"] for result in results} == {"deadline"}
        assert after["refused"] == {"deadline": CALLS}
    else:
        assert {result["status"] for result in results} <= {"matched", "no_match"}
