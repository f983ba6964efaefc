"""A catalogue with everything that is derived from it: what one call works on from start to end.

Built beside the one that serves and put in its place in one assignment. A server whose tools have not
changed brings its index along, so that a refresh costs what has changed and little more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import numpy as np

from engine.request import Tokens
from mcp_discovery.discovery.catalogue import Catalogue, Tool
from mcp_discovery.discovery.lexical import LexicalIndex, Mask, Vocabulary
from mcp_discovery.discovery.names import NameIndex, name_key
from mcp_discovery.discovery.prompts import Prompts
from mcp_discovery.discovery.server_index import MAX_VISIBILITIES, ServerIndex
from mcp_discovery.discovery.twins import Twins
from mcp_discovery.discovery.vectors import Vector, VectorCache, VectorIndex
from mcp_discovery.transport.identity import Visibility


class Snapshot:
    """One revision, indexed. Used from one thread at a time."""

    def __init__(
        self,
        catalogue: Catalogue,
        prompts: Prompts,
        previous: Snapshot | None = None,
        cache: VectorCache | None = None,
    ) -> None:
        """Takes from `previous` what it has of the same tools, and the rest of the vectors from `cache`;
        without one, no vector is looked for."""
        self.catalogue = catalogue
        self._vocabulary: Vocabulary = Vocabulary() if previous is None else previous._vocabulary
        known = {} if previous is None else previous._indexes
        self._indexes: dict[str, ServerIndex] = {
            server: self._index(group, prompts, known.get(server))
            for server, group in catalogue.groups.items()
        }
        held = list(self._indexes.values())
        self.names = NameIndex(catalogue.tools, [index.names for index in held])
        self.lexical = LexicalIndex.over([index.postings for index in held], self._vocabulary)
        self.read_only: Mask = _joined([index.read_only for index in held])
        self.twins = Twins([tool.form for tool in catalogue.tools])
        self._starts = [positions.start for positions in catalogue.servers.values()]
        self._held = held
        self._prefixes: dict[int, Tokens] = {}  # those that were asked for
        self._visible: OrderedDict[Visibility, Mask] = OrderedDict()
        self.vectors = VectorIndex(len(catalogue))
        self._wants_vectors = cache is not None
        if cache is not None:
            self._recall_vectors(cache, previous)

    def _index(self, group: tuple[Tool, ...], prompts: Prompts, known: ServerIndex | None) -> ServerIndex:
        if known is not None and known.tools is group:
            return known
        return ServerIndex(group, prompts, self._vocabulary, known)

    def prefix(self, position: int) -> Tokens:
        """The tool's part of the prompt, computed once a definition."""
        prefix = self._prefixes.get(position)
        if prefix is None:
            prefix = self._prefixes[position] = self._prefix(position)
        return prefix

    def _prefix(self, position: int) -> Tokens:
        number = bisect_right(self._starts, position) - 1
        return self._held[number].prefix(position - self._starts[number])

    def cold(self) -> Iterator[tuple[ServerIndex, Sequence[int]]]:
        """Of each server, the positions of tools that no warm-up has been through or that lack a vector."""
        for server, index in self._indexes.items():
            held = self.catalogue.servers[server]
            is_cold = ~index.is_warm
            if self._wants_vectors:
                # One that is computed for the revision before while this one is built is lost to this one.
                is_cold |= ~self.vectors.present[held.start : held.stop]
            if is_cold.any():
                yield index, (np.flatnonzero(is_cold) + held.start).tolist()

    def _recall_vectors(self, cache: VectorCache, previous: Snapshot | None) -> None:
        unknown: dict[int, bytes] = {}
        for server, index in self._indexes.items():
            positions = self.catalogue.servers[server]
            before = None if previous is None else previous._indexes.get(server)
            if previous is not None and before is index:
                self.vectors.take(previous.vectors, previous.catalogue.servers[server], positions)
                continue
            known = {} if previous is None or before is None else previous._vectors_of(server)
            for position, key in zip(positions, index.keys, strict=True):
                vector = known.get(key)
                if vector is None:
                    unknown[position] = key
                else:
                    self.vectors.put(position, vector)
        stored = cache.read(set(unknown.values())) if unknown else {}
        for position, key in unknown.items():
            if (vector := stored.get(key)) is not None:
                self.vectors.put(position, vector)

    def without_vector(self) -> dict[int, bytes]:
        """Positions of tools whose vectors are missing, and what they are stored by."""
        found: dict[int, bytes] = {}
        for server, index in self._indexes.items():
            held = self.catalogue.servers[server]
            if not self.vectors.present[held.start : held.stop].all():
                found |= {
                    at: key for at, key in zip(held, index.keys, strict=True) if not self.vectors.present[at]
                }
        return found

    def chill(self) -> None:
        """The engine has lost its cache: no warm-up has been through any server."""
        for index in self._held:
            index.is_warm[:] = False

    def _vectors_of(self, server: str) -> dict[bytes, Vector]:
        """Of one server's tools those that are there, by what they were computed from."""
        keys = zip(self.catalogue.servers[server], self._indexes[server].keys, strict=True)
        found = ((key, self.vectors.get(position)) for position, key in keys)
        return {key: vector for key, vector in found if vector is not None}

    def visible(self, sees: Visibility) -> Mask:
        """What `sees` shows. Kept by the predicate's identity: give one caller the same one each time."""
        mask = self._visible.get(sees)
        if mask is None:
            mask = _joined([index.visible(sees) for index in self._held])
            mask.flags.writeable = False
            self._visible[sees] = mask
            if len(self._visible) > MAX_VISIBILITIES:
                self._visible.popitem(last=False)
        self._visible.move_to_end(sees)
        return mask

    def of_servers(self, servers: Sequence[str], visible: Mask) -> tuple[Mask, list[str]]:
        """Positions of these servers, and the names that no visible tool has for its server."""
        mask = np.zeros(len(self.catalogue), dtype=bool)
        unknown: list[str] = []
        for asked in servers:
            names = [asked] if asked in self.catalogue.servers else self._alike.get(name_key(asked), [])
            positions = [position for name in names for position in self.catalogue.servers[name]]
            mask[positions] = True
            if not visible[positions].any():
                unknown.append(asked)
        return mask, unknown

    @cached_property
    def _alike(self) -> dict[str, list[str]]:
        """Servers by the key of their name."""
        alike: dict[str, list[str]] = {}
        for name in self.catalogue.servers:
            alike.setdefault(name_key(name), []).append(name)
        return alike

    def without(self, mask: Mask, exclude: Iterable[str]) -> Mask:
        """`mask` less the tools that `exclude` names."""
        remaining = mask.copy()
        for name in exclude:
            positions = self.names.named(name, mask)
            remaining[positions if len(positions) == 1 else []] = False
        return remaining

    def shows(self, server: str, visible: Mask) -> bool:
        """Whether `visible` has a tool of this server."""
        held = self.catalogue.servers.get(server, range(0))
        return bool(visible[held.start : held.stop].any())

    def servers_seen(self, visible: Mask) -> dict[str, int]:
        """Tool counts by server, of visible tools only."""
        before = np.concatenate([[0], np.cumsum(visible)])  # visible tools before each position
        counts = np.diff(before[[*self._starts, len(visible)]]).tolist()
        return {name: count for name, count in zip(self.catalogue.servers, counts, strict=True) if count}


def _joined(masks: Sequence[Mask]) -> Mask:
    return np.concatenate([np.zeros(0, dtype=bool), *masks])
