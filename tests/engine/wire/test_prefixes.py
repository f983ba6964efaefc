"""Both tables of prefixes stay the same, whatever is evicted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import Tokens
from engine.wire.frames import ProtocolError
from engine.wire.messages import Define
from engine.wire.prefixes import KnownPrefixes, SentPrefixes

PREFIX = st.lists(st.integers(0, 9), max_size=7).map(tuple)


class Pair:
    """A client's table whose definitions go to a server's table of the same bounds."""

    def __init__(self, slots: int, tokens: int) -> None:
        self.sent = SentPrefixes(slots, tokens, self.define)
        self.known = KnownPrefixes(slots, tokens)
        self.slots, self.tokens = slots, tokens
        self.definitions: list[Define] = []

    def define(self, message: Define) -> None:
        self.definitions.append(message)
        self.known.define(message)

    def say(self, prefixes: list[Tokens]) -> tuple[object, ...]:
        refs = self.sent.refs(prefixes)
        assert self.known.resolve(refs) == tuple(prefixes)
        self.check()
        return refs

    def check(self) -> None:
        """Both tables rebuilt from what they hold."""
        sent = self.sent
        held = {number: prefix for number, prefix in enumerate(sent._prefixes) if prefix is not None}
        untold = set(sent._dropped)
        told = {number: prefix for number, prefix in self.known._prefixes.items() if number not in untold}
        assert told == held
        assert sent._by_value == {prefix: number for number, prefix in held.items()}
        assert sent._by_identity == {id(prefix): number for number, prefix in held.items()}
        assert sorted([*sent._free, *held]) == list(range(self.slots))
        assert sent._tokens_left == self.tokens - sum(map(len, held.values())) >= 0
        assert self.known._tokens_left == self.tokens - sum(map(len, self.known._prefixes.values())) >= 0


def another(prefix: Tokens) -> Tokens:
    """Equal, and another object."""
    return tuple(token for token in prefix)


@settings(max_examples=300, deadline=None)
@given(
    slots=st.integers(1, 6),
    tokens=st.integers(1, 20),
    pool=st.lists(PREFIX, min_size=1, max_size=12),
    data=st.data(),
)
def test_what_the_server_resolves_is_what_the_client_meant(
    slots: int, tokens: int, pool: list[Tokens], data: st.DataObject
) -> None:
    pair = Pair(slots, tokens)
    for picks in data.draw(st.lists(st.lists(st.integers(0, 11), max_size=9), max_size=12)):
        prefixes = [pool[pick % len(pool)] for pick in picks]
        if data.draw(st.booleans()):
            prefixes = [another(prefix) for prefix in prefixes]
        pair.say(prefixes)


def test_a_prefix_is_sent_once_whatever_object_it_is() -> None:
    pair = Pair(8, 100)
    for _ in range(3):
        assert pair.say([another((1, 2)), another((3, 4)), another((1, 2))]) == (0, 1, 0)
    assert len(pair.definitions) == 2


def test_what_was_not_used_for_longest_is_evicted() -> None:
    pair = Pair(3, 100)
    one, two, three, four = (1,), (2,), (3,), (4,)
    pair.say([one, two, three])
    pair.say([four])  # the hand goes round once and takes the first
    pair.say([two, four])
    assert pair.say([one])[0] == 2  # three's
    assert [definition.tokens for definition in pair.definitions] == [one, two, three, four, one]


def test_more_prefixes_than_the_table_holds_are_sent_as_they_are() -> None:
    pair = Pair(2, 100)
    prefixes = [(number,) for number in range(5)]
    refs = pair.say(prefixes)
    assert refs[:2] == (0, 1)
    assert refs[2:] == tuple(prefixes[2:])
    assert pair.say([(1,) * 101, ()]) == ((1,) * 101, ())


@pytest.mark.parametrize(
    "message",
    [
        Define(-1, (1,)),
        Define(4, (1,)),
        Define(0, (1,)),  # in use
        Define(1, ()),
        Define(1, (1,) * 20),
        Define(1, (1,), drop=(3,)),
        Define(1, (1,), drop=(0, 0)),
    ],
)
def test_a_server_refuses_what_was_not_agreed(message: Define) -> None:
    known = KnownPrefixes(4, 20)
    known.define(Define(0, (1, 2)))
    with pytest.raises(ProtocolError) as caught:
        known.define(message)
    assert caught.value.code == "bad_prefix"
    with pytest.raises(ProtocolError, match="Prefix number 3 was not defined"):
        known.resolve((3,))
