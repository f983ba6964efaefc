"""Who calls, and what they may see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Visibility = Callable[[str, str], bool]
"""(server, tool name) -> may this caller see it."""


def sees_all(server: str, name: str) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Caller:
    """One caller: a connection until identities exist. `id` is the unit of fair share."""

    id: str = "local"
    sees: Visibility = sees_all
