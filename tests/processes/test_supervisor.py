"""The parent and scripted children: what is started again, what is not, signals, and its own death."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mcp_discovery.config import Config, RecoveryTable
from mcp_discovery.processes.assignment import Assignment
from mcp_discovery.processes.member import _message
from mcp_discovery.processes.restarts import Restarts
from mcp_discovery.processes.supervisor import Supervisor
from tests.ends import is_gone

WAIT_S = 30.0


async def supervise(file: Path, *acts: str, on_ready: Callable[[int], None] = lambda served: None) -> int:
    """The exit code of a parent with one scripted child; `on_ready` hears how many have served so far."""
    config = Config(recovery=RecoveryTable(restarts=3, backoff_s=0.01))
    assignment = Assignment(role="server", name="the child", config=config, parent=os.getpid())
    served = itertools.count(1)
    command = [sys.executable, "-m", "tests.processes.scripted", str(file), *acts]
    supervisor = Supervisor([assignment], command, lambda member: on_ready(next(served)))
    return await asyncio.wait_for(supervisor.run(), WAIT_S)


def starts(file: Path) -> list[int]:
    """The process id of each start."""
    return [int(line) for line in file.read_text().splitlines()]


def signals(*numbers: int) -> Callable[[int], None]:
    """Sends them to this process once the first child serves."""

    def send(served: int) -> None:
        if served == 1:
            for number in numbers:
                os.kill(os.getpid(), number)

    return send


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "starts"


def test_a_child_that_fails_is_started_again(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    def stop_the_third(served: int) -> None:
        if served == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    assert asyncio.run(supervise(file, "fail", "kill", "serve", on_ready=stop_the_third)) == 0
    assert len(starts(file)) == 3
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "the child failed (it was told to); starting it again in 0.01 s, restart 1",
        "the child failed (ended by SIGKILL); starting it again in 0.02 s, restart 2",
    ]


def test_half_a_line_is_passed_over_and_the_next_one_heard(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def stop_the_second(served: int) -> None:
        if served == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    assert asyncio.run(supervise(file, "stammer", "serve", on_ready=stop_the_second)) == 0
    assert len(starts(file)) == 2
    assert "half a line" in caplog.text
    assert "the child failed (it was told to)" in caplog.text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'["failed", "a word"]', ("failed", "a word")),
        (b"", None),
        (b'["failed", "a w', None),
        (b'["failed"]', None),
        (b'"failed"', None),
        (b"5", None),
        (b"null", None),
        (b"\xff", None),
    ],
)
def test_a_line_is_a_message_or_none(line: bytes, message: tuple[str, object] | None) -> None:
    assert _message(line) == message


def test_three_restarts_in_a_row_are_the_most(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert asyncio.run(supervise(file, "fail")) == 70
    assert len(starts(file)) == 4
    assert "after 3 restarts in a row" in caplog.text


@pytest.mark.parametrize("code", [2, 3])
def test_a_restart_that_is_refused_is_the_last(
    file: Path, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert asyncio.run(supervise(file, "fail", f"exit:{code}")) == code
    assert len(starts(file)) == 2
    assert "could not be started again" in caplog.text


@pytest.mark.parametrize("code", [0, 1, 2, 3, 70])
def test_a_first_start_that_never_served_is_told_at_once(file: Path, code: int) -> None:
    assert asyncio.run(supervise(file, f"exit:{code}")) == code
    assert len(starts(file)) == 1


def test_a_restart_that_breaks_off_counts_as_a_failure(file: Path) -> None:
    assert asyncio.run(supervise(file, "fail", "exit:1")) == 70
    assert len(starts(file)) == 4


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_child_drain(file: Path, number: int) -> None:
    assert asyncio.run(supervise(file, "serve", on_ready=signals(number))) == 0
    assert is_gone(starts(file)[0])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_child_with_nothing_to_drain_yet_ends_well(file: Path, number: int) -> None:
    assert asyncio.run(supervise(file, "plain", on_ready=signals(number))) == 0


def test_the_same_signal_twice_at_once_is_one_wish(file: Path) -> None:
    """`timeout` signals a process and its group."""
    assert asyncio.run(supervise(file, "serve", on_ready=signals(signal.SIGTERM, signal.SIGTERM))) == 0


def test_a_second_signal_ends_even_a_deaf_child(file: Path) -> None:
    wished = signals(signal.SIGTERM, signal.SIGINT)
    assert asyncio.run(supervise(file, "deaf", on_ready=wished)) == 128 + signal.SIGINT
    assert is_gone(starts(file)[0])


def test_a_signal_between_two_starts_ends_the_waiting(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait_long(self: Restarts, failure: str, healthy_s: float) -> float:
        os.kill(os.getpid(), signal.SIGTERM)
        return 3600.0

    monkeypatch.setattr(Restarts, "after", wait_long)
    assert asyncio.run(supervise(file, "fail")) == 0
    assert len(starts(file)) == 1


def test_a_parent_that_is_killed_leaves_no_child(file: Path) -> None:
    command = [sys.executable, "-m", "tests.processes.parent", str(file), "deaf"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "1 served\n"
        child = starts(file)[0]
        parent.kill()
    assert is_gone(child)


def test_the_parent_imports_nothing_heavy() -> None:
    code = (
        "import sys; import mcp_discovery.commands.serve\n"
        "print([name for name in ('torch', 'mcp', 'uvicorn', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    assert done.stdout == "[]\n"


def test_nothing_is_logged_above_info_in_a_quiet_life(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        asyncio.run(supervise(file, "serve", on_ready=signals(signal.SIGTERM)))
    assert [record.levelname for record in caplog.records] == ["INFO"]
