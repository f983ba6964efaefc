"""Sockets, bound before anything is loaded: a port in use is told in the first second, not in the last."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

from engine.errors import ConfigError


def bind_tcp(host: str, port: int, *, key: str, backlog: int = 4096) -> socket.socket:
    """A bound TCP socket; `key` names the setting in the error. Port 0 takes a free one."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror} ({key})") from None
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
        bound.listen(backlog)
    except OSError as error:
        bound.close()
        reason = "the port is in use" if error.errno == errno.EADDRINUSE else str(error.strerror)
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}; choose another with {key}") from None
    bound.setblocking(False)
    return bound


def bind_unix(path: Path, backlog: int = 4096) -> socket.socket:
    """A bound Unix socket that only its owner may open. A dead socket file in its place is replaced."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists():
            _remove_dead_socket(path)
        # The mode holds from the first moment: a chmod afterwards would leave a gap.
        before = os.umask(0o177)
        try:
            bound.bind(os.fspath(path))
        finally:
            os.umask(before)
        bound.listen(backlog)
    except OSError as error:
        bound.close()
        raise ConfigError(f"cannot listen on the Unix socket {path}: {error.strerror or error}") from None
    except ConfigError:
        bound.close()
        raise
    bound.setblocking(False)
    return bound


def _remove_dead_socket(path: Path) -> None:
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise ConfigError(f"{path} exists and is no socket; choose another path with --uds")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if probe.connect_ex(os.fspath(path)) == 0:
            raise ConfigError(f"another server listens on {path}; choose another path with --uds")
    path.unlink()
