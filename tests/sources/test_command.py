"""`catalog add | list | check` over live servers."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from mcp_discovery.cli import main
from tests.sources.world import StdioServer, definition, mcp_json


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    works = StdioServer(tmp_path, "works", [definition("a"), {"name": "bad"}])
    ends = StdioServer(tmp_path, "ends", exit=True, stderr="no key")
    return mcp_json(tmp_path, {"works": works.entry, "ends": ends.entry})


def test_list_asks_the_servers_and_offline_tells_what_was_known(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["catalog", "list", str(config), "--offline", "--json"]) == 0
    before = json.loads(capsys.readouterr().out)
    assert (before["tools"], before["servers_missing"]) == ([], ["ends", "works"])
    assert main(["catalog", "list", str(config)]) == 0
    shown = capsys.readouterr()
    assert "works" in shown.out
    assert "its last words were: no key" in shown.out
    assert shown.err == ""
    assert main(["catalog", "list", str(config), "--offline", "--json"]) == 0
    after = json.loads(capsys.readouterr().out)
    assert (after["tools"], after["servers_stale"]) == (["works/a"], ["works"])


def test_check_fails_for_entries_left_out_and_for_servers_that_do_not_answer(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["catalog", "check", str(config)]) == 1
    shown = capsys.readouterr().out
    assert "left out: works tools[1]" in shown
    assert "missing: ends: it ended" in shown
    good = StdioServer(tmp_path, "good", [definition("a")])
    assert main(["catalog", "check", str(mcp_json(tmp_path, {"good": good.entry}))]) == 0


def test_add_puts_the_sources_into_the_settings(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["catalog", "add", "mcp.json"]) == 0
    assert "added to mcp-discovery.toml" in capsys.readouterr().out
    assert tomllib.loads(Path("mcp-discovery.toml").read_text()) == {"catalog": {"paths": ["mcp.json"]}}
    assert main(["catalog", "add", "mcp.json"]) == 0
    assert "names them already" in capsys.readouterr().out
    assert main(["catalog", "list", "--offline", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tools"] == ["works/a"]
    (tmp_path / "empty.json").write_text("")
    assert main(["catalog", "add", "empty.json"]) == 2
