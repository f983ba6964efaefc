"""A small MCP server for tests, as a child process: JSON-RPC by hand, so that it starts at once and may
break rules.

`python stdio_server.py STATE` serves the tools that the JSON file STATE lists, and on SIGUSR1 sends
`tools/list_changed`. STATE may also say: `page`, tools an answer; `endless`, no last page; `tells`,
false not to announce changes; `waits`, true never to answer; `exit`, true to end at once; `prints`, a
line that is no message; `stderr`, what to write there; `echo`, environment variables to write there;
`ignores_eof`, true to go on when its client has gone.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

STATE = Path(sys.argv[1])


def state() -> dict[str, Any]:
    value: dict[str, Any] = json.loads(STATE.read_text())
    return value


def send(message: dict[str, Any]) -> None:
    os.write(1, (json.dumps({"jsonrpc": "2.0", **message}) + "\n").encode())


def page_of(cursor: str | None) -> dict[str, Any]:
    value = state()
    start, size = int(cursor or 0), value.get("page", 1_000_000)
    result: dict[str, Any] = {"tools": value["tools"][start : start + size]}
    if value.get("endless"):
        result["nextCursor"] = "0"
    elif start + size < len(value["tools"]):
        result["nextCursor"] = str(start + size)
    return result


def answer(request: dict[str, Any]) -> dict[str, Any]:
    method = request["method"]
    if method == "initialize":
        result: dict[str, Any] = {
            "protocolVersion": "2025-06-18",
            "capabilities": {"tools": {"listChanged": state().get("tells", True)}},
            "serverInfo": {"name": "test", "version": "1"},
        }
    elif method == "tools/list":
        result = page_of((request.get("params") or {}).get("cursor"))
    else:
        return {"id": request["id"], "error": {"code": -32601, "message": "Method not found"}}
    return {"id": request["id"], "result": result}


def main() -> None:
    value = state()
    signal.signal(signal.SIGUSR1, lambda *_: send({"method": "notifications/tools/list_changed"}))
    STATE.with_suffix(".pid").write_text(str(os.getpid()))
    for name in value.get("echo", []):
        print(f"{name} is {os.environ.get(name)}", file=sys.stderr, flush=True)
    if text := value.get("stderr"):
        print(text, file=sys.stderr, flush=True)
    if value.get("exit"):
        sys.exit(1)
    while value.get("waits"):
        time.sleep(60)
    if value.get("prints"):
        os.write(1, (value["prints"] + "\n").encode())
    for line in sys.stdin:
        request = json.loads(line)
        if "id" in request and "method" in request:
            send(answer(request))
    while value.get("ignores_eof"):
        time.sleep(60)


main()
