"""What the parent tells a child before anything else: its part, the settings, and what it inherits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from mcp_discovery.config import Config

Role = Literal["server", "engine", "frontend"]
"""`server`: everything in one process; else an `engine` for several `frontend`s."""


class Assignment(BaseModel):
    """One child's work. Crosses to it as one line of JSON."""

    model_config = ConfigDict(frozen=True)

    role: Role
    name: str
    """Of the process, for people."""
    config: Config
    parent: int
    """The parent's process id."""
    sockets: Mapping[str, int] = {}
    """Listener -> number of its bound socket, inherited."""
    ledger: int | None = None
    """Number of the file that the counts are kept in, inherited."""
    engine_socket: Path | None = None
    """Where the engine process listens for front-ends."""
    warms: bool = True
    """Whether this process computes tools' prefixes; others take the vectors that it has stored."""
    debug: bool = False
