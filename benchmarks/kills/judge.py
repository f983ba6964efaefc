"""What is wrong with a round, from what clients saw of it and what the server accounts for.

A process that is killed takes along what only it knew. So the server's account may have calls whose answers
were cut off on their way, each once; beyond those that lost their connection every call is in it as its
client saw it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.kills.driver import CLOSED, UNANSWERED, Ended, Held, Seen
from benchmarks.ladder.answers import ANSWERS
from benchmarks.ladder.ledger import Account

Kind = Literal["engine", "front-end", "parent"]
LOST = "failed: engine_lost"
NOT_READY = "refused: not_ready"
ENDS = ("answered", "no_match", "failed", "cancelled")


@dataclass(frozen=True, slots=True)
class Books:
    """The server's accounts before and after a round, nothing in flight at either, and what each process of
    the server had received by then, dead ones of the same name included. `cut_off` calls were in flight in
    the process that was killed, for certain: they had come and must be in the account."""

    before: Account
    after: Account
    received_by_process: Mapping[str, int]
    cut_off: int = 0


@dataclass(frozen=True, slots=True)
class Round:
    """One kill; moments are `time.monotonic()` seconds. `victims` are the clients' ports of the connections
    that the killed processes held. `ready` is None where the server was not ready again, `books` where nobody
    is left to keep any."""

    kind: Kind
    victim: str
    killed: float
    victims: frozenset[int]
    seen: Seen
    ready: float | None = None
    gone: float | None = None
    left: Sequence[int] = ()
    books: Books | None = None

    def held(self) -> dict[int, Held]:
        """Connections that were open at the kill, by their place."""
        return {
            place: each
            for place, each in enumerate(self.seen.connections)
            if each.opened < self.killed and (each.lost is None or each.lost >= self.killed)
        }

    def doomed(self) -> set[int]:
        """Those of them that the killed processes held."""
        return {place for place, each in self.held().items() if each.port in self.victims}

    def cut_off(self, told: int, at: float) -> int:
        """How many calls the victim still had when it was killed, at least, where it had told of so many at
        some time from the moment `at` on: less those that had an answer since."""
        doomed = self.doomed()
        return told - sum(
            call.connection in doomed and call.end != CLOSED and call.ended >= at and call.sent < self.killed
            for call in self.seen.calls
        )

    def in_flight(self) -> list[Ended]:
        """Calls that the kill could harm: those sent before and not ended, on connections that the victim
        held; where the engine was killed, on all."""
        mine = [call for call in self.seen.calls if call.sent < self.killed <= call.ended]
        doomed = self.doomed()
        return mine if self.kind == "engine" else [call for call in mine if call.connection in doomed]

    def first_answer(self) -> float | None:
        """Of the calls sent after the kill, the first to be answered: where connections were lost, of those
        on new ones."""
        connections = self.seen.connections
        return min(
            (
                call.ended
                for call in self.seen.calls
                if call.sent > self.killed
                and call.end in ANSWERS
                and (self.kind == "engine" or connections[call.connection].opened > self.killed)
            ),
            default=None,
        )


def summary(found: Round) -> dict[str, Any]:
    """Everything that is told of a round."""
    mine, seen, killed, doomed = found.in_flight(), found.seen, found.killed, found.doomed()
    others = [each for place, each in found.held().items() if place not in doomed]
    errors = [call.ended for call in mine if call.end not in ANSWERS]
    return {
        "kind": found.kind,
        "victim": found.victim,
        "calls": len(seen.calls),
        "in_flight": len(mine),
        "ended": dict(Counter(call.end for call in mine)),
        "last_error_ms": _after(killed, max(errors, default=None)),
        "ready_again_ms": _after(killed, found.ready),
        "first_answer_ms": _after(killed, found.first_answer()),
        "processes_gone_ms": _after(killed, found.gone),
        "connections_of_others": len(others),
        "connections_of_others_lost": sum(each.lost is not None for each in others),
        "unanswered": sum(call.end == UNANSWERED for call in seen.calls),
        "processes_left": len(found.left),
        "account": _difference(found.books) if found.books else None,
        "accounts_wrong": list(unbalanced(found.books, seen.calls)) if found.books else [],
        "violations": list(violations(found)),
    }


def violations(found: Round) -> Iterator[str]:
    """A sentence for each promise that was broken."""
    calls, mine, doomed = found.seen.calls, found.in_flight(), found.doomed()
    if not mine:
        yield "no call was in flight at the kill: nothing was tested"
    if unanswered := sum(call.end == UNANSWERED for call in calls):
        yield f"{unanswered:,} calls did not end"
    if found.seen.strays:
        yield f"{found.seen.strays:,} answers came for no call that was open"
    for end, count in Counter(call.end for call in calls if call.end.startswith("no result")).items():
        yield f"{count:,} calls ended with {end}"
    if lost := sum(
        each.lost is not None and place not in doomed for place, each in enumerate(found.seen.connections)
    ):
        yield f"{lost:,} connections were lost that the killed process did not hold"
    yield from _of_kind(found, mine)
    if found.books:
        yield from unbalanced(found.books, calls)


def _of_kind(found: Round, mine: Sequence[Ended]) -> Iterator[str]:
    failed = Counter(call.end for call in found.seen.calls if call.end.startswith(("failed", "invalid")))
    if found.kind == "engine":
        if mine and not any(call.end == LOST for call in mine):
            yield "no call in flight was told that the engine was lost"
        failed[LOST] = 0
    for end, count in (+failed).items():
        yield f"{count:,} calls ended as {end}"
    if found.kind == "parent":
        if found.left:
            yield f"{len(found.left)} processes outlived their parent"
        if late := sum(call.end in ANSWERS and call.sent > found.killed for call in found.seen.calls):
            yield f"{late:,} calls were answered after the parent was killed"
    elif found.ready is None:
        yield "the server was not ready again"
    elif not any(call.sent > found.ready and call.end in ANSWERS for call in found.seen.calls):
        yield "no call was answered after the server was ready again"


def unbalanced(books: Books, calls: Sequence[Ended]) -> Iterator[str]:
    """What does not add up in the server's account, against itself and against what clients saw."""
    yield from _against_itself(books)
    told, seen = _columns(books), Counter(_column(call.end) for call in calls)
    lost = seen.pop(CLOSED, 0) + seen.pop(UNANSWERED, 0)
    received, came = books.after["received"] - books.before["received"], len(calls) - lost + books.cut_off
    if not came <= received <= len(calls):
        yield (
            f"clients sent {len(calls):,} calls, of which {came:,} must have come, and the server received "
            f"{received:,}"
        )
    if (cancelled := told.pop("cancelled")) > lost:
        yield f"the server counts {cancelled:,} calls as cancelled, at most {lost:,} can be"
    for name in sorted({*told, *seen}):
        if not seen[name] <= told[name] <= seen[name] + lost - cancelled:
            yield f"clients saw {seen[name]:,} calls end as {name} and the server {told[name]:,}"


def _against_itself(books: Books) -> Iterator[str]:
    for account in (books.before, books.after):
        ended = sum(account[name] for name in ENDS) + sum(account["refused"].values())
        if account["received"] != ended + account["in_flight"]:
            yield f"the server received {account['received']:,} calls and accounts for {ended:,}"
        pages = account["pages"]
        if pages["free"] + pages["held"] + pages["cached"] != pages["total"]:
            yield f"the pages do not add up: {pages}"
    after = books.after
    if after["in_flight"] or after["pages"]["held"]:
        yield f"{after['in_flight']} calls and {after['pages']['held']} pages are held after the last end"
    if not after["pages"]["total"]:
        yield "there are no pages: the engine has not come back"
    if (parts := sum(books.received_by_process.values())) != after["received"]:
        yield f"the processes have received {parts:,} calls and the server {after['received']:,}"


def _columns(books: Books) -> Counter[str]:
    """What the account gained, by the names of `_column`."""
    before, after = books.before, books.after
    told = Counter({name: after[name] - before[name] for name in (*ENDS, "invalid")})
    for code in {*before["refused"], *after["refused"]}:
        told[f"refused: {code}"] = after["refused"].get(code, 0) - before["refused"].get(code, 0)
    return told


def _column(end: str) -> str:
    """The account's column of an end."""
    if end in ("matched", "partial"):
        return "answered"
    return end.partition(":")[0] if end.startswith(("failed", "invalid")) else end


def _difference(books: Books) -> dict[str, Any]:
    gained = books.after["received"] - books.before["received"]
    return {"received": gained, **+_columns(books), "pages": books.after["pages"]}


def _after(killed: float, moment: float | None) -> float | None:
    return None if moment is None else round((moment - killed) * 1000.0, 1)
