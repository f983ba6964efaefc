"""A FastMCP server over TLS with its BM25 search, for `benchmarks.peers`; runs in a venv of its own.

    python benchmarks/peer_server.py --cert FILE --key FILE [--max-results 5] CATALOGUE...

The tools of the catalogues (JSON Lines) stand behind the search as they would in a server that mounts others:
each is named SERVER_NAME. A JSON line on standard output tells the port and each tool's `server/name`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import uvicorn
from fastmcp import FastMCP
from fastmcp.server.transforms.search import BM25SearchTransform
from fastmcp.tools.base import Tool, ToolResult


class Listed(Tool):
    """A tool that is there to be found."""

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        return ToolResult(content="found")


def read(paths: list[Path]) -> dict[str, dict[str, Any]]:
    """Tool definitions by their `server/name`, from files and folders."""
    files = [file for path in paths for file in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])]
    lines = (line for file in files for line in file.read_text(encoding="utf-8").split("\n"))
    entries = [json.loads(line) for line in lines if line.strip()]
    return {f"{entry['server']}/{entry['name']}": entry for entry in entries}


def build(tools: dict[str, dict[str, Any]], max_results: int) -> tuple[FastMCP[Any], dict[str, str]]:
    """The server, and each tool's id by the name it has there."""
    mcp: FastMCP[Any] = FastMCP("peer")
    ids: dict[str, str] = {}
    for id, entry in tools.items():
        name = f"{entry['server']}_{entry['name']}"
        while name in ids:
            name += "_"
        ids[name] = id
        mcp.add_tool(
            Listed(name=name, description=entry.get("description", ""), parameters=entry["inputSchema"])
        )
    mcp.add_transform(BM25SearchTransform(max_results=max_results))
    return mcp, ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cert", type=Path, required=True)
    parser.add_argument("--key", type=Path, required=True)
    parser.add_argument("--max-results", type=int, default=5)
    parser.add_argument("catalogues", type=Path, nargs="+")
    given = parser.parse_args()
    mcp, ids = build(read(given.catalogues), given.max_results)
    bound = socket.create_server(("127.0.0.1", 0), backlog=2048)
    config = uvicorn.Config(
        mcp.http_app(json_response=True, stateless_http=True),
        loop="uvloop",
        http="httptools",
        ssl_certfile=given.cert,
        ssl_keyfile=given.key,
        log_level="warning",
    )
    print(json.dumps({"port": bound.getsockname()[1], "ids": ids}), flush=True)
    asyncio.run(uvicorn.Server(config).serve([bound]))


if __name__ == "__main__":
    main()
