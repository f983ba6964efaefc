"""The constraint that can be sent allows just what it says: compared with all outputs written out."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.wire import ItemList

TOKEN = st.integers(0, 3)
ITEM = st.lists(TOKEN, min_size=1, max_size=3).map(tuple)


def outputs(constraint: ItemList) -> set[tuple[int, ...]]:
    """Every whole output."""
    found = set()
    for count in range(1, constraint.most + 1):
        for chosen in itertools.permutations(constraint.items, count):
            said = chosen[0]
            for item in chosen[1:]:
                said += constraint.separator + item
            found.add((*said, constraint.end))
    return found


@settings(deadline=None)
@given(
    items=st.lists(ITEM, min_size=1, max_size=4).map(tuple),
    separator=st.lists(TOKEN, max_size=2).map(tuple),
    end=st.integers(0, 4),
    most=st.integers(1, 3),
)
def test_it_allows_the_beginnings_of_its_outputs_and_nothing_else(
    items: tuple[tuple[int, ...], ...], separator: tuple[int, ...], end: int, most: int
) -> None:
    constraint = ItemList(items, end, separator, most)
    every = outputs(constraint)
    beginnings = {output[:length] for output in every for length in range(len(output))}
    for beginning in beginnings:
        follows = {
            each[len(beginning)]
            for each in every
            if each[: len(beginning)] == beginning and len(each) > len(beginning)
        }
        assert list(constraint.allowed(beginning)) == sorted(follows)
    for whole in every - beginnings:
        assert constraint.allowed(whole) == (end,)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(constraint), type=ItemList) == constraint


@pytest.mark.parametrize(("items", "most"), [((), 1), (((1,), ()), 1), (((1,),), 0), (((1,),) * 1025, 1)])
def test_a_list_that_cannot_be_said_is_refused(items: tuple[tuple[int, ...], ...], most: int) -> None:
    with pytest.raises(ValueError, match=r"item list|most must be"):
        ItemList(items, 9, most=most)


def test_an_output_that_can_be_read_in_too_many_ways_is_an_error_at_once() -> None:
    alike = ItemList(tuple((5,) * length for length in range(1, 201)), end=9, most=200)
    assert alike.allowed((5,) * 3) == [5, 9]
    with pytest.raises(ValueError, match="more than 4,096 ways"):
        alike.allowed((5,) * 200)
    apart = ItemList(alike.items, end=9, separator=(7,), most=200)
    assert apart.allowed((5, 5, 5, 7, 5, 5, 5, 5)) == [5, 7, 9]
