"""Rows that run whole: what a block takes of a step, how it is cut, and what it launches."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import StepRow
from engine.errors import EngineFault
from engine.sequence import Row, RowBlock

PAGE = 4
SUFFIX = array("i", (90, 91, 92))


def make_row(index: int, prefix: int, resident: int) -> Row:
    """A row whose prefix has `prefix` tokens, `resident` whole pages of it computed; pages by its index."""
    chain = tuple(100 * index + page for page in range(min(resident, prefix // PAGE)))
    own = -(-(prefix + len(SUFFIX)) // PAGE) - len(chain)
    pages = [100 * index + 50 + page for page in range(own)]
    return Row(index, tuple(range(10 * index, 10 * index + prefix)), own, chain, pages)


def alone(row: Row) -> StepRow:
    """The row as a step runs it by itself."""
    start = len(row.chain) * PAGE
    tokens = array("i", row.prefix[start:]) + SUFFIX
    return StepRow(tokens, start, (*row.chain, *row.pages), True)


sizes = st.lists(st.tuples(st.integers(0, 14), st.integers(0, 3)), min_size=1, max_size=9)


@given(sizes, st.integers(0, 80), st.integers(0, 12))
def test_a_block_takes_as_many_whole_rows_as_there_is_room_for(
    drawn: list[tuple[int, int]], tokens: int, most: int
) -> None:
    rows = [make_row(index, *size) for index, size in enumerate(drawn)]
    lengths = [len(alone(row).tokens) for row in rows]
    taken, count = RowBlock(rows, SUFFIX, PAGE).fit(tokens, most)
    assert taken == sum(lengths[:count]) <= tokens
    assert count <= most
    assert count in (len(rows), most) or sum(lengths[: count + 1]) > tokens


@given(sizes, st.data())
def test_the_parts_of_a_cut_block_launch_its_rows_in_order(
    drawn: list[tuple[int, int]], data: st.DataObject
) -> None:
    rows = [make_row(index, *size) for index, size in enumerate(drawn)]
    launched: list[StepRow] = []
    rest: RowBlock | None = RowBlock([*rows], SUFFIX, PAGE)
    while rest is not None:
        block = rest
        rest = block.cut(data.draw(st.integers(1, len(block.rows))), PAGE)
        part = block.launch(PAGE)
        assert (block.pending, block.launched) == (0, len(part.tokens))
        with pytest.raises(EngineFault):
            block.launch(PAGE)
        launched.extend(part.rows())
    assert launched == [alone(row) for row in rows]
