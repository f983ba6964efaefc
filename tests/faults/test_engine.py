"""A device that fails under an engine: who is told, in which order, and what is left behind."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

import engine.engine as engine_module
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import CanaryFailed
from engine.request import Embed, Failed, Outcome
from tests.engine.fakes import make_core

WAIT_S = 30.0


def failing() -> Engine:
    core, runner = make_core(60)
    runner.fail_at = ("launch", 1)
    return Engine(core, runner)


def test_a_fault_is_told_once_and_after_every_outcome() -> None:
    engine, told = failing(), threading.Event()
    answer: Future[Outcome] = Future()
    seen: list[bool] = []

    def on_fault() -> None:
        seen.append(answer.done())
        told.set()

    engine.on_fault(on_fault)
    engine.submit(Embed((1, 2, 3)), on_done=answer.set_result)
    engine.start()
    assert told.wait(WAIT_S)
    engine.close()
    assert seen == [True]
    assert answer.result(0) == Failed("device_fault", "A step failed on the device; the engine has stopped.")
    late = threading.Event()
    engine.on_fault(late.set)
    assert late.is_set()
    assert seen == [True]


def test_an_engine_that_ends_as_it_should_tells_no_fault() -> None:
    core, runner = make_core(60)
    engine, told = Engine(core, runner), threading.Event()
    engine.on_fault(told.set)
    engine.start()
    assert not isinstance(engine.embed(Embed((1, 2, 3))), Failed)
    engine.close()
    engine.on_fault(told.set)
    assert not told.is_set()


class _Released:
    """Counts calls, and looks at what was left at the first."""

    def __init__(self) -> None:
        self.runner: weakref.ref[Any] = weakref.ref(self)
        self.left: list[Any] = []

    def __call__(self) -> None:
        gc.collect()
        self.left.append(self.runner())


def test_a_canary_that_fails_lets_go_of_everything_before_the_device_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released = _Released()

    class Loaded:
        release = released
        shape = type("Shape", (), {"vocabulary": 97})
        model_sha256 = adapter_sha256 = ""

        def __init__(self) -> None:
            _, self.runner = make_core(60)
            released.runner = weakref.ref(self.runner)

    def wrong(probe: Any, *given: object) -> str:
        (outcome,) = probe([Embed((1, 2, 3))])
        raise CanaryFailed("a known answer came out wrong") from ValueError(outcome)

    monkeypatch.setattr(engine_module, "load", lambda *given: Loaded())
    monkeypatch.setattr(engine_module, "new_core", lambda config, loaded: make_core(60)[0])
    monkeypatch.setattr(engine_module, "run_canary", wrong)
    with pytest.raises(CanaryFailed, match="came out wrong") as raised:
        Engine.create(EngineConfig(device="cpu"), Path("model"))
    assert released.left == [None]
    assert raised.value.__cause__ is None
