"""Rows that run whole: what a block takes of a step, how it is cut, and what it launches."""

from __future__ import annotations

from array import array
from itertools import accumulate
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import StepRow
from engine.errors import EngineFault
from engine.prefix_tree import Pages
from engine.request import Tokens
from engine.sequence import RowBlock

PAGE = 4
SUFFIX = array("i", (90, 91, 92))


class Row(NamedTuple):
    """A row by itself: its prefix, the chain that holds the beginning of it, and pages of its own."""

    prefix: Tokens
    chain: Pages
    own: list[int]


def make_row(index: int, prefix: int, resident: int) -> Row:
    """A row whose prefix has `prefix` tokens, `resident` whole pages of it computed; pages by its index."""
    chain = tuple(100 * index + page for page in range(min(resident, prefix // PAGE)))
    own = -(-(prefix + len(SUFFIX)) // PAGE) - len(chain)
    return Row(
        tuple(range(10 * index, 10 * index + prefix)),
        chain,
        [100 * index + 50 + page for page in range(own)],
    )


def alone(row: Row) -> StepRow:
    """The row as a step runs it by itself."""
    start = len(row.chain) * PAGE
    return StepRow(array("i", row.prefix[start:]) + SUFFIX, start, (*row.chain, *row.own), True)


def block_of(rows: list[Row]) -> RowBlock:
    return RowBlock(
        3,
        [row.prefix for row in rows],
        [row.chain for row in rows],
        [len(row.own) for row in rows],
        [page for row in rows for page in row.own],
        SUFFIX,
        list(accumulate(len(alone(row).tokens) for row in rows)),
    )


sizes = st.lists(st.tuples(st.integers(0, 14), st.integers(0, 3)), min_size=1, max_size=9)


@given(sizes, st.integers(0, 80), st.integers(0, 12))
def test_a_block_takes_as_many_whole_rows_as_there_is_room_for(
    drawn: list[tuple[int, int]], tokens: int, most: int
) -> None:
    rows = [make_row(index, *size) for index, size in enumerate(drawn)]
    lengths = [len(alone(row).tokens) for row in rows]
    taken, count = block_of(rows).fit(tokens, most)
    assert taken == sum(lengths[:count]) <= tokens
    assert count <= most
    assert count in (len(rows), most) or sum(lengths[: count + 1]) > tokens


@given(sizes, st.data())
def test_the_parts_of_a_cut_block_launch_its_rows_in_order(
    drawn: list[tuple[int, int]], data: st.DataObject
) -> None:
    rows = [make_row(index, *size) for index, size in enumerate(drawn)]
    launched: list[StepRow] = []
    rest: RowBlock | None = block_of(rows)
    while rest is not None:
        block = rest
        rest = block.cut(data.draw(st.integers(1, len(block))))
        assert block.first == 3 + len(launched)
        part = block.launch(PAGE)
        assert (block.pending, block.launched) == (0, len(part.tokens))
        assert len(block) == len(part)
        with pytest.raises(EngineFault):
            block.launch(PAGE)
        launched.extend(part.rows())
    assert launched == [alone(row) for row in rows]
