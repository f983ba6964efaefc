"""Which process holds the server's end of a connection, and which processes are left. Linux only."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from benchmarks.ladder.host import PROC

LISTENING = "0A"  # the state of a socket that accepts, as /proc/net/tcp has it


def peers_of(pids: Iterable[int], port: int) -> frozenset[int]:
    """The clients' ports of the connections to `port` over IPv4 that these processes hold."""
    inodes = {inode for pid in pids for inode in _sockets(pid)}
    lines = (PROC / "net" / "tcp").read_text(encoding="ascii").splitlines()[1:]
    found = set()
    for _, local, remote, state, *rest in map(str.split, lines):
        if _port(local) == port and state != LISTENING and rest[5] in inodes:
            found.add(_port(remote))
    return frozenset(found)


def left_of(pids: Iterable[int]) -> list[int]:
    """Those that still run; one that has ended and was not waited for does not."""
    return [pid for pid in pids if _state(pid) not in ("", "Z", "X")]


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


def _sockets(pid: int) -> Iterable[str]:
    """The inodes of its sockets, none where it is gone."""
    try:
        files = list((PROC / str(pid) / "fd").iterdir())
    except OSError:
        return
    for file in files:
        name = _link(file)
        if name.startswith("socket:["):
            yield name[len("socket:[") : -1]


def _link(file: Path) -> str:
    try:
        return os.readlink(file)
    except OSError:  # closed meanwhile
        return ""


def _state(pid: int) -> str:
    try:
        stat = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]
