"""Prefixes that are sent once a connection and then called by a number.

The client decides: it says which number a prefix gets and which numbers to forget, so both ends hold
the same table at every point of the stream. Both are bounded by slots and by tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.request import Tokens
from engine.wire.frames import ProtocolError
from engine.wire.messages import Define, PrefixRef


class SentPrefixes:
    """The client's table of one connection. What was not used for longest goes first, nearly: the hand of
    a clock passes over what was used since it last came by."""

    def __init__(self, slots: int, tokens: int, define: Callable[[Define], None]) -> None:
        """`define` sends a definition; it must go out before what refers to it."""
        self._define = define
        self._most_tokens = tokens
        self._tokens_left = tokens
        self._prefixes: list[Tokens | None] = [None] * slots
        self._used = bytearray(slots)
        self._free = list(range(slots - 1, -1, -1))
        self._hand = 0
        self._dropped: list[int] = []  # not told yet
        # Hashing a tuple of tokens costs more than sending its number. The table keeps its prefixes alive,
        # so an object with the same identity is the same prefix.
        self._by_identity: dict[int, int] = {}
        self._by_value: dict[Tokens, int] = {}

    def refs(self, prefixes: Sequence[Tokens]) -> tuple[PrefixRef, ...]:
        """What stands for `prefixes` in a message that is sent next: a number each, or the prefix itself
        where the table has no room beside the others."""
        known, used = self._by_identity, self._used
        refs: list[PrefixRef] = []
        complete = True
        for prefix in prefixes:
            number = known.get(id(prefix))
            if number is None:
                refs.append(prefix)
                complete = False
            else:
                used[number] = 1
                refs.append(number)
        if not complete:
            self._number_missing(refs)
        return tuple(refs)

    def _number_missing(self, refs: list[PrefixRef]) -> None:
        in_use = {ref for ref in refs if isinstance(ref, int)}
        for at, ref in enumerate(refs):
            if isinstance(ref, int):
                continue
            prefix = tuple(ref)
            number = self._by_value.get(prefix)
            if number is not None:
                self._forget_object(number)
            elif self._make_room(len(prefix), in_use):
                number = self._free[-1]
                self._define(Define(number, prefix, tuple(self._dropped)))  # raises before anything is noted
                self._dropped.clear()
                self._free.pop()
                self._by_value[prefix] = number
                self._tokens_left -= len(prefix)
            else:
                continue
            self._prefixes[number] = prefix
            self._by_identity[id(prefix)] = number
            self._used[number] = 1
            in_use.add(number)
            refs[at] = number

    def _make_room(self, tokens: int, in_use: set[int]) -> bool:
        """Frees a slot and as many tokens, none of `in_use`. False where that cannot be."""
        if not 0 < tokens <= self._most_tokens:
            return False
        for _ in range(2 * len(self._prefixes)):
            if self._free and self._tokens_left >= tokens:
                return True
            number = self._hand
            self._hand = (number + 1) % len(self._prefixes)
            if number in in_use or self._prefixes[number] is None:
                continue
            if self._used[number]:
                self._used[number] = 0
            else:
                self._drop(number)
        return bool(self._free) and self._tokens_left >= tokens

    def _drop(self, number: int) -> None:
        prefix = self._forget_object(number)
        del self._by_value[prefix]
        self._prefixes[number] = None
        self._tokens_left += len(prefix)
        self._free.append(number)
        self._dropped.append(number)

    def _forget_object(self, number: int) -> Tokens:
        """The prefix is, or will be, another object."""
        prefix = self._prefixes[number]
        assert prefix is not None
        del self._by_identity[id(prefix)]
        return prefix


class KnownPrefixes:
    """The server's table of one connection. Every method raises ProtocolError where the client has not
    kept to what was agreed."""

    def __init__(self, slots: int, tokens: int) -> None:
        self._slots = slots
        self._tokens_left = tokens
        self._prefixes: dict[int, Tokens] = {}

    def define(self, message: Define) -> None:
        for number in message.drop:
            self._tokens_left += sum(map(len, self.resolve((number,))))
            del self._prefixes[number]
        number, tokens = message.number, message.tokens
        if not 0 <= number < self._slots or number in self._prefixes:
            raise ProtocolError("bad_prefix", f"Prefix number {number} is out of range or in use.")
        if not 0 < len(tokens) <= self._tokens_left:
            raise ProtocolError(
                "bad_prefix", f"A prefix of {len(tokens)} tokens is empty or beyond what the table may hold."
            )
        self._tokens_left -= len(tokens)
        self._prefixes[number] = tokens

    def resolve(self, refs: tuple[PrefixRef, ...]) -> tuple[Tokens, ...]:
        known = self._prefixes
        try:
            return tuple([known[ref] if isinstance(ref, int) else ref for ref in refs])
        except KeyError as missing:
            raise ProtocolError("bad_prefix", f"Prefix number {missing} was not defined.") from None
