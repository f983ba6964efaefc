"""What one connection may cost before it has earned it: time for a header, time for a body, header size.

uvicorn has no such limits and httptools has none on headers, so silence, a dripped header or a header
of megabytes would hold a connection for as long as the client likes.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from mcp_discovery.transport.cork import CorkedTransport

TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Seconds from the first to the last byte of a header and of a body; bytes of a header block."""

    header_timeout_s: float = 5.0
    body_timeout_s: float = 10.0
    max_header_bytes: int = 32 << 10


@dataclass(frozen=True, slots=True)
class PeerTls:
    """What TLS knows of a connection. `certificate` is as `getpeercert` gives it, {} for none."""

    version: str
    cipher: str
    certificate: dict[str, Any]


class LimitedProtocol(HttpToolsProtocol):
    """httptools under `ConnectionLimits`; puts the connection's name and its TLS into the scope's state."""

    limits: ClassVar[ConnectionLimits]
    names: ClassVar[Iterator[str]]

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._deadline: asyncio.TimerHandle | None = None
        self._begun_s: float | None = None  # limit of what began in this chunk and has not ended
        self._header_bytes = 0
        self._in_header = False
        self._ended_in_chunk = False
        self._dead = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = cast(asyncio.Transport, CorkedTransport(transport, self.loop))
        state: dict[str, Any] = {"connection": next(self.names)}
        tls = transport.get_extra_info("ssl_object")
        if tls is not None:
            state["tls"] = PeerTls(tls.version(), tls.cipher()[0], tls.getpeercert() or {})
        self.app_state = {**self.app_state, **state}
        self._arm(self.limits.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._dead:
            return
        before = self._header_bytes
        self._ended_in_chunk = False
        super().data_received(data)
        if self._in_header and not self._ended_in_chunk and not self._dead:
            # The parser reports a header field only when it is whole; what came of it counts already.
            # A chunk that also holds the end of the request before is not counted.
            self._header_bytes = max(self._header_bytes, before + len(data))
            self._refuse_large_header()
        # What comes whole in one chunk, as most requests do, needs no timer.
        if self._begun_s is not None and not self._dead:
            self._arm(self._begun_s)
        self._begun_s = None

    def on_message_begin(self) -> None:
        self._in_header = True
        self._header_bytes = 0
        self._begun_s = self.limits.header_timeout_s
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._header_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value) + 4
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_header = False
        if self._refuse_large_header():
            return
        self._begun_s = self.limits.body_timeout_s
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._dead:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._ended_in_chunk = True
        self._begun_s = None
        self._disarm()
        if not self._dead:
            super().on_message_complete()

    def _refuse_large_header(self) -> bool:
        """Answers 431 and closes where the header is over the limit."""
        if self._header_bytes <= self.limits.max_header_bytes:
            return False
        self._dead = True
        self._disarm()
        if not self.transport.is_closing():
            self.transport.write(TOO_LARGE)
            self.transport.close()
        return True

    def _arm(self, seconds: float) -> None:
        self._disarm()
        # Abort, not close: a peer that does not read would hold a polite TLS shutdown open.
        self._deadline = self.loop.call_later(seconds, self.transport.abort)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def protocol_with(limits: ConnectionLimits, listener: str) -> type[LimitedProtocol]:
    """The protocol class of one listener, for uvicorn's `http=`; its connections are named `listener-N`."""
    names = (f"{listener}-{number}" for number in itertools.count(1))
    return type("LimitedProtocol", (LimitedProtocol,), {"limits": limits, "names": names})
