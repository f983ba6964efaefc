"""Requests and outcomes as messages, and back."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from struct import Struct
from sys import byteorder

from engine.errors import Refusal
from engine.request import (
    Cancelled,
    Constraint,
    Embed,
    Embedded,
    Failed,
    Generate,
    Generated,
    Outcome,
    Rank,
    Request,
    Score,
    Scored,
    Timing,
    Tokens,
    Usage,
)
from engine.wire.constraint import ItemList, UndeclaredConstraint
from engine.wire.frames import ProtocolError
from engine.wire.messages import (
    Ask,
    AskEmbed,
    AskGenerate,
    AskRank,
    AskScore,
    Final,
    HasFailed,
    Invalid,
    PrefixRef,
    WasCancelled,
    WasEmbedded,
    WasGenerated,
    WasRefused,
    WasScored,
)

Refs = Callable[[Sequence[Tokens]], tuple[PrefixRef, ...]]
Resolve = Callable[[tuple[PrefixRef, ...]], tuple[Tokens, ...]]


def ask_of(id_: int, request: Request, deadline: float | None, caller: str, refs: Refs) -> Ask:
    """The message of a request. Raises UndeclaredConstraint for a constraint that cannot be sent."""
    match request:
        case Rank(query, rows, prefix_tokens, suffix, positive, negative, window):
            return AskRank(
                id_, caller, deadline, query, rows, prefix_tokens, suffix, positive, negative, window
            )
        case Score(prefixes, suffix, positive, negative, window):
            return AskScore(id_, caller, deadline, refs(prefixes), suffix, positive, negative, window)
        case Embed(tokens, keep):
            return AskEmbed(id_, caller, deadline, tokens, keep)
        case Generate():
            return AskGenerate(
                id_,
                caller,
                deadline,
                request.tokens,
                request.max_tokens,
                tuple(sorted(request.stop)),
                request.temperature,
                request.seed,
                _declared(request.constraint),
                request.keep,
            )


def request_of(ask: Ask, resolve: Resolve) -> Request:
    """The request of a message."""
    if isinstance(ask, AskRank):
        return Rank(
            ask.query, ask.rows, ask.prefix_tokens, ask.suffix, ask.positive, ask.negative, ask.window
        )
    if isinstance(ask, AskScore):
        return Score(resolve(ask.prefixes), ask.suffix, ask.positive, ask.negative, ask.window)
    if isinstance(ask, AskEmbed):
        return Embed(ask.tokens, ask.keep)
    return Generate(
        ask.tokens,
        ask.max_tokens,
        frozenset(ask.stop),
        ask.temperature,
        ask.seed,
        ask.constraint,
        ask.keep,
    )


def final_of(id_: int, outcome: Outcome) -> Final:
    """The last message of a request."""
    match outcome:
        case Scored(probabilities, usage, timing):
            return WasScored(id_, probabilities, _usage(usage), (timing.queue_ms, timing.run_ms))
        case Refusal():
            return WasRefused(
                id_,
                outcome.code,
                outcome.message,
                outcome.pages_needed,
                outcome.pages_free,
                outcome.pages_total,
                outcome.page_tokens,
                outcome.queue_depth,
                outcome.retry_after_ms,
            )
        case Embedded(vector, usage, timing):
            return WasEmbedded(id_, packed(vector), _usage(usage), (timing.queue_ms, timing.run_ms))
        case Generated(tokens, usage, timing):
            return WasGenerated(id_, tokens, _usage(usage), (timing.queue_ms, timing.run_ms))
        case Failed(code, message):
            return HasFailed(id_, code, message)
        case Cancelled():
            return WasCancelled(id_)


def outcome_of(final: Final) -> Outcome | Invalid:
    """What a last message says; `Invalid` stays what it is."""
    match final:
        case WasScored():
            return Scored(final.probabilities, Usage(*final.usage), Timing(*final.timing))
        case WasRefused():
            return Refusal(
                final.code,
                final.message,
                final.pages_needed,
                final.pages_free,
                final.pages_total,
                final.page_tokens,
                final.queue_depth,
                final.retry_after_ms,
            )
        case WasEmbedded():
            vector = tuple(unpacked(final.vector))
            return Embedded(vector, Usage(*final.usage), Timing(*final.timing))
        case WasGenerated():
            return Generated(final.tokens, Usage(*final.usage), Timing(*final.timing))
        case HasFailed():
            return Failed(final.code, final.message)
        case WasCancelled():
            return Cancelled()
        case Invalid():
            return final


def packed(vector: Sequence[float]) -> bytes:
    """Little-endian float64: nothing is lost, and it costs a tenth of an array of msgpack numbers to read."""
    return Struct(f"<{len(vector)}d").pack(*vector)


def unpacked(vector: bytes) -> array[float]:
    """The numbers of `packed`. Raises ProtocolError where the bytes are no whole numbers."""
    if len(vector) % 8:
        raise ProtocolError("malformed_frame", f"A vector of {len(vector)} bytes is none of float64.")
    numbers = array("d", vector)
    if byteorder == "big":
        numbers.byteswap()
    return numbers


def _usage(usage: Usage) -> tuple[int, int, int, int]:
    return (usage.prompt_tokens, usage.cached_tokens, usage.output_tokens, usage.pages)


def _declared(constraint: Constraint | None) -> ItemList | None:
    if constraint is None or isinstance(constraint, ItemList):
        return constraint
    raise UndeclaredConstraint(
        f"A constraint of type {type(constraint).__name__} is code and cannot be sent to another process; "
        "say it as an ItemList."
    )
