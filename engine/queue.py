"""Who is next: fair between callers, first come first served inside one, with a bounded bypass."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Turn(Enum):
    """What became of a request whose turn it was."""

    TAKEN = auto()  # admitted
    GONE = auto()  # ended otherwise: it waits no more, and passed nobody
    NO_PAGES = auto()  # its pages are not free: others may pass, up to the bound
    LATER = auto()  # it would not run yet: others may pass
    STOP = auto()  # nothing else is to be tried now


class _Waiting(Generic[T]):
    # Not a dataclass: no generic one can be compiled.
    def __init__(self, item: T, caller: str, tokens: int) -> None:
        self.item = item
        self.caller = caller
        self.tokens = tokens
        self.passed = 0  # admissions that went before it though its turn was earlier
        self.short_since: float | None = None  # when its pages were first found not to be free


@dataclass(frozen=True, slots=True)
class Bypass:
    """How long a request may be passed by others, and how many are looked at in one round.

    Past `admissions` or `seconds` nothing is admitted behind a request that is short of pages until
    it has them: what is returned meanwhile is earmarked for it.
    """

    admissions: int = 32
    seconds: float = 1.0
    most_short: int = 8  # requests found short of pages, each at the price of matching its prefixes
    most_skipped: int = 128


def _in_order(own: OrderedDict[_Waiting[T], None]) -> Iterator[_Waiting[T]]:
    """Who waits of one caller, by a few at a time: a round rarely looks at more, however many wait."""
    stayed = 0
    while some := list(islice(own, stayed, stayed + 16)):
        for waiting in some:
            yield waiting
            stayed += waiting in own


def _add(counts: dict[int, int], key: int, change: int) -> None:
    """What is counted down to none is forgotten."""
    count = counts.get(key, 0) + change
    if count:
        counts[key] = count
    else:
        del counts[key]


class WaitQueue(Generic[T]):
    """Requests that wait for admission. Items are hashable and stand in the queue once.

    `watch` is called with each that is to have its turn, and what it returns with what became of it.
    """

    def __init__(
        self, bypass: Bypass | None = None, watch: Callable[[T], Callable[[Turn], None]] | None = None
    ) -> None:
        self._bypass = bypass or Bypass()
        self._watch = watch
        self._waiting: dict[T, _Waiting[T]] = {}
        # Callers in the order of their turns; an admission sends its caller to the back.
        self._callers: OrderedDict[str, OrderedDict[_Waiting[T], None]] = OrderedDict()
        self._tokens_of: dict[str, int] = {}
        self._with_tokens: dict[int, int] = {}  # how many callers have so many
        self._of_size: dict[int, int] = {}  # how many waiting requests are of so many tokens
        self._overdue = 0  # how many were passed by as many as may pass them
        self.tokens = 0
        self._short: set[_Waiting[T]] = set()  # whose pages were not free when their turn came last

    @property
    def is_short(self) -> bool:
        """Whether somebody waits for pages. A round that stops before it comes to them changes nothing."""
        return bool(self._short)

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, item: T) -> bool:
        return item in self._waiting

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._waiting))

    def push(self, item: T, caller: str, tokens: int) -> None:
        waiting = self._waiting[item] = _Waiting(item, caller, tokens)
        _add(self._of_size, tokens, 1)
        self._overdue += self._is_overdue(waiting)
        self._callers.setdefault(caller, OrderedDict())[waiting] = None
        self._count(caller, tokens)

    def remove(self, item: T) -> bool:
        """Takes an item out, wherever it stands. False where it does not wait."""
        waiting = self._waiting.pop(item, None)
        if waiting is None:
            return False
        self._count(waiting.caller, -waiting.tokens)
        _add(self._of_size, waiting.tokens, -1)
        self._overdue -= self._is_overdue(waiting)
        self._short.discard(waiting)
        own = self._callers[waiting.caller]
        del own[waiting]
        if not own:
            del self._callers[waiting.caller]
            self._count(waiting.caller, None)
        return True

    def _count(self, caller: str, tokens: int | None) -> None:
        """`tokens` more of a caller; None: it waits no more."""
        before = self._tokens_of.pop(caller, None)
        if before is not None:
            _add(self._with_tokens, before, -1)
        if tokens is not None:
            now = self._tokens_of[caller] = (before or 0) + tokens
            _add(self._with_tokens, now, 1)
            self.tokens += tokens

    def tokens_ahead(self, caller: str, tokens: int) -> int:
        """Tokens that have their turn before a request of `tokens` that `caller` pushed now: its own
        earlier ones, and of each other caller as much as it has, but no more than its own share."""
        own = self._tokens_of.get(caller, 0)
        share = own + tokens
        # By how many callers have as much, since most have the same: thousands of callers cost nothing.
        # Its own are within its share, so they stand in the sum as they are.
        return sum(min(held, share) * callers for held, callers in self._with_tokens.items())

    @property
    def least_tokens(self) -> float:
        """Of any waiting request that is not overdue; 0 where one is, infinity where nobody waits."""
        return 0 if self._overdue else min(self._of_size, default=math.inf)

    def is_overdue(self, item: T) -> bool:
        """Whether an item that waits was passed by as many as may pass it."""
        waiting = self._waiting.get(item)
        return waiting is not None and self._is_overdue(waiting)

    def _is_overdue(self, waiting: _Waiting[T]) -> bool:
        return waiting.passed >= self._bypass.admissions

    def admit(self, attempt: Callable[[T], Turn], now: float) -> None:
        """Offers each its turn, in order, until one says stop or a bound is reached."""
        skipped: list[_Waiting[T]] = []
        short = 0
        for waiting in self._turns():
            told = None if self._watch is None else self._watch(waiting.item)
            turn = attempt(waiting.item)
            if told is not None:
                told(turn)
            if turn is Turn.STOP:
                return
            if turn in (Turn.TAKEN, Turn.GONE):
                if turn is Turn.TAKEN:
                    self._callers.move_to_end(waiting.caller)
                    for other in skipped:
                        other.passed += 1
                        self._overdue += other.passed == self._bypass.admissions
                self.remove(waiting.item)
                continue
            skipped.append(waiting)
            if turn is Turn.NO_PAGES:
                short += 1
                self._short.add(waiting)
                if self._is_earmarked(waiting, now) or short >= self._bypass.most_short:
                    return
            else:
                self._short.discard(waiting)
            if len(skipped) >= self._bypass.most_skipped:
                return

    def _turns(self) -> Iterator[_Waiting[T]]:
        """One of each caller in rotation, then the next of each. Who has had its turn may leave the queue."""
        rotation: deque[Iterator[_Waiting[T]]] = deque()
        for own in self._callers_in_order():
            in_order = _in_order(own)
            yield next(in_order)
            rotation.append(in_order)
        while rotation:
            in_order = rotation.popleft()
            waiting = next(in_order, None)
            if waiting is not None:
                yield waiting
                rotation.append(in_order)

    def _callers_in_order(self) -> Iterator[OrderedDict[_Waiting[T], None]]:
        """Who waits of each caller that waits now, by a few callers at a time: a round rarely comes to the
        others. After its turn a caller may leave, or go to the back: it has no second turn here."""
        callers = self._callers
        left, stayed = len(callers), 0
        while left:
            for caller, own in list(islice(callers.items(), stayed, stayed + min(left, 16))):
                yield own
                left -= 1
                stayed += caller in callers and next(reversed(callers)) != caller

    def _is_earmarked(self, waiting: _Waiting[T], now: float) -> bool:
        if waiting.short_since is None:
            waiting.short_since = now
        return self._is_overdue(waiting) or now - waiting.short_since >= self._bypass.seconds
