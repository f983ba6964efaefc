"""Writes of one turn leave together, in order, and none is lost or held for long."""

from __future__ import annotations

import asyncio
from typing import Any

from mcp_discovery.transport.cork import MAX_HELD_BYTES, CorkedTransport


class Recorder(asyncio.WriteTransport):
    """A transport that notes what reaches it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bytes | str] = []
        self.closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.seen.append(bytes(data))

    def close(self) -> None:
        self.seen.append("close")
        self.closing = True

    def abort(self) -> None:
        self.seen.append("abort")
        self.closing = True

    def is_closing(self) -> bool:
        return self.closing

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return name


async def _corked() -> tuple[Recorder, CorkedTransport]:
    recorder = Recorder()
    return recorder, CorkedTransport(recorder, asyncio.get_running_loop())


async def _turn() -> None:
    await asyncio.sleep(0)


def test_the_writes_of_a_turn_leave_as_one_at_its_end() -> None:
    async def scenario() -> None:
        recorder, corked = await _corked()
        corked.write(b"head ")
        corked.write(b"body")
        assert recorder.seen == []
        await _turn()
        assert recorder.seen == [b"head body"]
        corked.write(b"next")
        await _turn()
        assert recorder.seen == [b"head body", b"next"]

    asyncio.run(scenario())


def test_what_was_written_leaves_before_a_close() -> None:
    async def scenario() -> None:
        recorder, corked = await _corked()
        corked.write(b"last words")
        corked.close()
        assert corked.is_closing()
        await _turn()
        assert recorder.seen == [b"last words", "close"]

    asyncio.run(scenario())


def test_an_abort_drops_what_was_written() -> None:
    async def scenario() -> None:
        recorder, corked = await _corked()
        corked.write(b"never sent")
        corked.abort()
        await _turn()
        assert recorder.seen == ["abort"]

    asyncio.run(scenario())


def test_a_peer_that_left_meanwhile_gets_nothing() -> None:
    async def scenario() -> None:
        recorder, corked = await _corked()
        corked.write(b"too late")
        recorder.closing = True
        await _turn()
        assert recorder.seen == []

    asyncio.run(scenario())


def test_a_turn_that_writes_on_and_on_holds_a_bounded_amount() -> None:
    async def scenario() -> None:
        recorder, corked = await _corked()
        chunk = bytes(MAX_HELD_BYTES // 4)
        for _ in range(10):
            corked.write(chunk)
        assert [len(sent) for sent in recorder.seen] == [MAX_HELD_BYTES, MAX_HELD_BYTES]
        await _turn()
        assert sum(len(sent) for sent in recorder.seen) == 10 * len(chunk)

    asyncio.run(scenario())


def test_other_questions_go_to_the_transport() -> None:
    async def scenario() -> None:
        _, corked = await _corked()
        assert corked.get_extra_info("ssl_object") == "ssl_object"

    asyncio.run(scenario())
