"""What the parent tells a child before anything else: its part, the settings, and what it inherits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict

from mcp_discovery.config import Config

Role = Literal["server"]
"""`server`: everything in one process."""


class Assignment(BaseModel):
    """One child's work. Crosses to it as one line of JSON."""

    model_config = ConfigDict(frozen=True)

    role: Role
    config: Config
    program: str
    """How people call this program; stands in the line that shows a call to try."""
    parent: int
    """The parent's process id."""
    sockets: Mapping[str, int] = {}
    """Listener -> number of its bound socket, inherited."""
    restarts: int = 0
    """How often a process of this role was started again."""
    last_failure: str = ""
    """Why, the last time."""
    debug: bool = False
