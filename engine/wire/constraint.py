"""The one constraint that can be said on the wire: which items may be listed, and how."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from engine.errors import EngineError

MAX_ITEMS = 1024
MAX_READINGS = 4096  # of one output: more would hold up everybody's step


class _Reading(NamedTuple):
    """One way to read an output: what must follow now, and the items it lists up to there."""

    ahead: tuple[int, ...]  # never empty
    used: frozenset[int] | None  # None: the end is ahead


class UndeclaredConstraint(EngineError):
    """A constraint that is code cannot be sent to an engine in another process."""


class ItemList(msgspec.Struct, frozen=True, array_like=True):
    """An output of 1 to `most` of the token sequences `items`, each at most once, `separator` between
    them, then the token `end`: a choice from a finite set where `most` is 1, such as the numbers of a
    list where it is more.

    One item may begin like another: every reading of the output is followed. An empty separator is
    allowed. `end` belongs among the `stop` tokens of the request.
    """

    items: tuple[tuple[int, ...], ...]
    end: int
    separator: tuple[int, ...] = ()
    most: int = 1

    def __post_init__(self) -> None:
        if not 1 <= len(self.items) <= MAX_ITEMS or not all(self.items):
            raise ValueError(f"an item list has 1 to {MAX_ITEMS} items, and none of them is empty")
        if self.most < 1:
            raise ValueError(f"most must be at least 1, it is {self.most}")

    def allowed(self, output: Sequence[int]) -> Sequence[int]:
        """Tokens that may follow; `end` alone after an output that is complete or is none of these.

        Raises ValueError for an output that can be read in more than `MAX_READINGS` ways.
        """
        readings = _few(self._items(frozenset(), ()))
        for token in output:
            going_on = [reading for reading in readings if reading.ahead[0] == token]
            readings = _few(after for reading in going_on for after in self._after(reading))
        return sorted({reading.ahead[0] for reading in readings}) or (self.end,)

    def _items(self, used: frozenset[int], lead: tuple[int, ...]) -> Iterator[_Reading]:
        for index, item in enumerate(self.items):
            if index not in used:
                yield _Reading(lead + item, used | {index})

    def _after(self, reading: _Reading) -> Iterator[_Reading]:
        """What may follow the first token that is ahead."""
        used = reading.used
        if len(reading.ahead) > 1:
            yield _Reading(reading.ahead[1:], used)
        elif used is not None:
            yield _Reading((self.end,), None)
            if len(used) < self.most:
                yield from self._items(used, self.separator)


def _few(readings: Iterable[_Reading]) -> set[_Reading]:
    found: set[_Reading] = set()
    for reading in readings:
        found.add(reading)
        if len(found) > MAX_READINGS:
            raise ValueError(
                f"the output can be read in more than {MAX_READINGS:,} ways; "
                "let no two items be alike, and put a separator between them"
            )
    return found
