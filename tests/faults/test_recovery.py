"""The whole server over a device that fails: calls end once, the process is replaced, or the server stops."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mcp_discovery.certificates import Pki
from tests.clients.conftest import small_catalogue
from tests.clients.raw import MODERN, call_message, headers, request
from tests.clients.server import WAIT_S, Process, running
from tests.ends import is_gone
from tests.faults.tiny_model import make_model

__all__ = ["small_catalogue"]  # a fixture
CALLS = 6
ANSWERS = ("matched", "no_match")  # of a model that knows nothing


def options(folder: Path, catalogue: Path) -> dict[str, Any]:
    """Settings of a server that starts in a moment."""
    return {
        "CATALOG__PATHS": catalogue,
        "ENGINE__MODEL": make_model(folder / "model"),
        "ENGINE__MAX_PAGES": 2000,
        "ENGINE__THREADS": 1,
        "RECOVERY__BACKOFF_S": 0.1,
    }


@contextmanager
def failing(pki: Pki, folder: Path, catalogue: Path, **settings: Any) -> Iterator[tuple[Process, Path]]:
    """A server and the file that makes its device fail."""
    trip = folder / "trip"
    command = ("tests.faults.serve", "tests.faults.child", str(trip))
    with running(pki, folder, command, **(options(folder, catalogue) | settings)) as process:
        yield process, trip


def call(server: Process, query: str) -> dict[str, Any]:
    body = call_message(MODERN, query, limit=20, timeout_ms=60_000)
    reply = request(server.host, server.port, server.pki.ca, body=body, fields=headers(MODERN))
    result: dict[str, Any] = reply.json["result"]["structuredContent"]
    return result


def status(server: Process) -> dict[str, Any]:
    return json_of(f"{server.admin}/status.json")


def json_of(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=WAIT_S) as reply:
        shown: dict[str, Any] = json.load(reply)
    return shown


def replace(file: Path, text: str) -> None:
    """In one step: the other process must not read half of it."""
    file.with_suffix(".new").write_text(text)
    file.with_suffix(".new").replace(file)


def await_lines(server: Process, text: str, count: int) -> None:
    """Waits until the server has printed `count` lines with `text`."""
    pause = threading.Event()
    for _ in range(int(WAIT_S / 0.05)):
        if server.output.count(text) >= count:
            return
        pause.wait(0.05)  # another process's output has no event to wait for
    raise AssertionError(server.output)


def test_a_device_fault_ends_every_call_once_and_the_next_process_serves(
    pki: Pki, small_catalogue: Path, tmp_path: Path
) -> None:
    with failing(pki, tmp_path, small_catalogue) as (server, trip), ThreadPoolExecutor(CALLS) as pool:
        trip.write_text("hold")
        answers = [pool.submit(call, server, f"send an email to number {n}") for n in range(CALLS)]
        server.until(lambda shown: shown["in_flight"] == CALLS and shown["pages"]["held"] > 0)
        replace(trip, "once")
        results = [answer.result(WAIT_S) for answer in answers]
        assert {result["status"] for result in results} == {"failed"}
        assert {result["error"]["code"] for result in results} == {"device_fault"}
        await_lines(server, "try:", 2)
        assert call(server, "send an email")["status"] in ANSWERS
        (process,) = status(server)["processes"]
        assert (process["restarts"], process["last_failure"]) == (1, "a step failed on the device")
        with urllib.request.urlopen(f"{server.admin}/metrics", timeout=WAIT_S) as reply:
            assert b'mcp_discovery_restarts_total{process="the serving process"} 1.0' in reply.read()
    ledger = re.findall(r"stopped: (.*)", server.output)
    assert "'received': 6" in ledger[0]
    assert "'failed': 6" in ledger[0]
    assert "'in_flight': 0" in ledger[0]
    assert server.popen.returncode == 0
    assert "Traceback" not in server.output.replace("a step failed; the engine stops\nTraceback", "")


def test_a_device_that_fails_again_and_again_stops_the_server(
    pki: Pki, small_catalogue: Path, tmp_path: Path
) -> None:
    settings = {"RECOVERY__RESTARTS": 1}
    with failing(pki, tmp_path, small_catalogue, **settings) as (server, trip):
        trip.write_text("always")
        assert call(server, "send an email")["status"] in ("failed", "refused")
        assert server.popen.wait(WAIT_S) == 70
    assert "after 1 restarts in a row; the server stops" in server.output


def test_a_serving_process_that_is_killed_is_replaced(
    pki: Pki, small_catalogue: Path, tmp_path: Path
) -> None:
    with running(pki, tmp_path, **options(tmp_path, small_catalogue)) as server:
        (child,) = children(server.popen.pid)
        os.kill(child, signal.SIGKILL)
        await_lines(server, "try:", 2)
        assert call(server, "send an email")["status"] in ANSWERS
        assert status(server)["processes"][0]["last_failure"] == "ended by SIGKILL"
        (child,) = children(server.popen.pid)
        server.popen.kill()
        assert is_gone(child)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
