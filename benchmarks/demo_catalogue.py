"""Make the demo catalogue again: start published MCP servers, ask each for its tools, write them down.

    python -m benchmarks.demo_catalogue [--only SERVER ...]

Each server of the table below is installed at its pinned version from npm or PyPI into a work folder, started
over stdio with placeholder credentials and asked for `tools/list` until no cursor is left. No tool is called.
The definitions are written exactly as served: same keys, same key order, same text. A server that fails is
named on stderr and its old files stay; the others go on and the exit code is 1.

Written: one JSON Lines file a server, the licence texts and SOURCES.md in `mcp_discovery/data/demo`, and
`benchmarks/data/demo-mcp.json`, which starts the same servers from any MCP client.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import anyio
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp_types import ListToolsRequest, PaginatedRequestParams, Result

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "mcp_discovery" / "data" / "demo"
MCP_JSON = ROOT / "benchmarks" / "data" / "demo-mcp.json"

PERMISSIVE = frozenset({"Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "ISC", "MIT"})
INSTALL_TIMEOUT_S = 600.0
LIST_TIMEOUT_S = 90.0
MAX_PAGES = 100


@dataclass(frozen=True, slots=True)
class PublishedServer:
    """One server as its registry offers it, and what it needs to start without an account."""

    name: str
    registry: Literal["npm", "PyPI"]
    package: str
    version: str
    licence: str
    program: str
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    requires: tuple[str, ...] = ()
    """Further PyPI requirements: an older server may not run on the newest major version of the SDK."""
    licence_from: str | None = None
    """The server of the same repository whose package ships the licence text that this one leaves out."""

    @property
    def command(self) -> list[str]:
        """How a client starts the server with nothing installed: `npx` or `uvx`, the version pinned."""
        if self.registry == "npm":
            start = ["npx", "-y", "--package", f"{self.package}@{self.version}", "--", self.program]
        else:
            start = ["uvx", "--from", f"{self.package}=={self.version}"]
            start += [word for requirement in self.requires for word in ("--with", requirement)]
            start += [self.program]
        return [*start, *self.args]


def _npm(name: str, spec: str, program: str, licence: str = "MIT", **extra: Any) -> PublishedServer:
    package, _, version = spec.rpartition("@")
    return PublishedServer(name, "npm", package, version, licence, program, **extra)


def _pypi(name: str, spec: str, program: str, licence: str = "MIT", **extra: Any) -> PublishedServer:
    package, _, version = spec.partition("==")
    return PublishedServer(name, "PyPI", package, version, licence, program, **extra)


TOKEN = "placeholder"
CLICKHOUSE = {"CLICKHOUSE_HOST": "localhost", "CLICKHOUSE_USER": "default", "CLICKHOUSE_PASSWORD": TOKEN}
ELASTIC = {"ES_URL": "http://localhost:9200", "ES_API_KEY": TOKEN}
GITHUB = {"GITHUB_PERSONAL_ACCESS_TOKEN": TOKEN}
MAPS = {"GOOGLE_MAPS_API_KEY": TOKEN}
SLACK = {"SLACK_BOT_TOKEN": TOKEN, "SLACK_TEAM_ID": "T00000000"}
REFERENCE = "@modelcontextprotocol/server"
OLD_SDK = ("mcp<2",)

SERVERS = (
    _npm("airtable", "airtable-mcp-server@1.14.0", "airtable-mcp-server", env={"AIRTABLE_API_KEY": TOKEN}),
    _pypi("arxiv", "arxiv-mcp-server==0.8.2", "arxiv-mcp-server", "Apache-2.0"),
    _pypi("calculator", "mcp-server-calculator==0.2.1", "mcp-server-calculator"),
    _pypi("clickhouse", "mcp-clickhouse==0.7.0", "mcp-clickhouse", "Apache-2.0", env=CLICKHOUSE),
    _npm("context7", "@upstash/context7-mcp@4.1.1", "context7-mcp"),
    _pypi("duckduckgo", "duckduckgo-mcp-server==0.7.0", "duckduckgo-mcp-server"),
    _npm(
        "elasticsearch",
        "@elastic/mcp-server-elasticsearch@0.3.1",
        "mcp-server-elasticsearch",
        "Apache-2.0",
        env=ELASTIC,
    ),
    _pypi("email", "mcp-email-server==1.13.3", "mcp-email-server", "BSD-3-Clause", args=("stdio",)),
    _pypi("excel", "excel-mcp-server==2.2.2", "excel-mcp-server", args=("stdio",)),
    _pypi("fetch", "mcp-server-fetch==2026.10.24", "mcp-server-fetch"),
    _npm(
        "filesystem",
        f"{REFERENCE}-filesystem@2026.1.14",
        "mcp-server-filesystem",
        args=(".",),
        licence_from="git",
    ),
    _pypi("git", "mcp-server-git==2026.10.19", "mcp-server-git"),
    _npm("github", f"{REFERENCE}-github@2025.4.8", "mcp-server-github", env=GITHUB, licence_from="git"),
    _npm(
        "google-maps",
        f"{REFERENCE}-google-maps@0.6.2",
        "mcp-server-google-maps",
        env=MAPS,
        licence_from="git",
    ),
    _npm("kubernetes", "mcp-server-kubernetes@4.1.7", "mcp-server-kubernetes"),
    _npm("memory", f"{REFERENCE}-memory@2026.1.26", "mcp-server-memory", licence_from="git"),
    _npm("notion", "@notionhq/notion-mcp-server@2.5.2", "notion-mcp-server", env={"NOTION_TOKEN": TOKEN}),
    _npm("pdf-reader", "@sylphx/pdf-reader-mcp@2.4.0", "pdf-reader-mcp"),
    _npm("playwright", "@playwright/mcp@0.0.83", "playwright-mcp", "Apache-2.0"),
    _npm(
        "sequential-thinking",
        f"{REFERENCE}-sequential-thinking@2025.12.18",
        "mcp-server-sequential-thinking",
        licence_from="git",
    ),
    _npm("slack", f"{REFERENCE}-slack@2025.4.25", "mcp-server-slack", env=SLACK, licence_from="git"),
    _pypi(
        "sqlite",
        "mcp-server-sqlite==2025.4.25",
        "mcp-server-sqlite",
        args=("--db-path", ":memory:"),
        requires=OLD_SDK,
        licence_from="git",
    ),
    _npm("tavily", "tavily-mcp@0.2.22", "tavily-mcp", env={"TAVILY_API_KEY": TOKEN}),
    _pypi(
        "time",
        "mcp-server-time==2026.10.19",
        "mcp-server-time",
        args=("--local-timezone", "Etc/UTC"),
        licence_from="git",
    ),
    _npm("todoist", "todoist-mcp@1.3.4", "todoist-mcp", env={"API_KEY": TOKEN}),
    _npm("weather", "@dangahagan/weather-mcp@1.23.0", "weather-mcp"),
    _pypi("youtube-transcript", "mcp-youtube-transcript==0.3.5", "mcp-youtube-transcript", requires=OLD_SDK),
)


class ServerFailed(Exception):
    """A server could not be installed, started or listed; the message is one sentence."""


class RawToolList(Result):
    """A `tools/list` result whose tools stay as they came: unknown fields and key order included."""

    tools: list[dict[str, Any]]
    next_cursor: str | None = None


# --- installing ----------------------------------------------------------------------------------


def install(server: PublishedServer, folder: Path) -> Path:
    """Install the pinned package below `folder` and return the path of its program."""
    if server.registry == "npm":
        spec = f"{server.package}@{server.version}"
        # Install scripts download browsers and the like, which listing tools does not need.
        flags = ["--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
        _checked(["npm", "install", "--prefix", str(folder), *flags, spec])
        return folder / "node_modules" / ".bin" / server.program
    _checked([sys.executable, "-m", "venv", str(folder)])
    spec = f"{server.package}=={server.version}"
    _checked([str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", spec, *server.requires])
    return folder / "bin" / server.program


def _checked(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S
        )
    except FileNotFoundError:
        raise ServerFailed(f"`{command[0]}` is not installed; install it and try again") from None
    except subprocess.TimeoutExpired:
        raise ServerFailed(f"`{command[0]}` did not end within {INSTALL_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        last = (done.stderr.strip() or "no output").splitlines()[-1]
        raise ServerFailed(f"`{command[0]}` ended with status {done.returncode}: {last}")


def licence_files(server: PublishedServer, folder: Path) -> list[Path]:
    """The licence and notice files that the installed package ships."""
    if server.registry == "npm":
        places = [folder / "node_modules" / server.package]
    else:
        stem = server.package.replace("-", "_")
        info = next(folder.glob(f"lib/python*/site-packages/{stem}-{server.version}.dist-info"))
        places = [info, info / "licenses"]
    starts = ("licen", "notice", "copying")
    found = (path for place in places if place.is_dir() for path in place.iterdir())
    return sorted(path for path in found if path.is_file() and path.name.lower().startswith(starts))


# --- listing -------------------------------------------------------------------------------------


async def list_tools(server: PublishedServer, program: Path, home: Path) -> list[dict[str, Any]]:
    """Start the server in an empty home folder and return its tools, in the order it serves them."""
    home.mkdir(parents=True, exist_ok=True)
    env = {"HOME": str(home), **server.env}
    parameters = StdioServerParameters(command=str(program), args=list(server.args), env=env, cwd=home)
    tools: list[dict[str, Any]] = []
    with (home / "stderr.log").open("w") as log, anyio.fail_after(LIST_TIMEOUT_S):
        async with (
            stdio_client(parameters, errlog=log) as (read, write),
            ClientSession(read, write) as session,
        ):
            await session.initialize()
            cursor: str | None = None
            for _ in range(MAX_PAGES):
                page = PaginatedRequestParams(cursor=cursor) if cursor else None
                result = await session.send_request(ListToolsRequest(params=page), RawToolList)
                tools += result.tools
                cursor = result.next_cursor
                if cursor is None:
                    return tools
    raise ServerFailed(f"its tool list did not end within {MAX_PAGES} pages")


def run_server(server: PublishedServer, program: Path, home: Path) -> list[dict[str, Any]]:
    """`list_tools`, with every way a foreign program can fail told in one sentence: the others go on."""
    try:
        tools = anyio.run(list_tools, server, program, home)
    except TimeoutError:
        raise ServerFailed(f"it did not list its tools within {LIST_TIMEOUT_S:.0f} s") from None
    except Exception as error:
        raise ServerFailed(f"it ended with {_first_line(error)}") from error
    if not tools:
        raise ServerFailed("it lists no tools")
    return tools


def _first_line(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}".splitlines()[0]


# --- writing -------------------------------------------------------------------------------------


def tool_lines(server: str, tools: Iterable[dict[str, Any]], private: Sequence[str]) -> str:
    """The tools as JSON Lines. Refuses a definition that shows one of the `private` strings (paths)."""
    lines = [json.dumps({"server": server, **tool}, ensure_ascii=False) for tool in tools]
    for line in lines:
        if leak := next((text for text in private if text in line), None):
            raise ServerFailed(f"a definition shows the local path {leak!r}")
    return "".join(line + "\n" for line in lines)


def write_licences(server: PublishedServer, folder: Path, out: Path) -> None:
    texts = licence_files(server, folder)
    if not texts and server.licence_from is None:
        raise ServerFailed("its package ships no licence text and the table names no server that does")
    for path in texts:
        target = out / "LICENSES" / f"{server.name}-{path.name}"
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)


def sources_table(servers: Sequence[PublishedServer], out: Path) -> str:
    """SOURCES.md: where each file of the catalogue comes from, read back from the files themselves."""
    rows = []
    for server in servers:
        count = len((out / f"{server.name}.jsonl").read_text(encoding="utf-8").splitlines())
        owner = server.licence_from or server.name
        texts = ", ".join(
            f"[{p.name}](LICENSES/{p.name})" for p in sorted((out / "LICENSES").glob(f"{owner}-[LNC]*"))
        )
        started = " ".join(server.command)
        cells = [
            server.name,
            server.package,
            server.version,
            server.registry,
            server.licence,
            texts,
            str(count),
        ]
        rows.append("| " + " | ".join(cells) + f" | `{started}` |")
    total = sum(int(row.split(" | ")[6]) for row in rows)
    return _SOURCES_HEAD.format(servers=len(rows), tools=total) + "\n".join(rows) + "\n"


_SOURCES_HEAD = """# Sources of the demo catalogue

{tools} tools of {servers} published MCP servers, written by `python -m benchmarks.demo_catalogue`. Each file
holds what one server answered to `tools/list` over stdio, one tool a line, with the server name put in front
and nothing else changed. The servers were installed at the versions below and started with placeholder
credentials; no tool was called. Each definition keeps the licence of its package.

| server | package | version | registry | licence | licence text | tools | started by |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""


def client_config(servers: Sequence[PublishedServer]) -> str:
    """The `mcp.json` that starts the same servers from any MCP client."""
    entries: dict[str, Any] = {}
    for server in servers:
        command, *args = server.command
        # Clients hand servers few variables; uv must still trust the certificates that the system trusts.
        env = server.env if command == "npx" else {"UV_SYSTEM_CERTS": "true", **server.env}
        entries[server.name] = {"command": command, "args": args, **({"env": env} if env else {})}
    return json.dumps({"mcpServers": entries}, indent=2) + "\n"


# --- command line --------------------------------------------------------------------------------


def refresh(server: PublishedServer, work: Path, out: Path) -> int:
    """Install, list and write one server; returns its number of tools."""
    folder = work / server.name
    tools = run_server(server, install(server, folder), folder / "home")
    text = tool_lines(server.name, tools, private=[str(work), str(ROOT), str(Path.home()) + os.sep])
    write_licences(server, folder, out)
    (out / f"{server.name}.jsonl").write_text(text, encoding="utf-8")
    return len(tools)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo_catalogue")
    parser.add_argument("--only", nargs="+", metavar="SERVER", choices=[s.name for s in SERVERS])
    parser.add_argument("--out", type=Path, metavar="DIR", default=DEMO, help="write the catalogue here")
    parser.add_argument("--work", type=Path, metavar="DIR", help="install the packages here and keep them")
    options = parser.parse_args(argv)
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    # Some servers print log lines among the messages; the client skips and reports each with a traceback.
    logging.getLogger("mcp").setLevel(logging.CRITICAL)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="demo-catalogue-") as scratch:
        work = (options.work or Path(scratch)).resolve()
        for server in SERVERS:
            if options.only and server.name not in options.only:
                continue
            try:
                print(f"{server.name}: {refresh(server, work, out)} tools", flush=True)
            except ServerFailed as error:
                failed += 1
                print(f"{server.name} failed: {error}.", file=sys.stderr, flush=True)
    kept = [s for s in SERVERS if (out / f"{s.name}.jsonl").exists()]
    (out / "SOURCES.md").write_text(sources_table(kept, out), encoding="utf-8")
    if out == DEMO:
        MCP_JSON.write_text(client_config(kept), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
