"""The engine's client protocol between processes of one host, over a Unix socket.

`WireServer` serves an engine of its process, `WireClient` is the `EngineClient` of another. The
protocol is versioned; docs/wire-protocol.md describes it.
"""

from engine.wire.blocking import BlockingClient
from engine.wire.client import Patience, WireClient
from engine.wire.connection import WireLimits
from engine.wire.constraint import ItemList, UndeclaredConstraint
from engine.wire.messages import EngineFacts
from engine.wire.server import WireServer

__all__ = [
    "BlockingClient",
    "EngineFacts",
    "ItemList",
    "Patience",
    "UndeclaredConstraint",
    "WireClient",
    "WireLimits",
    "WireServer",
]
