"""A real server process: `mcp-discovery serve` on free ports, awaited by its ready line."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcp_discovery.certificates import Pki

READY_S = 180.0
WAIT_S = 60.0


@dataclass
class Process:
    """A running server and what it printed."""

    pki: Pki
    uds: Path
    popen: subprocess.Popen[str]
    ready: threading.Event = field(default_factory=threading.Event)
    lines: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self._printed(r"^ready: (\S+)")

    @property
    def port(self) -> int:
        return int(self._printed(r"^ready: https://127\.0\.0\.1:(\d+)/mcp"))

    @property
    def host(self) -> str:
        return "127.0.0.1"

    @property
    def admin(self) -> str:
        return self._printed(r"^admin: (http://\S+)/status")

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def accounting(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.admin}/accounting", timeout=WAIT_S) as reply:
            shown: dict[str, Any] = json.load(reply)
        return shown

    def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first accounting that satisfies `condition`."""
        deadline = time.monotonic() + WAIT_S
        pause = threading.Event()
        while time.monotonic() < deadline:
            shown = self.accounting()
            if condition(shown):
                return shown
            pause.wait(0.02)  # another process's state has no event to wait for
        raise AssertionError(f"never came to be: {self.accounting()}")

    def _printed(self, pattern: str) -> str:
        found = re.search(pattern, self.output, re.MULTILINE)
        assert found is not None, self.output
        return found[1]


@contextmanager
def running(
    pki: Pki, folder: Path, command: Sequence[str] = ("mcp_discovery", "serve"), **settings: Any
) -> Iterator[Process]:
    """A server whose configuration keys are `TABLE__KEY=value`; ended by SIGTERM where it still runs.
    `command` is a module with its arguments."""
    defaults = {
        "SERVER__PORT": 0,
        "SERVER__ADMIN": "127.0.0.1:0",
        "SERVER__UDS": folder / "mcp.sock",
        "TLS__CERT": pki.server,
        "TLS__KEY": pki.server_key,
        "TLS__CA": pki.ca,
        "ENGINE__DEVICE": "cpu",
        "OVERLOAD__DRAIN_S": 30,
    }
    repository = Path(__file__).parents[2]
    paths = os.pathsep.join(filter(None, (str(repository), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": paths}
    environment |= {f"MCP_DISCOVERY__{key}": str(value) for key, value in (defaults | settings).items()}
    popen = subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    process = Process(pki, folder / "mcp.sock", popen)
    reader = threading.Thread(target=_read, args=(process,))
    reader.start()
    try:
        assert process.ready.wait(READY_S), process.output
        assert "ready:" in process.output, process.output
        yield process
    finally:
        if popen.poll() is None:
            popen.send_signal(signal.SIGTERM)
        try:
            popen.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            popen.kill()
            raise
        finally:
            reader.join(WAIT_S)
            assert popen.stdout is not None
            popen.stdout.close()


def _read(process: Process) -> None:
    assert process.popen.stdout is not None
    for line in process.popen.stdout:
        process.lines.append(line)
        if line.startswith("try:"):
            process.ready.set()
    process.ready.set()  # it ended: who waits reads why in the output
