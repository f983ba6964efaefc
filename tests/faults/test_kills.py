"""The benchmark of kills from end to end, with a model that loads in a moment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.kills.__main__ import main
from benchmarks.kills.driver import CLOSED
from benchmarks.kills.judge import LOST
from tests.clients.conftest import small_catalogue
from tests.faults.test_recovery import options

__all__ = ["small_catalogue"]  # a fixture
CONNECTIONS = 6


def test_every_process_is_killed_and_everything_accounted_for(
    small_catalogue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "kills.json"
    settings = [f"{key}={value}" for key, value in options(tmp_path, small_catalogue).items()]
    command = [
        "kills",
        "--rounds",
        "1",
        "--connections",
        str(CONNECTIONS),
        "--out",
        str(out),
        "--set",
        *settings,
    ]
    monkeypatch.setattr("sys.argv", command)
    code = main()
    told = json.loads(out.read_text())["results"]
    assert (code, told["violations"]) == (0, []), capfd.readouterr()
    kinds = told["kinds"]
    assert {kind: each["rounds"] for kind, each in kinds.items()} == {
        "front-end": 1,
        "engine": 1,
        "parent": 1,
    }
    assert kinds["engine"]["ended"][LOST] > 0
    assert kinds["engine"]["connections_of_others"] == CONNECTIONS
    assert kinds["front-end"]["ended"][CLOSED] > 0
    assert kinds["parent"]["ended"][CLOSED] > 0
