"""The last good list of each live server, on disk: what is served until the server answers.

One JSON file a server, named by how the server is reached, in a folder that only its owner reads:
{"server", "tools": the definitions as they came}; its time is that of the list. A damaged file counts
as none. Nothing of how the server is reached is written but its hash.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcp_discovery.discovery.sources.specs import Spec

logger = logging.getLogger(__name__)

PARTIAL = ".list-"  # begins the name of a file that is being written


@dataclass(frozen=True, slots=True)
class StoredList:
    listed_at: float  # Unix seconds
    tools: Sequence[Any]


class ListStore:
    """A folder of lists. May be used from any thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, spec: Spec) -> StoredList | None:
        """The list of `spec`'s server; None where there is none that can be used."""
        path = self._path(spec)
        try:
            with path.open("rb") as file:
                value = json.load(file)
                listed_at = os.fstat(file.fileno()).st_mtime
            tools = value["tools"]
            if not isinstance(tools, list):
                raise TypeError("its tools are no list")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            logger.warning("the stored list of %s cannot be used: %s", spec.name, error)
            return None
        return StoredList(listed_at, tools)

    def write(self, spec: Spec, tools: Sequence[Any]) -> None:
        """Keeps `tools` as listed now; a failure is logged, since the server can be asked again."""
        try:
            content = json.dumps({"server": spec.name, "tools": list(tools)}).encode()
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            replace_file(self._path(spec), content)
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("the list of %s could not be kept in %s: %s", spec.name, self._folder, error)

    def confirm(self, spec: Spec) -> None:
        """The list that is kept was right just now."""
        try:
            os.utime(self._path(spec))
        except OSError as error:
            logger.debug("the stored list of %s could not be confirmed: %s", spec.name, error)

    def _path(self, spec: Spec) -> Path:
        return self._folder / f"{spec.identity[:32]}.json"


def replace_file(path: Path, content: bytes) -> None:
    """The whole file in one step, so that no reader sees half of it."""
    descriptor, name = tempfile.mkstemp(prefix=PARTIAL, dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
