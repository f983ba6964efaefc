"""Who calls, and what they may see."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Visibility = Callable[[str, str], bool]
"""(server, tool name) -> may this caller see it."""


def sees_all(server: str, name: str) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Caller:
    """One caller: a connection until identities exist. `id` is the unit of fair share."""

    id: str = "local"
    sees: Visibility = sees_all


def caller_of(scope: Mapping[str, Any]) -> Caller:
    """The caller behind an ASGI scope: its connection, which the listener numbers in the scope's state."""
    return Caller(id=scope.get("state", {}).get("connection", "local"))
