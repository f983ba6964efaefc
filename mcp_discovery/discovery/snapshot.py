"""A catalogue with everything that is derived from it: what one call works on from start to end.

Built beside the one that serves and put in its place in one assignment. What it caches (prefix tokens,
who sees what) depends on nothing but its tools and its key.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from engine.request import Tokens
from mcp_discovery.discovery.catalogue import Catalogue
from mcp_discovery.discovery.lexical import LexicalIndex, Mask
from mcp_discovery.discovery.names import NameIndex, name_key
from mcp_discovery.discovery.prompts import Prompts
from mcp_discovery.discovery.vectors import Vector, VectorCache, VectorIndex, key_of
from mcp_discovery.transport.identity import Visibility

MAX_VISIBILITIES = 256  # masks kept, least recently used out first


class Snapshot:
    """One revision, indexed. Used from one thread at a time."""

    def __init__(
        self,
        catalogue: Catalogue,
        prompts: Prompts,
        previous: Snapshot | None = None,
        cache: VectorCache | None = None,
    ) -> None:
        """Takes from `previous` what it has computed of the same tools, and the rest of the vectors
        from `cache`; without one, no vector is looked for."""
        self.catalogue = catalogue
        self.names = NameIndex(catalogue.tools)
        self.lexical = LexicalIndex.of(catalogue.tools)
        self.read_only: Mask = np.fromiter(
            (tool.read_only for tool in catalogue.tools), dtype=bool, count=len(catalogue)
        )
        self._prompts = prompts
        known = {} if previous is None else previous.prefixes_by_digest()
        self._prefixes: list[Tokens | None] = [known.get(tool.digest) for tool in catalogue.tools]
        self._visible: OrderedDict[Visibility, Mask] = OrderedDict()
        self.vectors = VectorIndex(len(catalogue))
        if cache is not None:
            self._recall_vectors(cache, previous)

    def prefix(self, position: int) -> Tokens:
        """The tool's part of the prompt, computed once a definition."""
        prefix = self._prefixes[position]
        if prefix is None:
            prefix = self._prefixes[position] = self._prompts.prefix(self.catalogue.tools[position])
        return prefix

    def prefixes_by_digest(self) -> dict[bytes, Tokens]:
        """Those computed so far."""
        pairs = zip(self.catalogue.tools, self._prefixes, strict=True)
        return {tool.digest: prefix for tool, prefix in pairs if prefix is not None}

    def _recall_vectors(self, cache: VectorCache, previous: Snapshot | None) -> None:
        keys = [key_of(self.prefix(position)) for position in range(len(self.catalogue))]
        known = {} if previous is None else previous.vectors_by_key()
        known |= cache.read({key for key in keys if key not in known})
        for position, key in enumerate(keys):
            vector = known.get(key)
            if vector is not None:
                self.vectors.put(position, vector)

    def vectors_by_key(self) -> dict[bytes, Vector]:
        """Those that are there, by what they were computed from."""
        pairs = ((position, self.vectors.get(position)) for position in range(len(self.catalogue)))
        return {key_of(self.prefix(position)): vector for position, vector in pairs if vector is not None}

    def positions_by_prefix(self) -> dict[Tokens, list[int]]:
        """The catalogue's tools, those together whose prefixes are the same."""
        found: dict[Tokens, list[int]] = {}
        for position in range(len(self.catalogue)):
            found.setdefault(self.prefix(position), []).append(position)
        return found

    def visible(self, sees: Visibility) -> Mask:
        """What `sees` shows. Kept by the predicate's identity: give one caller the same one each time."""
        mask = self._visible.get(sees)
        if mask is None:
            tools = self.catalogue.tools
            mask = np.fromiter((sees(tool.server, tool.name) for tool in tools), dtype=bool, count=len(tools))
            mask.flags.writeable = False
            self._visible[sees] = mask
            if len(self._visible) > MAX_VISIBILITIES:
                self._visible.popitem(last=False)
        self._visible.move_to_end(sees)
        return mask

    def of_servers(self, servers: Sequence[str], visible: Mask) -> tuple[Mask, list[str]]:
        """Positions of these servers, and the names that no visible tool has for its server."""
        mask = np.zeros(len(self.catalogue), dtype=bool)
        alike: dict[str, list[str]] = {}
        for name in self.catalogue.servers:
            alike.setdefault(name_key(name), []).append(name)
        unknown: list[str] = []
        for asked in servers:
            names = [asked] if asked in self.catalogue.servers else alike.get(name_key(asked), [])
            positions = [position for name in names for position in self.catalogue.servers[name]]
            mask[positions] = True
            if not visible[positions].any():
                unknown.append(asked)
        return mask, unknown

    def without(self, mask: Mask, exclude: Iterable[str]) -> Mask:
        """`mask` less the tools that `exclude` names."""
        remaining = mask.copy()
        for name in exclude:
            positions = self.names.named(name, mask)
            remaining[positions if len(positions) == 1 else []] = False
        return remaining

    def servers_seen(self, visible: Mask) -> dict[str, int]:
        """Tool counts by server, of visible tools only."""
        counts = {name: int(visible[list(held)].sum()) for name, held in self.catalogue.servers.items()}
        return {name: count for name, count in counts.items() if count}
