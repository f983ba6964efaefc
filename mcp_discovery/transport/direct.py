"""Tool calls answered without the MCP SDK, once it has answered one of the same envelope.

For a call of one tool the SDK builds a context, a session, a connection and two models, validates the
result twice and dumps it three times. All of it depends on the envelope alone: the headers, and the
message without its `id` and `arguments`. So the SDK judges the first message of each envelope. Where it
answers with a result, later messages of that envelope, equal to the byte, get their result in the frame
that the SDK put around the first one. Whatever is in any way unusual is the SDK's to answer: what is no
result, what asks for progress, and arguments that are not flat.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import mcp_types as types
import msgspec
from starlette.types import Message, Scope, Send

MAX_ENVELOPES = 256  # kept, those used least recently go first
MAX_ENVELOPE_BYTES = 4096
MAX_BODY_BYTES = 64 << 10
# They say nothing of the message, and may differ from one to the next.
UNREAD_HEADERS = frozenset(
    (b"content-length", b"user-agent", b"traceparent", b"tracestate", b"baggage", b"x-request-id")
)

Scalar = str | int | float | bool | None


class _Params(msgspec.Struct, forbid_unknown_fields=True):
    name: msgspec.Raw
    arguments: dict[str, Scalar | list[Scalar]]
    meta: msgspec.Raw = msgspec.field(name="_meta", default=msgspec.Raw())


class _Call(msgspec.Struct, forbid_unknown_fields=True):
    jsonrpc: msgspec.Raw
    id: int | str
    method: msgspec.Raw
    params: _Params


Envelope = tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Parsed:
    """A message that could be a tool call, and its envelope."""

    envelope: Envelope
    id: int | str
    arguments: dict[str, Scalar | list[Scalar]]


@dataclass(frozen=True, slots=True)
class Frame:
    """What the SDK puts around a result: headers of the response, members of the result besides ours."""

    headers: tuple[tuple[bytes, bytes], ...]
    members: dict[str, Any]


class DirectCalls:
    """The envelopes that the SDK has answered. Lives in one event loop."""

    def __init__(self) -> None:
        self._frames: OrderedDict[Envelope, Frame] = OrderedDict()
        self._decode = msgspec.json.Decoder(_Call).decode

    def parse(self, scope: Scope, body: bytes) -> Parsed | None:
        """None for what is left to the SDK whatever it has answered before."""
        if len(body) > MAX_BODY_BYTES or b'"progressToken"' in body:
            return None
        try:
            call = self._decode(body)
        except (msgspec.MsgspecError, RecursionError):
            return None
        params = call.params
        envelope = [bytes(call.jsonrpc), bytes(call.method), bytes(params.name), bytes(params.meta)]
        envelope.append(scope["query_string"])
        for field in scope["headers"]:
            if field[0] not in UNREAD_HEADERS:
                envelope += field
        if sum(map(len, envelope)) > MAX_ENVELOPE_BYTES:
            return None
        return Parsed(tuple(envelope), call.id, params.arguments)

    def frame(self, parsed: Parsed) -> Frame | None:
        """That of the parsed message's envelope, None where the SDK has not answered one."""
        frame = self._frames.get(parsed.envelope)
        if frame is not None:
            self._frames.move_to_end(parsed.envelope)
        return frame

    def learning(self, parsed: Parsed, send: Send) -> Send:
        """`send` for the SDK's answer to the parsed message, which is noted if it is a result."""
        start: Message = {}

        async def noting(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                start = message
            elif not message.get("more_body", False):
                self._note(parsed, start, message.get("body", b""))
            await send(message)

        return noting

    def _note(self, parsed: Parsed, start: Message, body: bytes) -> None:
        members = _members(body)
        if members is None:
            return
        headers = ((bytes(name).lower(), bytes(value)) for name, value in start["headers"])
        kept = tuple(field for field in headers if field[0] != b"content-length")
        self._frames[parsed.envelope] = Frame(kept, members)
        if len(self._frames) > MAX_ENVELOPES:
            self._frames.popitem(last=False)


def _members(body: bytes) -> dict[str, Any] | None:
    """The members of a tool call's result besides those that a call makes; None where `body` is none."""
    try:
        message = json.loads(body)
        result = dict(message["result"])
        for name in ("content", "structuredContent", "isError"):
            del result[name]
    except (ValueError, TypeError, AttributeError, KeyError):
        return None
    return result


async def send_result(frame: Frame, message_id: int | str, result: types.CallToolResult, send: Send) -> None:
    """Answers with `result` as the SDK would."""
    content = [block.model_dump(mode="json", by_alias=True, exclude_none=True) for block in result.content]
    members = {
        "content": content,
        "structuredContent": result.structured_content,
        "isError": result.is_error,
        **frame.members,
    }
    await _send(frame, {"jsonrpc": "2.0", "id": message_id, "result": members}, send)


async def send_error(frame: Frame, message_id: int | str, error: types.ErrorData, send: Send) -> None:
    """Answers with an error whose status is 200, such as `INTERNAL_ERROR`."""
    told = {"code": error.code, "message": error.message}
    await _send(frame, {"jsonrpc": "2.0", "id": message_id, "error": told}, send)


async def _send(frame: Frame, message: dict[str, Any], send: Send) -> None:
    try:
        body = msgspec.json.encode(message)
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can only escape
        body = json.dumps(message, separators=(",", ":")).encode()
    headers = [(b"content-length", b"%d" % len(body)), *frame.headers]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
