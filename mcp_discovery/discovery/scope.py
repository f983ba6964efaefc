"""What one call may see of a snapshot, and what it asks to see of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mcp_discovery.discovery.call import DiscoverRequest
from mcp_discovery.discovery.lexical import Mask
from mcp_discovery.discovery.names import name_key
from mcp_discovery.discovery.snapshot import Snapshot
from mcp_discovery.transport.identity import Caller


@dataclass(frozen=True, slots=True)
class Scope:
    """`visible` is what the caller may see, `mask` what is left of it by the call's own filters."""

    snapshot: Snapshot
    visible: Mask
    mask: Mask
    servers_missing: tuple[str, ...]
    servers_stale: tuple[str, ...]
    may_lack: bool  # a server that cannot be reached could have held what is asked for
    notes: tuple[str, ...]

    @classmethod
    def of(cls, snapshot: Snapshot, request: DiscoverRequest, caller: Caller) -> Scope:
        visible = mask = snapshot.visible(caller.sees)
        # A missing server's tools are unknown: it is shown to whom a tool of any name would be.
        missing = wanted_missing = tuple(
            name for name in snapshot.catalogue.servers_missing if caller.sees(name, "*")
        )
        stale = tuple(name for name in snapshot.catalogue.servers_stale if snapshot.shows(name, visible))
        notes: list[str] = []
        if request.servers:
            of_servers, unknown = snapshot.of_servers(request.servers, visible)
            mask = mask & of_servers
            asked = {name_key(name) for name in request.servers}
            wanted_missing = tuple(name for name in missing if name_key(name) in asked)
            unreachable = {name_key(name) for name in wanted_missing}
            unknown = [name for name in unknown if name_key(name) not in unreachable]
            if unknown:
                known = list(snapshot.servers_seen(visible))
                notes.append(f"No server is named {some(unknown)}; there are {some(known) or 'none'}.")
        if request.read_only:
            mask = mask & snapshot.read_only
        if request.exclude:
            mask = snapshot.without(mask, request.exclude)
        if wanted_missing:
            notes.append(f"The tools of {some(wanted_missing)} are not known at present.")
        return cls(snapshot, visible, mask, missing, stale, bool(wanted_missing), tuple(notes))

    def also_on(self, position: int) -> tuple[str, ...]:
        """The other servers that this call may choose from and that have the very same tool."""
        tools = self.snapshot.catalogue.tools
        twins = self.snapshot.twins.of(position)
        return tuple(tools[twin].server for twin in twins if twin != position and self.mask[twin])

    @property
    def visible_tools(self) -> int:
        return int(np.count_nonzero(self.visible))

    @property
    def emptiness(self) -> str:
        """Why the mask shows nothing; "" where it shows something."""
        if not len(self.snapshot.catalogue):
            return "The catalogue holds no tools."
        if not self.visible.any():
            return "No tool is visible to this caller."
        if not self.mask.any():
            return "No tool is left by servers, exclude and read_only."
        return ""


def some(names: Sequence[str], most: int = 8) -> str:
    """The first names of a list, and how many more there are."""
    shown = ", ".join(name if len(name) <= 80 else name[:79] + "…" for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
