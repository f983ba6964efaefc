"""Tools of one definition on several servers, such as one program configured twice.

Of twins that a call may choose from, only the first is ranked; the others are told with it. So they
neither fill the answer nor the model's time, and no server is hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from mcp_discovery.discovery.lexical import Mask


class Twins:
    """Which positions of a catalogue hold the same definition."""

    def __init__(self, forms: Sequence[bytes]) -> None:
        """`forms` are the definitions' SHA-256, by position."""
        # Most have no twin: what their first 64 bits tell apart needs no closer look.
        heads = np.frombuffer(b"".join(forms), dtype="<u8").reshape(-1, 4)[:, 0]
        _, which, counts = np.unique(heads, return_inverse=True, return_counts=True)
        alike: dict[bytes, list[int]] = {}
        for position in np.flatnonzero(counts[which] > 1).tolist():
            alike.setdefault(forms[position], []).append(position)
        self._first: NDArray[np.int64] = np.arange(len(forms), dtype=np.int64)
        self._groups: dict[int, list[int]] = {}
        for group in alike.values():
            if len(group) > 1:
                self._groups[group[0]] = group
                self._first[group] = group[0]
        self._all: NDArray[np.int64] = np.array(sorted(chain(*self._groups.values())), dtype=np.int64)

    def of(self, position: int) -> Sequence[int]:
        """The positions of the same definition, `position` included, ascending."""
        return self._groups.get(int(self._first[position]), [position])

    def firsts(self, mask: Mask) -> Mask:
        """`mask` with only the first of each group of twins that it shows."""
        shown = self._all[mask[self._all]]
        if len(shown) < 2:
            return mask
        _, kept = np.unique(self._first[shown], return_index=True)
        if len(kept) == len(shown):
            return mask
        single = mask.copy()
        single[np.delete(shown, kept)] = False
        return single

    def once(self, positions: Sequence[int]) -> list[int]:
        """`positions` in order, without those whose twin has come before."""
        seen: dict[int, int] = {}
        for position in positions:
            seen.setdefault(int(self._first[position]), position)
        return list(seen.values())
