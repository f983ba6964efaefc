"""Real servers and real client programs. Programs are installed into a cache folder, once a machine."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from mcp_discovery import model_store
from mcp_discovery.certificates import Pki
from tests.clients.server import Process, running

INSPECTOR = {"@modelcontextprotocol/inspector": "2.12.0", "node": "22.23.3"}
SDK = {"@modelcontextprotocol/sdk": "1.32.2", "node": INSPECTOR["node"]}
AGENTS = ("openai-agents==0.24.0", "mcp>=2.3,<3")
INSTALL_S = 600

TOOLS = {
    "files": ["read_file", "write_file", "list_directory", "delete_file"],
    "weather": ["get_forecast", "get_alerts"],
    "mail": ["send_email", "search_messages"],
    "calendar": ["create_event", "list_events", "delete_event"],
}


@pytest.fixture(scope="session")
def small_catalogue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eleven tools of four servers: enough to tell an answer, few enough to be quick."""
    path = tmp_path_factory.mktemp("catalogue") / "tools.jsonl"
    entries = (
        {
            "server": server,
            "name": name,
            "description": f"{name.replace('_', ' ').capitalize()} with the {server} service.",
            "inputSchema": {"type": "object", "properties": {"target": {"type": "string"}}},
        }
        for server, names in TOOLS.items()
        for name in names
    )
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


@pytest.fixture(scope="session")
def server(pki: Pki, small_catalogue: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """One server for every client that leaves it as it found it."""
    model_store.fetch()
    with running(pki, tmp_path_factory.mktemp("server"), CATALOG__PATHS=small_catalogue) as process:
        yield process


@pytest.fixture(scope="session")
def narrow(pki: Pki, small_catalogue: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A server with so few pages that a long query can never fit."""
    model_store.fetch()
    folder = tmp_path_factory.mktemp("narrow")
    with running(pki, folder, CATALOG__PATHS=small_catalogue, ENGINE__MAX_PAGES=16) as process:
        yield process


@pytest.fixture(scope="session")
def inspector() -> list[str]:
    """The command of MCP Inspector's CLI, on the Node that it needs."""
    modules = _node_modules(f"inspector-{INSPECTOR['@modelcontextprotocol/inspector']}", INSPECTOR)
    return [str(modules / "node" / "bin" / "node"), str(modules / ".bin" / "mcp-inspector"), "--cli"]


@pytest.fixture(scope="session")
def typescript_sdk() -> Path:
    """The folder of modules with the official TypeScript SDK, version 1, and its Node."""
    return _node_modules(f"sdk-{SDK['@modelcontextprotocol/sdk']}", SDK)


@pytest.fixture(scope="session")
def agents_python() -> Path:
    """The interpreter of an environment with an agent framework in it."""
    folder = _cache() / AGENTS[0]
    python = folder / "bin" / "python"
    with _installing(folder) as wanted:
        if wanted:
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=INSTALL_S)
            command = [str(python), "-m", "pip", "install", "--quiet", *AGENTS]
            subprocess.run(command, check=True, timeout=INSTALL_S, capture_output=True)
    return python


def _node_modules(name: str, packages: Mapping[str, str]) -> Path:
    """Where npm has put `packages`, by their versions."""
    folder = _cache() / name
    with _installing(folder) as wanted:
        if wanted:
            named = [f"{package}@{version}" for package, version in packages.items()]
            command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *named]
            subprocess.run(command, check=True, timeout=INSTALL_S, capture_output=True)
    return folder / "node_modules"


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mcp-discovery" / "tests"


@contextmanager
def _installing(folder: Path) -> Iterator[bool]:
    """Whether `folder` is still to be filled. One process at a time; a marker says that it is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    marker = folder / ".whole"
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield not marker.exists()
        marker.touch()
