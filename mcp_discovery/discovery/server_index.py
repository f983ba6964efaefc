"""What is derived from one server's tools. It depends on them alone, so revisions share it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from engine.request import Tokens
from mcp_discovery.discovery.catalogue import Tool
from mcp_discovery.discovery.lexical import Mask, Postings, Vocabulary
from mcp_discovery.discovery.names import Names
from mcp_discovery.discovery.prompts import Prompts
from mcp_discovery.discovery.vectors import key_of
from mcp_discovery.transport.identity import Visibility

MAX_VISIBILITIES = 256  # masks kept, least recently used out first


class ServerIndex:
    """One group of a catalogue, indexed. Positions are those in the group."""

    def __init__(
        self,
        tools: tuple[Tool, ...],
        prompts: Prompts,
        vocabulary: Vocabulary,
        previous: ServerIndex | None = None,
    ) -> None:
        """Takes from `previous`, the same server's of another revision, the prefixes of tools with the
        same content, and that they are warm."""
        self.tools = tools
        self.names = Names(tools)
        self.postings = Postings.of(tools, vocabulary)
        self.read_only: Mask = np.array([tool.read_only for tool in tools], dtype=bool)
        self._prompts = prompts
        known = {} if previous is None else previous.prefixes_by_digest()
        self._prefixes: list[Tokens | None] = [known.get(tool.digest) for tool in tools]
        warm = set() if previous is None else previous._warm_digests()
        self.is_warm: Mask = np.array([tool.digest in warm for tool in tools], dtype=bool)
        """Which tools a warm-up has been through."""
        self._visible: OrderedDict[Visibility, Mask] = OrderedDict()

    def prefix(self, position: int) -> Tokens:
        """The tool's part of the prompt, computed once a definition."""
        prefix = self._prefixes[position]
        if prefix is None:
            prefix = self._prefixes[position] = self._prompts.prefix(self.tools[position])
        return prefix

    @cached_property
    def keys(self) -> Sequence[bytes]:
        """Of each tool's vector."""
        return [key_of(self.prefix(position)) for position in range(len(self.tools))]

    def prefixes_by_digest(self) -> dict[bytes, Tokens]:
        """Those computed so far."""
        pairs = zip(self.tools, self._prefixes, strict=True)
        return {tool.digest: prefix for tool, prefix in pairs if prefix is not None}

    def _warm_digests(self) -> set[bytes]:
        return {tool.digest for tool, is_warm in zip(self.tools, self.is_warm, strict=True) if is_warm}

    def visible(self, sees: Visibility) -> Mask:
        """What `sees` shows, asked once a tool. Kept by the predicate's identity."""
        mask = self._visible.get(sees)
        if mask is None:
            tools = self.tools
            mask = np.fromiter((sees(tool.server, tool.name) for tool in tools), dtype=bool, count=len(tools))
            self._visible[sees] = mask
            if len(self._visible) > MAX_VISIBILITIES:
                self._visible.popitem(last=False)
        self._visible.move_to_end(sees)
        return mask
