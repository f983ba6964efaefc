"""The socket: who may open it, and who has."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path
from struct import Struct

from engine.errors import EngineFault

BACKLOG = 128
MAX_PATH = 107  # bytes that fit the address of a Unix socket on Linux
_CREDENTIALS = Struct("3i")  # struct ucred: pid, uid, gid


def listen_at(path: Path) -> socket.socket:
    """A listening socket at `path`, mode 0600 from the moment it is there. A folder that is missing is made
    with mode 0700. A socket that a dead process left behind is replaced.

    Raises EngineFault in one sentence where the path cannot be had.
    """
    if len(os.fsencode(path)) > MAX_PATH:
        raise EngineFault(f"The socket's path {path} is longer than {MAX_PATH} bytes; choose a shorter one.")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_stale(path)
        # Linux gives the file the mode of the socket's own inode, less the umask: no moment in between.
        os.fchmod(listener.fileno(), 0o600)
        listener.bind(os.fspath(path))
        mode = stat.S_IMODE(path.lstat().st_mode)
        if mode & ~0o600:
            path.unlink()
            raise EngineFault(f"The socket {path} came out with mode {mode:o} on this system; 600 is needed.")
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise EngineFault(f"Cannot listen at {path}: {error.strerror or error}.") from error
    except EngineFault:
        listener.close()
        raise
    return listener


def peer(connection: socket.socket) -> tuple[int, int]:
    """(process id, user id) of the process that opened the other end, as the kernel noted it."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def _remove_stale(path: Path) -> None:
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise EngineFault(f"{path} exists and is no socket; remove it or choose another path.")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a listener whose backlog is full must not hold this up
        refused = probe.connect_ex(os.fspath(path)) == errno.ECONNREFUSED
    if not refused:
        raise EngineFault(f"Another process listens at {path}; stop it or choose another path.")
    path.unlink(missing_ok=True)
