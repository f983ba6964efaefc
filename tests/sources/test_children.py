"""Child processes of stdio servers end with us, whatever they do and however we end."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ends import is_gone
from tests.sources.world import StdioServer, definition, following, is_alive, mcp_json

PROGRAM = """
import asyncio, sys
from pathlib import Path
from mcp_discovery.discovery.live import Sources

sources = Sources([Path(sys.argv[1])])
sources.load()
asyncio.run(sources.run(lambda catalogue: print(len(catalogue), flush=True)))
"""


def test_a_child_that_does_not_listen_is_ended_when_its_source_is(tmp_path: Path) -> None:
    server = StdioServer(tmp_path, "deaf", [definition("a")], ignores_eof=True)

    async def test() -> None:
        async with following([mcp_json(tmp_path, {"deaf": server.entry})]) as seen:
            await seen.until_ids("deaf/a")
            assert is_alive(server.pid)

    asyncio.run(test())
    assert not is_alive(server.pid)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals the death of a parent")
def test_children_end_when_we_are_killed(tmp_path: Path) -> None:
    server = StdioServer(tmp_path, "deaf", [definition("a")], ignores_eof=True)
    path = mcp_json(tmp_path, {"deaf": server.entry})
    with subprocess.Popen([sys.executable, "-c", PROGRAM, str(path)], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"1\n"
        pid = server.pid
        assert is_alive(pid)
        program.kill()
    assert is_gone(pid)
