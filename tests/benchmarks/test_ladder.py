"""The ladder as a command against real servers: its file, its abort, its exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ladder import host, queries
from benchmarks.ladder.driver import Connect, Disconnect, Drivers, Run, Settings, begin_soon
from benchmarks.ladder.options import parse
from benchmarks.ladder.stub import stub
from benchmarks.ladder.wire import Endpoint
from mcp_discovery import model_store
from mcp_discovery.certificates import Pki
from tests.clients.conftest import small_catalogue as small_catalogue
from tests.clients.server import Process, running

WAIT_S = 120.0
BODY = b'{"result":{"structuredContent":{"status":"matched","tools":[]}}}'


@pytest.fixture
def server(pki: Pki, small_catalogue: Path, tmp_path: Path) -> Iterator[Process]:
    model_store.fetch()
    with running(pki, tmp_path, CATALOG__PATHS=small_catalogue) as process:
        yield process


def command(server: Process, out: Path, *more: str) -> list[str]:
    return [
        *(sys.executable, "-m", "benchmarks.ladder", "--url", server.url, "--ca", str(server.pki.ca)),
        *("--admin", server.admin, "--server-pid", str(server.popen.pid), "--out", str(out), *more),
    ]


def test_a_ladder_writes_every_figure_and_its_first_abort_stops_it(server: Process, tmp_path: Path) -> None:
    out = tmp_path / "ladder.json"
    arguments = command(server, out, "--rungs", "1,2", "--seconds", "0.5", "--calls", "2", "--drivers", "2")
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert result["abort"] is None
    assert [rung["clients"] for rung in result["rungs"]] == [1, 2]
    for rung in result["rungs"]:
        assert rung["offered"] == rung["answered"] + rung["refused"] >= 2 * rung["clients"]
        assert (rung["failed"], rung["imbalance"], rung["contaminated"]) == (0, "", None)
        assert 0 < rung["p50_ms"] <= rung["p99_ms"]
        assert rung["memory_peak_mib"] > 100
        assert rung["seconds"] >= 0.5
    assert "not compared" in done.stdout
    told = server.accounting()
    assert told["received"] == sum(rung["offered"] for rung in result["rungs"])
    stopped = subprocess.run(
        [*arguments, "--p99-ms", "0.001"], capture_output=True, text=True, timeout=WAIT_S
    )
    assert stopped.returncode == 1
    result = json.loads(out.read_text())
    assert (result["abort"]["condition"], result["abort"]["clients"]) == ("p99", 1)
    assert len(result["rungs"]) == 1
    assert "ABORT ladder at 1 clients: p99" in stopped.stdout


def test_a_server_killed_midway_stops_the_ladder_by_name(server: Process, tmp_path: Path) -> None:
    out = tmp_path / "ladder.json"
    arguments = command(server, out, "--rungs", "1,2,4,8", "--seconds", "1", "--calls", "1", "--drivers", "1")
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as ladder:
        assert ladder.stdout is not None
        while "1 clients" not in (line := ladder.stdout.readline()):
            assert line, "the ladder ended early"
        for pid in host.tree(server.popen.pid):
            os.kill(pid, signal.SIGKILL)
        told = ladder.stdout.read()
        assert ladder.wait(WAIT_S) == 1
    assert "ABORT" in told
    result = json.loads(out.read_text())
    assert result["abort"]["condition"] in ("failed", "accounting")
    assert result["abort"]["clients"] in (2, 4)
    assert result["abort"]["reason"]
    assert len(result["rungs"]) <= 3


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--url", "https://127.0.0.1:1/mcp"],
        ["--url", "https://127.0.0.1:1/mcp", "--ca", "x", "--start"],
        ["--url", "https://127.0.0.1:1/mcp", "--ca", "x", "--neighbour"],
        ["--start", "--rungs", "0"],
        ["--start", "--rungs", "one"],
        ["--start", "--set", "ENGINE__DEVICE"],
        ["--start", "--parts", "ladder", "burst", "--out", "x"],
    ],
)
def test_a_wrong_command_line_is_told(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_drivers_share_clients_and_queries_and_see_every_answer(tmp_path: Path) -> None:
    with stub(tmp_path, BODY, 1) as endpoint, Drivers(Settings(endpoint), 2) as drivers:
        connected = drivers.each([Connect(share) for share in drivers.share(3)])
        assert sum(len(ran.handshakes) for ran in connected) == 3
        assert not [failure for ran in connected for failure in ran.failures]
        ran = drivers.all(Run("closed", begin_soon(), seconds=0.0, calls=4))
        drivers.all(Disconnect())
    asked = [{call.query for call in each.calls} for each in ran]
    assert not asked[0] & asked[1]
    assert sum(len(each.calls) for each in ran) >= 12
    assert {call.status for each in ran for call in each.calls} == {"matched"}


def test_a_stub_that_is_not_there_is_a_failed_connection(pki: Pki) -> None:
    endpoint = Endpoint.of("https://127.0.0.1:1/mcp", pki.ca)
    with Drivers(Settings(endpoint), 1) as drivers:
        (ran,) = drivers.all(Connect(2))
    assert len(ran.failures) == 2
    assert "no connection" in ran.failures[0]


def test_a_file_of_queries_that_is_none_is_told_by_its_name(pki: Pki, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    endpoint = Endpoint("127.0.0.1", 1, "/mcp", pki.ca)
    with pytest.raises(ValueError, match=r"empty\.jsonl holds no query"):
        Drivers(Settings(endpoint, queries=empty), 1)


def test_the_committed_queries_are_many_and_all_different() -> None:
    texts = queries.read(queries.QUERIES)
    assert len(set(texts)) == len(texts) >= 4096


def test_two_drivers_never_ask_the_same(pki: Pki) -> None:
    endpoint = Endpoint("127.0.0.1", 1, "/mcp", pki.ca)
    texts = queries.read(queries.QUERIES)[:10]
    seen: list[set[int]] = []
    for driver in range(3):
        source = queries.Requests(endpoint, texts, driver, 3, None).short()
        seen.append({next(source).query for _ in range(20)})
    assert set.union(*seen) == set(range(10))
    assert sum(map(len, seen)) == 10


def test_long_requests_are_as_long_as_one_may_be(pki: Pki) -> None:
    endpoint = Endpoint("127.0.0.1", 1, "/mcp", pki.ca)
    source = queries.Requests(endpoint, queries.read(queries.QUERIES), 0, 1, None).mixed(1.0)
    arguments: dict[str, Any] = json.loads(next(source).data.partition(b"\r\n\r\n")[2])["params"]["arguments"]
    assert (len(arguments["query"]), arguments["limit"]) == (4000, 20)
