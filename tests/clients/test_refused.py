"""People see by how much a request does not fit, whichever program they call through."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients.server import WAIT_S, Process

TOO_LONG = {"query": "an endless list of words that never ends " * 90}
PAGES = 16  # of the narrow server


def check(refusal: dict[str, Any]) -> list[str]:
    """The numbers are those of a request that can never fit; returns those that people are to see."""
    assert refusal["code"] == "request_too_large"
    assert (refusal["pages_total"], refusal["page_tokens"], refusal["retry_after_ms"]) == (PAGES, 16, None)
    assert refusal["page_deficit"] == refusal["pages_needed"] - PAGES > 0
    return [str(refusal[name]) for name in ("pages_needed", "pages_total", "page_deficit")]


def run(command: list[str], server: Process, **environment: str) -> subprocess.CompletedProcess[str]:
    trusting = {**os.environ, "NODE_EXTRA_CA_CERTS": str(server.pki.ca), **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, env=trusting)


@pytest.mark.parametrize("era", ["modern", "legacy"])
def test_the_deficit_is_visible_through_inspector(
    narrow: Process, inspector: list[str], era: str, tmp_path: Path
) -> None:
    command = [*inspector, narrow.url, "--transport", "http", "--protocol-era", era]
    command += ["--method", "tools/call", "--tool-name", "discover_tools"]
    command += ["--tool-args-json", json.dumps(TOO_LONG), "--format", "json"]
    done = run(command, narrow, MCP_STORAGE_DIR=str(tmp_path))
    assert done.returncode == 5, done.stderr  # the tool's own error, not one of the protocol
    result = result_in(done.stdout)
    numbers = check(result["structuredContent"]["refusal"])
    assert all(number in result["content"][0]["text"] for number in numbers)


def test_the_deficit_passes_the_validation_of_the_typescript_sdk(
    narrow: Process, typescript_sdk: Path
) -> None:
    script = Path(__file__).with_name("sdk_v1.mjs")
    node = typescript_sdk / "node" / "bin" / "node"
    done = run([str(node), str(script), str(typescript_sdk), narrow.url, json.dumps(TOO_LONG)], narrow)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert "refusal" in shown["outputSchema"]["properties"]
    result = shown["result"]
    assert result["isError"] is True
    numbers = check(result["structuredContent"]["refusal"])
    assert all(number in result["content"][0]["text"] for number in numbers)


def result_in(printed: str) -> dict[str, Any]:
    """The result of a call in what a program printed as JSON."""
    shown: dict[str, Any] = json.loads(printed)
    return shown.get("result", shown)
