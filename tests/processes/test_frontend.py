"""A front-end and the engines that come and go at the other end of its wire."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.wire import EngineFacts
from mcp_discovery.gate import Gate
from mcp_discovery.processes.frontend import ENGINE_GONE, Frontend

WAIT_S = 20.0


class Service:
    """Notes what it is told; a warm-up lasts until it is cancelled."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[str] = asyncio.Queue()
        self.gate = Gate("loading", 16)

    def new_engine(self, device: str) -> None:
        self.events.put_nowait(f"on {device}")

    async def warm(self, progress: Callable[[int, int], None]) -> None:
        self.events.put_nowait("warms")
        try:
            await asyncio.Event().wait()
        finally:
            self.events.put_nowait("ended")


class Client:
    """As much of a wire client as a front-end looks at."""

    def __init__(self, state: SimpleNamespace) -> None:
        self._state = state

    @property
    def facts(self) -> Any:
        return self._state.facts

    @property
    def is_connected(self) -> bool:
        return self._state.facts is not None

    def status(self) -> Any:
        return self._state


def facts(instance: str, device: str) -> EngineFacts:
    return EngineFacts(instance, 16, 97, 512, "hash", extra={"device": device})


async def settle() -> None:
    """Lets every task run as far as it can."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_each_engine_is_prepared_for_once_though_another_warm_up_still_runs(tmp_path: Path) -> None:
    async def main() -> None:
        service, ready = Service(), []
        parent = SimpleNamespace(tell_ready=lambda: ready.append(True))
        fake: Any = service
        told: Any = parent
        frontend = Frontend(fake, told, tmp_path / "engine", "front-end 1")
        state = SimpleNamespace(facts=None, ready=False)

        def becomes(seen: EngineFacts | None, is_ready: bool) -> None:
            state.facts, state.ready = seen, is_ready
            frontend._on_change()
            assert service.gate.reason == ("" if seen else ENGINE_GONE)

        frontend.client = Client(state)  # type: ignore[assignment]
        preparing = asyncio.create_task(frontend.prepare())
        seen = service.events.get
        becomes(None, False)
        await settle()
        becomes(facts("one", "cpu"), False)
        await settle()
        assert service.events.empty()
        becomes(facts("one", "cpu"), True)
        assert [await seen(), await seen()] == ["on cpu", "warms"]
        for same in (facts("one", "cpu"), None):
            becomes(same, same is not None)
            await settle()
            assert service.events.empty()
        becomes(facts("two", "cuda"), True)
        assert {await seen(), await seen(), await seen()} == {"on cuda", "ended", "warms"}
        assert len(ready) == 2
        preparing.cancel()
        assert await seen() == "ended"
        with pytest.raises(asyncio.CancelledError):
            await preparing

    asyncio.run(asyncio.wait_for(main(), WAIT_S))
