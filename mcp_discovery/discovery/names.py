"""Tools that a query or a list names.

A name matches as it is written, or nearly: whatever its case and separators (`find symbol`,
`findSymbol`, `find-symbol` for `find_symbol`), with its server before it (`github.create_issue`,
`github/create_issue`, `github__create_issue`), or as the end of just one tool's longer name
(`ask_codex` for `mcp__codex__ask_codex`).

A query that as a whole is a name, or a list of names, names its tools whatever the words. Inside a
sentence only what looks like an identifier can be a name: a tool called `search` must not take over
every sentence that says "search". A misspelt name never stands for another tool; it gets suggestions.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

from mcp_discovery.discovery.catalogue import Tool
from mcp_discovery.discovery.lexical import Mask
from mcp_discovery.discovery.prompts import words_of

MAX_NAMED = 64  # positions that one query can name
MAX_WHOLE = 300  # characters of a query that as a whole can be a name
MAX_IDENTIFIERS = 256  # identifiers of a query that are looked up
MAX_SUGGESTED = 3

_SEPARATORS = re.compile(r"[_\-./:\s]+")
_ASCII_SEPARATORS = {at: None for at in range(128) if _SEPARATORS.match(chr(at))}
_SERVER_ENDS = re.compile(r"__|[_\-./:\s]")
_NAMESPACE_ENDS = re.compile(r"__|[./:]")
_LIST_BREAKS = re.compile(r"[,;\n、，；]|\s(?:and|&|\+)\s")
_TOKENS = re.compile(r"[^\s,;、，；\"'`()\[\]{}<>“”‘’«»]+")
_IDENTIFIER = re.compile(r"\w[_\-./:]+\w|[a-z0-9][A-Z]")
_CODE = re.compile(r"\w_\w|^[a-z][a-z0-9]*[A-Z]")
_QUOTES = " \t\r\n\"'`“”‘’«»"


def name_key(name: str) -> str:
    """What is left of a name without case, separators and compatibility forms."""
    if name.isascii():  # the same in a tenth of the time
        return name.lower().translate(_ASCII_SEPARATORS)
    return _SEPARATORS.sub("", unicodedata.normalize("NFKC", name).casefold())


@dataclass(frozen=True, slots=True)
class Resolved:
    """Positions of the names that were found, in their order, and one sentence for each that was not."""

    positions: tuple[int, ...]
    problems: tuple[str, ...]


Kind = Literal["exact", "near", "of_server", "suffix", "initial"]


class Names:
    """Every way to name a tool of one group, by its position in the group."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.size = len(tools)
        self.maps: dict[Kind, dict[str, list[int]]] = {kind: {} for kind in get_args(Kind)}
        for position, tool in enumerate(tools):
            key = name_key(tool.name)
            self._add("exact", tool.id, position)
            self._add("exact", tool.name, position)
            self._add("near", key, position)
            self._add("of_server", name_key(tool.server) + key, position)
            self._add("initial", key[:1], position)
            for suffix in _suffixes(tool.name):
                self._add("suffix", suffix, position)

    def _add(self, kind: Kind, key: str, position: int) -> None:
        self.maps[kind].setdefault(key, []).append(position)


class _Holders:
    """Which of many groups hold a key, so that a look-up asks no others. Most keys are held by one."""

    def __init__(self, groups: Sequence[Mapping[str, object]]) -> None:
        self._last: dict[str, int] = {}
        self._several: dict[str, list[int]] = {}
        for number, keys in enumerate(groups):
            for key in keys.keys() & self._last.keys():
                self._several.setdefault(key, [self._last[key]]).append(number)
            self._last.update(dict.fromkeys(keys, number))

    def of(self, key: str) -> Sequence[int]:
        """Numbers of the groups, ascending."""
        last = self._last.get(key)
        return () if last is None else self._several.get(key, (last,))


class NameIndex:
    """Every way to name a tool of one catalogue, by position. Only what `mask` shows can match."""

    def __init__(self, tools: Sequence[Tool], groups: Sequence[Names] | None = None) -> None:
        """`groups` are the names of `tools`, one group after the other; None makes one of all."""
        self._tools = tools
        self._groups = [Names(tools)] if groups is None else groups
        self._starts = [0, *accumulate(group.size for group in self._groups)]
        self._holders: dict[Kind, _Holders] = {
            kind: _Holders([group.maps[kind] for group in self._groups]) for kind in get_args(Kind)
        }

    def _get(self, kind: Kind, key: str) -> Sequence[int]:
        """Positions, ascending."""
        found: list[int] = []
        for number in self._holders[kind].of(key):
            start = self._starts[number]
            found += (start + position for position in self._groups[number].maps[kind][key])
        return found

    def find(self, query: str, mask: Mask) -> list[int]:
        """Positions of the tools that `query` names, best match first, each once."""
        if len(query) <= MAX_WHOLE:
            named = self._whole(query, mask) or self._listed(query, mask)
            if named:
                return named[:MAX_NAMED]
        if not _IDENTIFIER.search(query):  # nor any part of it
            return []
        identifiers = (token for token in _TOKENS.findall(query) if _IDENTIFIER.search(token))
        tokens = [token for token, _ in zip(identifiers, range(MAX_IDENTIFIERS), strict=False)]
        return _once([self._identifier(token, mask) for token in tokens])[:MAX_NAMED]

    def resolve(self, names: Sequence[str], mask: Mask) -> Resolved:
        """Exactly the tools that `names` name; an unknown or ambiguous name is a problem, never a guess."""
        found: list[list[int]] = []
        problems: list[str] = []
        for name in names:
            positions = self.named(name.strip(), mask)
            if len(positions) == 1:
                found.append(positions)
            elif positions:
                ids = ", ".join(self._tools[position].id for position in positions[:5])
                more = f" and {len(positions) - 5} more" if len(positions) > 5 else ""
                problems.append(f"{_shown(name)} is ambiguous: name one of {ids}{more}.")
            else:
                guesses = self._suggest(name, mask) if len(problems) < MAX_SUGGESTED else []
                hint = f"; similar names are {', '.join(guesses)}" if guesses else ""
                problems.append(f"No tool is named {_shown(name)}{hint}.")
        return Resolved(tuple(_once(found)), tuple(problems))

    def named(self, name: str, mask: Mask) -> list[int]:
        """Positions of the tools that `name` names: as an id or name, as a near name, as server and
        name; the first of these that gives anything."""
        if not (key := name_key(name)):
            return []
        return (
            _shown_in(mask, self._get("exact", name))
            or _shown_in(mask, self._get("near", key))
            or _shown_in(mask, self._with_server(name))
        )

    def _whole(self, text: str, mask: Mask) -> list[int]:
        text = text.strip(_QUOTES)
        for name in dict.fromkeys((text, text.rstrip(".!?。！？" + _QUOTES))):
            if key := name_key(name):
                exact = _shown_in(mask, self._get("exact", name))
                near = _shown_in(mask, self._get("near", key))
                with_server = _shown_in(mask, self._with_server(name))
                found = _once([exact, near, with_server]) or self._by_suffix(key, mask)
                if found:
                    return found
        return []

    def _listed(self, text: str, mask: Mask) -> list[int]:
        """Every part of a list names a tool, or nothing is named; a list has two parts or more."""
        found: list[list[int]] = []
        parts = _LIST_BREAKS.split(text)
        for part in parts if len(parts) > 1 else ():
            if part.strip(_QUOTES):
                found.append(self._whole(part, mask))
                if not found[-1]:
                    return []
        return _once(found)

    def _identifier(self, token: str, mask: Mask) -> list[int]:
        """A token of a sentence: as written, or near with the same words; `e-mail` is no `email`, and
        a product such as `DuckDB` is not the end of a tool's name."""
        token = token.strip(".:!?。！？-/")
        exact = _shown_in(mask, self._get("exact", token))
        words = words_of(token)
        near = [
            position
            for position in _shown_in(mask, self._get("near", name_key(token)))
            if words_of(self._tools[position].name) == words
        ]
        found = _once([exact, near]) or _shown_in(mask, self._with_server(token))
        return found if found or not _CODE.search(token) else self._by_suffix(name_key(token), mask)

    def _with_server(self, text: str) -> list[int]:
        """Positions of the tools whose server and name are the two sides of one separator of `text`."""
        text = text.removeprefix("mcp__")
        positions = self._get("of_server", name_key(text))
        if not positions:
            return []
        ends = {name_key(text[end.end() :]) for end in _SERVER_ENDS.finditer(text)}
        return [position for position in positions if name_key(self._tools[position].name) in ends]

    def _by_suffix(self, key: str, mask: Mask) -> list[int]:
        found = _shown_in(mask, self._get("suffix", key))
        return found if len(found) == 1 else []

    def _suggest(self, name: str, mask: Mask) -> list[str]:
        key = name_key(re.split(r"__|[/:]", name)[-1])
        near = _shown_in(mask, self._get("suffix", key))
        alike = _shown_in(mask, self._get("initial", key[:1]))
        keys = {name_key(self._tools[position].name): position for position in reversed(alike)}
        close = difflib.get_close_matches(key, keys, n=MAX_SUGGESTED, cutoff=0.7)
        positions = _once([near, [keys[match] for match in close]])
        return [self._tools[position].id for position in positions[:MAX_SUGGESTED]]


def _suffixes(name: str) -> Iterator[str]:
    """Keys of the ends of a name: of two words or more, or after a namespace separator."""
    ends = {name_key(name[end.end() :]) for end in _NAMESPACE_ENDS.finditer(name)}
    words = words_of(name).split()
    ends.update(name_key("".join(words[start:])) for start in range(1, len(words) - 1))
    return (end for end in ends if end)


def _shown_in(mask: Mask, positions: Sequence[int]) -> list[int]:
    return [position for position in positions if mask[position]]


def _once(groups: Sequence[Sequence[int]]) -> list[int]:
    return list(dict.fromkeys(position for group in groups for position in group))


def _shown(name: str) -> str:
    return repr(name if len(name) <= 80 else name[:79] + "…")
