"""Frames come out as they went in, wherever the stream was cut; bounds hold before a byte is kept."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.wire.frames import HEADER, FrameReader, FrameWriter, ProtocolError
from engine.wire.messages import Cancel, Supply

BODIES = st.lists(st.binary(min_size=1, max_size=40), max_size=12)


def stream_of(bodies: list[bytes]) -> bytes:
    return b"".join(HEADER.pack(len(body)) + body for body in bodies)


def read(reader: FrameReader, *parts: bytes) -> list[bytes]:
    return [bytes(frame) for part in parts for frame in reader.feed(part)]


@settings(deadline=None)
@given(bodies=BODIES, data=st.data())
def test_any_cut_gives_the_same_frames(bodies: list[bytes], data: st.DataObject) -> None:
    stream = stream_of(bodies)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    parts = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert read(FrameReader(40), *parts) == bodies


def test_a_cut_at_every_byte_and_single_bytes() -> None:
    bodies = [b"a", b"bc", b"d" * 300, b"e"]
    stream = stream_of(bodies)
    for cut in range(len(stream) + 1):
        assert read(FrameReader(300), stream[:cut], stream[cut:]) == bodies
    assert read(FrameReader(300), *(stream[at : at + 1] for at in range(len(stream)))) == bodies


@settings(deadline=None)
@given(bodies=BODIES.filter(bool), data=st.data())
def test_a_truncated_stream_gives_whole_frames_only(bodies: list[bytes], data: st.DataObject) -> None:
    stream = stream_of(bodies)
    end = data.draw(st.integers(0, len(stream) - 1))
    got = read(FrameReader(40), stream[:end])
    assert got == bodies[: len(got)]
    assert len(stream_of(bodies[: len(got) + 1])) > end


def test_a_frame_is_refused_by_its_header_alone_after_those_before_it() -> None:
    reader = FrameReader(8)
    got: list[bytes] = []
    with pytest.raises(ProtocolError, match="9 bytes was announced, the limit is 8") as caught:
        got.extend(bytes(frame) for frame in reader.feed(stream_of([b"12345678"]) + HEADER.pack(9)))
    assert got == [b"12345678"]
    assert caught.value.code == "frame_too_large"
    with pytest.raises(ProtocolError, match="empty"):
        read(FrameReader(8), HEADER.pack(0))


class Written(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    def is_closing(self) -> bool:
        return self.closing


def test_the_frames_of_one_turn_are_one_write() -> None:
    async def main() -> None:
        transport = Written()
        writer = FrameWriter(transport, 100)
        for number in range(5):
            writer.send(Cancel(number))
            with pytest.raises(ValueError, match="the limit is 100"):
                writer.send(Supply(1, tuple(range(1000, 1100))))
            with pytest.raises(ValueError, match="64 bits"):
                writer.send(Cancel(1 << 65))
            with pytest.raises(TypeError):
                writer.send(Supply(1, (object(),)))  # type: ignore[arg-type]
        assert not transport.writes
        await asyncio.sleep(0)
        (written,) = transport.writes
        assert len(read(FrameReader(100), written)) == 5
        writer.send(Cancel(9))
        transport.closing = True
        await asyncio.sleep(0)
        assert len(transport.writes) == 1

    asyncio.run(main())
