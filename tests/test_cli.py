"""Commands without a server: what they print, where, and with which exit code."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest

import engine
import mcp_discovery
from engine.errors import CanaryFailed, ConfigError, EngineFault, LoadRefused, ModelError
from mcp_discovery import cli, model_store
from mcp_discovery.certificates import Pki
from mcp_discovery.cli import main
from mcp_discovery.commands import call, certs
from mcp_discovery.commands.call import CODES
from mcp_discovery.commands.common import Progress, printable, table, url_host


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory; logging is left as it was found."""
    monkeypatch.chdir(tmp_path)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield tmp_path
    root.handlers[:] = handlers
    root.setLevel(level)


def test_help_and_version_need_no_heavy_import() -> None:
    code = (
        "import sys\nfrom mcp_discovery.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
        "print([name for name in ('torch', 'mcp', 'pydantic') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.endswith("[]\n")
    for command in ("serve", "plan", "call", "catalog", "certs", "model", "eval"):
        assert command in done.stdout


def test_public_names_can_all_be_had() -> None:
    assert all(getattr(engine, name) is not None for name in engine.__all__)
    assert all(getattr(mcp_discovery, name) is not None for name in mcp_discovery.__all__)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nope"],
        ["certs"],
        ["serve", "--port", "x"],
        ["serve", "--nope"],
        ["eval"],
        ["eval", "folder", "--limit", "0"],
        ["eval", "folder", "--limit", "x"],
        ["call", "x", "--detail", "most"],
    ],
)
def test_a_usage_error_is_one_sentence_and_exit_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert "--help" in printed.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("no"), 2),
        (ModelError("no"), 2),
        (LoadRefused("no", needed_mib=2, free_mib=1), 3),
        (CanaryFailed("no"), 1),
        (EngineFault("no"), 1),
        (ExceptionGroup("group", [LoadRefused("no", needed_mib=2, free_mib=1)]), 3),
        (ValueError("no"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_each_fault_has_its_exit_code_and_no_traceback(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(arguments: object) -> int:
        raise error

    monkeypatch.setattr(certs, "run", run)
    assert main(["certs", "show"]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    assert printed.err.count("\n") == (0 if isinstance(error, KeyboardInterrupt) else 1)


def test_debug_shows_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(arguments: object) -> int:
        raise ValueError("planted")

    monkeypatch.setattr(certs, "run", run)
    assert main(["certs", "show", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_certs_from_nothing_to_shown(somewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certs", "show"]) == 2
    assert "certs init" in capsys.readouterr().err
    assert main(["certs", "init", "--host", "mcp.example.org"]) == 0
    assert main(["certs", "client", "alice"]) == 0
    assert main(["certs", "init"]) == 0
    assert capsys.readouterr().out.count("wrote") == 5
    assert main(["certs", "show"]) == 0
    shown = capsys.readouterr().out
    assert "mcp.example.org" in shown
    assert shown.count("sha256") == 3
    assert main(["certs", "renew"]) == 0
    assert Pki().server.is_file()


def written(folder: Path, *lines: str) -> str:
    path = folder / "tools.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    return str(path)


def entry(name: str, description: str = "Does it.") -> str:
    return json.dumps(
        {"server": "s", "name": name, "description": description, "inputSchema": {"type": "object"}}
    )


def test_catalog_lists_and_checks(somewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = written(somewhere, entry("one"), entry("two", "Steers\x1b[2J your\nterminal."))
    assert main(["catalog", "list", good]) == 0
    listed = capsys.readouterr().out
    assert "\x1b" not in listed
    assert "2 tools of 1 servers" in listed
    assert main(["catalog", "check", good]) == 0
    bad = written(somewhere, entry("one"), entry("one", "Else."), "nonsense")
    assert main(["catalog", "check", bad]) == 1
    capsys.readouterr()
    assert main(["catalog", "check", bad, "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown["tools"] == ["s/one"]
    assert [problem["served"] for problem in shown["problems"]] == [False, False]
    assert main(["catalog", "list", str(somewhere / "none")]) == 2


def test_the_demo_catalogue_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["catalog", "list", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert len(shown["tools"]) >= 120
    assert len(shown["servers"]) >= 8


def test_model_show_and_verify(somewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = model_store.fetch()
    assert main(["model", "show"]) == 0
    shown = capsys.readouterr().out
    for expected in ("SmolLM2-135M-Instruct", "apache-2.0", model_store.DEFAULT.file_sha256):
        assert expected in shown
    damaged = somewhere / "damaged.gguf"
    damaged.write_bytes(path.read_bytes()[:100_000])
    assert main(["model", "verify", str(damaged)]) == 2
    assert main(["model", "show", "nothing.gguf"]) == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_plan_admits_and_refuses_with_the_shortfall(capsys: pytest.CaptureFixture[str]) -> None:
    """In a process of its own: the plan counts what its process holds, and this one may hold a lot."""
    model_store.fetch()
    command = [sys.executable, "-m", "mcp_discovery", "plan", "--device", "cpu"]
    as_json = subprocess.run([*command, "--json"], capture_output=True, timeout=120, check=True)
    plan = json.loads(as_json.stdout)
    assert sum(line["bytes"] for line in plan["lines"]) == plan["total_bytes"] <= 2740 << 20
    text = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert re.search(r"^admit: [\d,]+ pages of 16 tokens$", text, re.MULTILINE)
    assert all(line["name"] in text for line in plan["lines"])
    assert main(["plan", "--device", "cpu", "--allowance-mib", "300", "--json"]) == 3
    refused = json.loads(capsys.readouterr().out)
    assert (refused["admit"], refused["short_mib"] > 0) == (False, True)


def test_eval_of_a_folder_that_is_no_set_is_told_before_loading(
    somewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(somewhere)]) == 2
    assert "no labelled set" in capsys.readouterr().err


def test_a_call_to_nobody_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["call", "x", "--url", "https://127.0.0.1:9/mcp"]) == 1
    printed = capsys.readouterr().err
    assert "cannot reach" in printed
    assert printed.count("\n") == 1
    assert main(["call"]) == 2


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["x", "--url", "nope"], "--url"),
        (["x", "--url", "file:///tmp/mcp"], "--url"),
        (["x", "--url", "https://[::1/mcp"], "--url"),
        (["x", "--url", "https://127.0.0.1:99999/mcp"], "--url"),
        (["x", "--token", "a\nb"], "--token"),
        (["x", "--token", "\u00e9"], "--token"),
        (["x", "--min-score", "nan"], "--min-score"),
        (["\udcff"], "UTF-8"),
    ],
)
def test_what_no_call_can_be_made_of_is_a_usage_error(
    arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["call", *arguments]) == 2
    printed = capsys.readouterr().err
    assert word in printed
    assert printed.count("\n") == 1


def test_every_status_has_its_exit_code() -> None:
    assert CODES == {"matched": 0, "partial": 0, "no_match": 4, "refused": 5, "failed": 1, "invalid": 2}


@pytest.mark.parametrize(
    ("code", "after", "expected"),
    [
        ("request_too_large", None, "never retry"),
        ("draining", None, "retry later"),
        ("pages_short", 1234, "retry after 1,234 ms"),
    ],
)
def test_a_refusal_is_shown_with_its_numbers_and_when_to_come_back(
    code: str,
    after: int | None,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    refusal = {"code": code, "message": "No.", "pages_needed": 9, "pages_free": 4, "pages_total": 6}
    refusal |= {"page_deficit": 5, "page_tokens": 16, "queue_depth": 3, "retry_after_ms": after}

    async def refused(*_: object) -> dict[str, object]:
        return {"status": "refused", "tools": [], "refusal": refusal, "timing_ms": {"total": 2.0}}

    monkeypatch.setattr(call, "_call", refused)
    assert main(["call", "x"]) == 5
    shown = capsys.readouterr().out
    assert f"refused: {code}: No." in shown
    assert f"pages needed 9, free 4, of 6; short 5; queue 3; {expected}\n" in shown


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("0.0.0.0", "127.0.0.1"),
        ("::", "[::1]"),
        ("", "127.0.0.1"),
        ("::1", "[::1]"),
        ("a.example", "a.example"),
    ],
)
def test_the_host_of_a_url_can_be_called(host: str, expected: str) -> None:
    assert url_host(host) == expected


def test_a_table_keeps_its_columns_with_wide_letters() -> None:
    rows = [("1", "天気予報", "x" * 50), ("22", "abc", "y")]
    first, second = table(rows, width=40).split("\n")
    assert first == "1   天気予報  " + "x" * 25 + "…"
    assert second == "22  abc       y"


def test_printable_text_steers_no_terminal() -> None:
    assert printable("a\x1b[31mb\u202ec\nd\x07") == "a[31mbc d"


def test_progress_speaks_at_the_end_and_not_too_often() -> None:
    stream = StringIO()
    progress = Progress("warming up", "tools", stream)
    for done in range(1, 1001):
        progress(done, 1000)
    lines = stream.getvalue().splitlines()
    assert lines[-1] == "warming up: 100%  1,000 of 1,000 tools"
    assert len(lines) < 5


def test_the_exit_codes_are_the_documented_ones() -> None:
    from mcp_discovery import exits

    assert (exits.OK, exits.UNEXPECTED, exits.USAGE) == (0, 1, 2)
    assert (exits.LOAD_REFUSED, exits.NO_MATCH, exits.REQUEST_REFUSED) == (3, 4, 5)
    assert cli.main is main
