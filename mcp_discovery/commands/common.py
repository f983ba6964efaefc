"""What several commands share: settings from their flags, tables, progress."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from mcp_discovery import config
from mcp_discovery.config import Config

_FLAGS = {
    "host": ("server", "host"),
    "port": ("server", "port"),
    "uds": ("server", "uds"),
    "admin": ("server", "admin"),
    "frontends": ("server", "frontends"),
    "model": ("engine", "model"),
    "adapter": ("engine", "adapter"),
    "allowance_mib": ("engine", "allowance_mib"),
    "device": ("engine", "device"),
}
"""Flag -> table and key of the setting that it overrides."""


def settings(arguments: argparse.Namespace) -> Config:
    """File, environment and this command's flags as one configuration; raises `ConfigError`."""
    flags: dict[str, dict[str, Any]] = {}
    for flag, (table, key) in _FLAGS.items():
        value = getattr(arguments, flag, None)
        if value is not None and value != []:
            flags.setdefault(table, {})[key] = value
    if places := getattr(arguments, "catalog", None):
        # Who names some sources means these alone.
        paths, urls = sorted_places(places)
        flags["catalog"] = {"paths": paths, "urls": urls}
    return config.load(arguments.config, flags=flags)


def sorted_places(places: Iterable[str]) -> tuple[list[Path], list[str]]:
    """Files and folders, and URLs of live servers."""
    paths: list[Path] = []
    urls: list[str] = []
    for place in places:
        if place.startswith(("http://", "https://")):
            urls.append(place)
        else:
            paths.append(Path(place))
    return paths, urls


def table(rows: Iterable[Sequence[str]], header: Sequence[str] = (), width: int | None = None) -> str:
    """Aligned columns; the last one is cut to the terminal's width (or to `width`)."""
    lines = [list(header)] if header else []
    lines += [list(row) for row in rows]
    if not lines:
        return ""
    columns = len(lines[0])
    widths = [max(_columns(line[at]) for line in lines) for at in range(columns - 1)]
    room = (width or shutil.get_terminal_size((120, 24)).columns) - sum(widths) - 2 * (columns - 1)
    return "\n".join(
        "  ".join(
            [
                *(_padded(cell, size) for cell, size in zip(line, widths, strict=False)),
                _cut(line[-1], max(room, 20)),
            ]
        ).rstrip()
        for line in lines
    )


def url_host(host: str) -> str:
    """The host of a URL that reaches a server listening on `host`: an address, not a wildcard."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def printable(text: str) -> str:
    """`text` on one line, without what would steer a terminal: a tool's words come from other servers."""
    return "".join(
        " " if character.isspace() else character
        for character in text
        if character.isspace() or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Co", "Cn")
    )


def _columns(text: str) -> int:
    """Terminal columns that `text` takes; East Asian wide characters take two."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


def _padded(text: str, columns: int) -> str:
    return text + " " * (columns - _columns(text))


def _cut(text: str, columns: int) -> str:
    if _columns(text) <= columns:
        return text
    while _columns(text) >= columns:
        text = text[:-1]
    return text.rstrip() + "…"


class Progress:
    """Progress of one long step on stderr: a line that renews itself, or a line now and then in a log."""

    def __init__(self, what: str, unit: str = "", stream: TextIO | None = None) -> None:
        self._what = what
        self._unit = f" {unit}" if unit else ""
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._shown = float("-inf")

    def __call__(self, done: int, total: int) -> None:
        """Shows `done` of `total`; the last one is always shown, others at most so often."""
        now = time.monotonic()
        ended = done >= total
        if not ended and now - self._shown < (0.1 if self._live else 5.0):
            return
        self._shown = now
        share = f"{100 * done // total if total else 100:3d}%"
        line = f"{self._what}: {share}  {done:,} of {total:,}{self._unit}"
        if self._live:
            self._stream.write(f"\r\x1b[K{line}" + ("\n" if ended else ""))
        else:
            self._stream.write(line + "\n")
        self._stream.flush()
