"""The engine: created whole or not at all, stepped by one thread, asked from any.

Host state lives in `Core`, under one lock; the device works outside it. Callbacks run outside it
too, on the thread that brought the outcome about: they must be quick and must not raise.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType

from engine.canary import FP8_PAGES, SIXTEEN_BIT, run_canary
from engine.client import EngineStatus
from engine.config import EngineConfig
from engine.core import Core, CoreLimits, Step
from engine.errors import EngineError, EngineFault, RefusalCode
from engine.load import Loaded, load
from engine.pages import PagePool
from engine.precedence import Precedence
from engine.request import Embed, Failed, Generate, Outcome, Rank, Request, Score, Tokens
from engine.runner import InFlight, Runner
from engine.schedule import StepLimits
from engine.task import TOO_SOON, OnDone, OnVector, RankTask, Task, Terms
from engine.validate import KnownTexts, validate, validate_prefixes

_log = logging.getLogger(__name__)
_CHECK_EVERY_S = 10.0  # between full checks of the pool, when idle


class RequestHandle:
    """A request that was submitted. Every call may come late: then it does nothing."""

    def __init__(self, engine: Engine, arrival: _Arrival) -> None:
        self._engine = engine
        self._arrival = arrival

    def cancel(self) -> None:
        """The caller wants no answer. The outcome is `Cancelled` as soon as nobody changes the engine's
        state, which is no longer than the host's part of a step; pages return at a step's end."""
        self._engine._post(lambda core: core.cancel(self._arrival.taken))

    def expire(self) -> None:
        """The deadline has passed and the caller does not wait for the step to end."""
        self._engine._post(lambda core: core.expire(self._arrival.taken))

    def supply(self, prefixes: tuple[Tokens, ...]) -> None:
        """The prefixes of a `Rank`, once its vector has come. Raises ValueError where they do not fit it."""
        request = self._arrival.request
        if not isinstance(request, Rank):
            raise ValueError("only a Rank request takes prefixes")
        self._engine._supply(self._arrival, request, prefixes)


@dataclass(slots=True)
class _Arrival:
    """A request on its way into the core."""

    request: Request
    terms: Terms
    probe: bool
    task: Task | None = None
    supplied: bool = False

    @property
    def taken(self) -> Task:
        """Its task. Raises EngineFault before the core has it."""
        if self.task is None:
            raise EngineFault("a request is changed before the core has taken it in")
        return self.task

    @property
    def awaits_prefixes(self) -> bool:
        """Whether its vector has come, or its end, and its prefixes have not."""
        task = self.task
        return (
            isinstance(task, RankTask)
            and not self.supplied
            and (task.terminal.ended or task.vector is not None)
        )


class Engine:
    """A model that answers requests inside a fixed number of pages.

    engine = Engine.create(EngineConfig(device="cpu"), path)
    outcome = engine.generate(Generate(tokens, max_tokens=32))
    engine.close()
    """

    def __init__(
        self,
        core: Core,
        runner: Runner,
        loaded: Loaded | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.loaded = loaded
        self.canary = ""  # what the canary compared, "" before it has passed
        self._core = core
        self._runner = runner
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._inbox: deque[Callable[[Core], None]] = deque()  # changes of the host state, in order
        self._work = threading.Event()  # there may be something to do for the step loop
        self._precedence = Precedence()
        self._known = KnownTexts()
        self._after: list[Callable[[], None]] = []
        self._on_fault: list[Callable[[], None]] = []
        self._faulty = False
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._busy_until = 0.0
        self._checked = 0.0

    @classmethod
    def create(cls, config: EngineConfig, model: Path, adapter: Path | None = None) -> Engine:
        """Loads, starts and proves an engine; nothing is left running or allocated where that fails.

        Raises what `load` raises, and CanaryFailed where a known answer comes out wrong.
        """
        loaded = load(config, model, adapter)
        release = loaded.release
        try:
            return cls._proven(config, loaded)
        except EngineError as error:
            problem = error
        # The frames of a traceback, its own or that of what caused it, hold the engine that failed.
        problem.__traceback__ = problem.__context__ = problem.__cause__ = None
        del loaded
        release()
        raise problem

    @classmethod
    def _proven(cls, config: EngineConfig, loaded: Loaded) -> Engine:
        """Started and ready; closed where the canary fails."""
        with ExitStack() as undo:
            engine = cls(new_core(config, loaded), loaded.runner, loaded)
            engine.start()
            undo.callback(engine.close)
            engine.canary = run_canary(
                engine.probe,
                loaded.shape.vocabulary,
                loaded.model_sha256,
                loaded.adapter_sha256,
                FP8_PAGES if config.kv_dtype == "fp8_e4m3" else SIXTEEN_BIT,
            )
            engine.mark_ready()
            undo.pop_all()
        return engine

    def start(self) -> None:
        """Starts the step loop. Requests are refused as not ready until `mark_ready`, probes are not."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def mark_ready(self) -> None:
        with self._locked():
            if not self._stopping:
                self._core.not_ready = ""

    def give_way(self) -> None:
        """Lets the step loop have the interpreter, where it needs it just now: to be called before each piece
        of work of a thread that has many."""
        self._precedence.give_way()

    def after_callbacks(self, flush: Callable[[], None]) -> None:
        """Calls `flush` after each round of callbacks, such as those of one step, on their thread."""
        self._after.append(flush)

    def on_fault(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once where a step fails on the device, after every request has ended: on the
        engine's thread, or at once where that has happened already. The engine serves no more; what
        the device holds is certain to come back only with the end of the process."""
        with self._locked():
            self._on_fault.append(callback)
            late = self._faulty
        if late:
            self._tell_fault()

    def submit(
        self,
        request: Request,
        *,
        deadline: float | None = None,
        caller: str = "",
        on_done: OnDone,
        on_vector: OnVector | None = None,
        probe: bool = False,
    ) -> RequestHandle:
        """`on_done` is called once with the outcome, maybe before this returns (a refusal).

        `deadline` is in `time.monotonic()` seconds. `on_vector` is called once for a `Rank`, whose
        prefixes are then due. A `probe` is served before the engine is ready. Raises ValueError in
        one sentence for a request that makes no sense for this model.
        """
        self.give_way()
        limits = self._core.limits
        validate(request, limits.vocabulary, limits.context, self._known)
        arrival = _Arrival(request, Terms(self._clock(), deadline, caller, on_done, on_vector), probe)
        self._post(partial(self._admit, arrival))
        return RequestHandle(self, arrival)

    def embed(self, request: Embed, *, deadline: float | None = None) -> Outcome:
        """Waits for the outcome. Not to be called from a callback."""
        return self._wait(request, deadline)

    def score(self, request: Score, *, deadline: float | None = None) -> Outcome:
        """Waits for the outcome. Not to be called from a callback."""
        return self._wait(request, deadline)

    def generate(self, request: Generate, *, deadline: float | None = None) -> Outcome:
        """Waits for the outcome. Not to be called from a callback."""
        return self._wait(request, deadline)

    def probe(self, requests: list[Request]) -> list[Outcome]:
        """Submits requests together, ready or not, and waits for all of their outcomes."""
        answers: list[Future[Outcome]] = []
        for request in requests:
            answers.append(Future())
            self.submit(request, on_done=answers[-1].set_result, probe=True)
        return [answer.result() for answer in answers]

    def _wait(self, request: Request, deadline: float | None) -> Outcome:
        answer: Future[Outcome] = Future()
        self.submit(request, deadline=deadline, on_done=answer.set_result)
        return answer.result()

    def status(self) -> EngineStatus:
        with self._locked():
            return self._core.status(self._runner.kernels)

    def drain(self, timeout: float) -> bool:
        """Takes no more requests and waits for those it has. What is not done after `timeout` seconds
        is refused as draining. True where nothing had to be."""
        with self._locked():
            self._core.draining = True
            clean = self._changed.wait_for(lambda: self._core.idle, timeout)
            if not clean:
                self._core.end_all(lambda task: self._core.refusal(task, RefusalCode.DRAINING))
        self._tell()
        return clean

    def close(self) -> None:
        """Stops after the step in flight; what is not done then is refused as not ready."""
        with self._locked():
            self._stopping = True
            self._core.not_ready = self._core.not_ready or "it was closed"
        self._work.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """The host state to itself."""
        try:
            with self._lock:
                yield
                self._changed.notify_all()
        finally:
            self._pass_on()

    def _post(self, change: Callable[[Core], None]) -> None:
        """Has the host state changed, by whoever may: nobody waits for it."""
        self._inbox.append(change)
        self._pass_on()
        self._work.set()

    def _pass_on(self) -> None:
        """Makes the changes that were posted, unless somebody holds the lock: then they do it when they let
        go. So nobody who posts waits for the step loop, nor it for them."""
        some = False
        while self._inbox and self._lock.acquire(blocking=False):
            try:
                self._take_in()
            finally:
                self._lock.release()
            some = True
        if some:
            self._tell()

    def _take_in(self) -> None:
        inbox, core = self._inbox, self._core
        while inbox:
            inbox.popleft()(core)

    def _admit(self, arrival: _Arrival, core: Core) -> None:
        # Nothing is stepped any more once it stops: a probe let through then would wait for ever.
        probe = arrival.probe and not self._stopping
        arrival.task = core.submit(arrival.request, arrival.terms, self._clock(), probe=probe)

    def _supply(self, arrival: _Arrival, rank: Rank, prefixes: tuple[Tokens, ...]) -> None:
        self.give_way()
        limits = self._core.limits
        validate_prefixes(rank, prefixes, limits.vocabulary, limits.context, self._known)
        if not arrival.awaits_prefixes:
            raise ValueError(TOO_SOON)
        arrival.supplied = True

        def supply(core: Core) -> None:
            if isinstance(task := arrival.taken, RankTask):
                core.supply(task, prefixes, self._clock())

        self._post(supply)

    def _tell(self) -> None:
        """Calls back whoever has something coming. Not under the lock: a callback may submit."""
        if not self._core.has_events:
            return
        with self._locked():
            events = self._core.take_events()
        for call in [*events, *self._after] if events else ():
            try:
                call()
            except Exception:  # noqa: BLE001 - a caller's bug must not end the engine
                _log.exception("a callback of a request raised")

    # The step loop.

    def _run(self) -> None:
        faulty = False
        try:
            self._step_until_stopped()
        except Exception:  # noqa: BLE001 - whatever it is, every request must end
            _log.exception("a step failed; the engine stops")
            faulty = True
        finally:
            self._precedence.end()
        with self._locked():
            self._stopping = True
            if not faulty:
                self._core.end_all(lambda task: self._core.refusal(task, RefusalCode.NOT_READY))
            else:
                # What the device said is for the log: callers may be anybody.
                self._core.not_ready = "a step failed on the device"
                failed = Failed("device_fault", "A step failed on the device; the engine has stopped.")
                self._core.end_all(lambda task: failed)
            self._core.abandon_steps()
            self._faulty = faulty
        self._tell()
        if faulty:
            self._tell_fault()

    def _tell_fault(self) -> None:
        with self._locked():
            callbacks, self._on_fault = self._on_fault, []
        for callback in callbacks:
            callback()

    def _step_until_stopped(self) -> None:
        flights: deque[tuple[Step, InFlight, float]] = deque()
        while True:
            if not flights:
                self._precedence.end()
            step = self._next_step(wait=not flights)
            self._tell()  # who was refused meanwhile does not wait for the step
            if step is not None:
                started = self._clock()
                flights.append((step, self._runner.launch(step.parts, step.reads), started))
            if flights and (step is None or len(flights) >= self._runner.depth):
                self._collect(*flights.popleft())
            elif self._stopping and not flights:
                return
            self._tell()

    def _next_step(self, *, wait: bool) -> Step | None:
        """The next step; None where there is none: with `wait`, only to tell something or to stop."""
        while True:
            self._work.clear()  # before it looks: what comes later wakes it again
            with self._locked():
                if self._stopping:
                    return None
                self._take_in()
                step = self._core.begin_step(self._clock())
                if step is not None or not wait or self._core.has_events:
                    return step
                self._check_when_idle()
                deadline = self._core.next_deadline()
            self._work.wait(None if deadline is None else max(0.0, deadline - self._clock()))

    def _collect(self, step: Step, flight: InFlight, started: float) -> None:
        self._precedence.end()
        began = self._clock()
        flight.wait()
        if self._runner.depth > 1:  # else a launch is the device's work, which needs no interpreter
            self._precedence.begin(self._clock() - began)
        outputs = flight.collect()
        now = self._clock()
        alone = started >= self._busy_until
        seconds = now - max(started, self._busy_until)
        self._busy_until = now
        with self._locked():
            self._core.end_step(step, outputs, now, seconds, alone=alone)

    def _check_when_idle(self) -> None:
        """Nothing in work, nothing held: anything else is a bug, told and survived."""
        core = self._core
        if not core.idle:
            return
        held = core.pool.counts().held
        if held:
            _log.error("%d pages are held while nothing is in work", held)
        now = self._clock()
        if now - self._checked < _CHECK_EVERY_S:
            return
        self._checked = now
        try:
            core.pool.check()
        except EngineFault as fault:
            _log.error("the pages do not add up: %s", fault)


def new_core(config: EngineConfig, loaded: Loaded) -> Core:
    step_limits = StepLimits.for_slow_steps if loaded.slow_steps else StepLimits
    limits = CoreLimits(
        step=step_limits(loaded.step_tokens, config.step_rows),
        depth=loaded.runner.depth,
        max_queue=config.max_queue,
        max_queued_tokens=config.max_queued_tokens,
        vocabulary=loaded.shape.vocabulary,
        context=loaded.shape.context,
    )
    return Core(PagePool(loaded.plan.pages, config.page_tokens), limits)
