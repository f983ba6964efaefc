"""Every message of the wire protocol, version 1, and how it is encoded.

A message is a msgpack array whose first item says which it is; the fields follow by position.
docs/wire-protocol.md lists them for readers; this file is the definition.
"""

from __future__ import annotations

import msgspec

from engine.client import EngineStatus, PageCounts
from engine.errors import RefusalCode
from engine.wire.constraint import ItemList

PROTOCOL = "mcp-discovery engine wire"
VERSION = 1

Ids = tuple[int, ...]
PrefixRef = int | Ids
"""The number of a prefix that was defined on this connection, or its tokens."""


class Message(msgspec.Struct, array_like=True, gc=False):
    """Positional; what a later minor revision appends is ignored."""


class EngineFacts(Message):
    """What stays the same as long as one engine serves. `extra` is for whoever runs both ends."""

    instance: str  # differs from engine to engine: what was cached in another is gone
    page_tokens: int
    vocabulary: int
    context: int  # tokens
    kernels: str
    model: str = ""  # which weights, such as their SHA-256
    adapter: str = ""
    extra: dict[str, str] = {}


class Snapshot(Message):
    """`EngineStatus`, with the four counts of pages in place."""

    ready: bool
    draining: bool
    reason: str
    pages: tuple[int, int, int, int]  # free, held, cached, total
    waiting: int
    waiting_tokens: int
    running: int
    steps: int
    tokens_per_s: float
    kernels: str

    @classmethod
    def of(cls, status: EngineStatus) -> Snapshot:
        pages = status.pages
        return cls(
            status.ready,
            status.draining,
            status.reason,
            (pages.free, pages.held, pages.cached, pages.total),
            status.waiting,
            status.waiting_tokens,
            status.running,
            status.steps,
            status.tokens_per_s,
            status.kernels,
        )

    def as_status(self) -> EngineStatus:
        return EngineStatus(
            ready=self.ready,
            draining=self.draining,
            reason=self.reason,
            pages=PageCounts(*self.pages),
            waiting=self.waiting,
            waiting_tokens=self.waiting_tokens,
            running=self.running,
            steps=self.steps,
            tokens_per_s=self.tokens_per_s,
            kernels=self.kernels,
        )


# From the client.


class Hello(Message, tag=0):
    """The first frame. Its first two fields stay the same in every version."""

    protocol: str
    versions: tuple[int, ...]
    name: str
    shares_callers: bool


class Define(Message, tag=1):
    """From now on `number` stands for `tokens`; the numbers in `drop` stand for nothing any more."""

    number: int
    tokens: Ids
    drop: tuple[int, ...] = ()


class AskEmbed(Message, tag=2):
    id: int
    caller: str
    deadline: float | None
    tokens: Ids
    keep: int


class AskScore(Message, tag=3):
    id: int
    caller: str
    deadline: float | None
    prefixes: tuple[PrefixRef, ...]
    suffix: Ids
    positive: int
    negative: int
    window: int | None


class AskRank(Message, tag=4):
    id: int
    caller: str
    deadline: float | None
    query: Ids
    rows: int
    prefix_tokens: int
    suffix: Ids
    positive: int
    negative: int
    window: int | None


class AskGenerate(Message, tag=5):
    id: int
    caller: str
    deadline: float | None
    tokens: Ids
    max_tokens: int
    stop: Ids
    temperature: float
    seed: int
    constraint: ItemList | None
    keep: int


class Supply(Message, tag=6):
    """The prefixes chosen for a rank request whose vector has come."""

    id: int
    prefixes: tuple[PrefixRef, ...]


class Cancel(Message, tag=7):
    """Unknown and ended ids are ignored; a request that lives ends as `WasCancelled`."""

    id: int


class AskStatus(Message, tag=8):
    number: int


class Ping(Message, tag=9):
    number: int


# From the server.


class Welcome(Message, tag=0):
    """The answer to `Hello`. `clock` is the server's CLOCK_MONOTONIC in seconds."""

    version: int
    max_frame: int
    window: int
    prefix_slots: int
    prefix_tokens: int
    status_every_s: float
    clock: float
    facts: EngineFacts | None
    status: Snapshot


class Vector(Message, tag=1):
    """The unit vector of a rank request: little-endian float64. Its prefixes are due."""

    id: int
    vector: bytes


class WasEmbedded(Message, tag=2):
    id: int
    vector: bytes
    usage: tuple[int, int, int, int]
    timing: tuple[float, float]


class WasScored(Message, tag=3):
    id: int
    probabilities: tuple[float, ...]
    usage: tuple[int, int, int, int]
    timing: tuple[float, float]


class WasGenerated(Message, tag=4):
    id: int
    tokens: Ids
    usage: tuple[int, int, int, int]
    timing: tuple[float, float]


class WasRefused(Message, tag=5):
    id: int
    code: RefusalCode
    message: str
    pages_needed: int
    pages_free: int
    pages_total: int
    page_tokens: int
    queue_depth: int
    retry_after_ms: int | None


class HasFailed(Message, tag=6):
    id: int
    code: str
    message: str


class WasCancelled(Message, tag=7):
    id: int


class Invalid(Message, tag=8):
    """The request makes no sense for this engine: what a local client raises as ValueError."""

    id: int
    message: str


class Status(Message, tag=9):
    """Asked for by `number`, or pushed: then it is 0."""

    number: int
    status: Snapshot


class Pong(Message, tag=10):
    number: int
    ready: bool
    reason: str


class Draining(Message, tag=11):
    """No new request is taken; those under way go on."""

    reason: str


class Opened(Message, tag=12):
    """An engine serves from now on."""

    facts: EngineFacts


class Error(Message, tag=13):
    """The last frame of a connection that is ended for what the client sent."""

    code: str
    message: str


Ask = AskEmbed | AskScore | AskRank | AskGenerate
FromClient = Hello | Define | Ask | Supply | Cancel | AskStatus | Ping
Final = WasEmbedded | WasScored | WasGenerated | WasRefused | HasFailed | WasCancelled | Invalid
FromServer = Welcome | Vector | Final | Status | Pong | Draining | Opened | Error
