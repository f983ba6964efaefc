"""Frames: 4 bytes of length, little-endian, and that many bytes of msgpack."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from struct import Struct

import msgspec

HEADER = Struct("<I")
ANSWER_BYTES = 64 << 20  # largest frame of a server; a client trusts it, its own limit is in the welcome


class ProtocolError(Exception):
    """What the other end sent is no message of this protocol, or not at this point. Ends a connection.

    `code` is stable, `str()` one sentence.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class FrameReader:
    """Cuts a stream into frames, wherever it was split or merged."""

    def __init__(self, limit: int) -> None:
        """`limit` is the largest frame in bytes, without its header."""
        self.limit = limit
        self._rest = bytearray()  # a frame that is not complete
        self._wanted = 0  # bytes that complete it, as far as that is known

    def feed(self, data: bytes) -> Iterator[memoryview]:
        """The frames that `data` completes, as views that are valid until the next call.

        Raises ProtocolError at a frame that is empty or above the limit, and is of no use after that.
        """
        stream: bytes | bytearray = data
        if self._rest:
            self._rest += data
            if len(self._rest) < self._wanted:
                return
            stream, self._rest = self._rest, bytearray()
        view, start, end = memoryview(stream), 0, len(stream)
        self._wanted = HEADER.size
        while end - start >= HEADER.size:
            (size,) = HEADER.unpack_from(stream, start)
            self._check(size)
            begin = start + HEADER.size
            if end - begin < size:
                self._wanted = HEADER.size + size
                break
            start = begin + size
            yield view[begin:start]
        if start < end:
            self._rest += view[start:]

    def _check(self, size: int) -> None:
        if size > self.limit:
            raise ProtocolError(
                "frame_too_large", f"A frame of {size:,} bytes was announced, the limit is {self.limit:,}."
            )
        if not size:
            raise ProtocolError("malformed_frame", "A frame must not be empty.")


class FrameWriter:
    """Gathers the frames of one turn of the loop and writes them at once."""

    def __init__(self, transport: asyncio.WriteTransport, limit: int) -> None:
        """`limit` is the largest frame in bytes, without its header."""
        self.limit = limit
        self._transport = transport
        self._encoder = msgspec.msgpack.Encoder()
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()

    def send(self, message: msgspec.Struct) -> None:
        """Raises ValueError for a message that is above the limit or has a number beyond 64 bits."""
        buffer = self._buffer
        start = len(buffer)
        if not start:
            self._loop.call_soon(self.flush)
        begin = start + HEADER.size
        buffer += b"\0\0\0\0"
        try:
            self._encoder.encode_into(message, buffer, begin)
        except Exception as error:
            del buffer[start:]
            if isinstance(error, OverflowError):
                raise ValueError("a number of the request is beyond 64 bits") from error
            raise
        size = len(buffer) - begin
        if size > self.limit:
            del buffer[start:]
            raise ValueError(f"the request makes a frame of {size:,} bytes, the limit is {self.limit:,}")
        HEADER.pack_into(buffer, start, size)

    def flush(self) -> None:
        full, self._buffer = self._buffer, bytearray()  # the transport may keep what it is given
        if full and not self._transport.is_closing():
            self._transport.write(full)
