"""The processes that drive the load: each holds its share of the clients in one event loop."""

from __future__ import annotations

import asyncio
import gc
import math
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import uvloop

from benchmarks.ladder import queries
from benchmarks.ladder.answers import Call
from benchmarks.ladder.judge import Judge
from benchmarks.ladder.load import NO_REQUEST, Burst, ClosedLoop, Load, OpenLoop
from benchmarks.ladder.wire import Client, Endpoint, connect
from mcp_discovery.transport.serve import raise_file_limit

READY_S = 120.0
HANDSHAKES_AT_ONCE = 64  # a driver; the burst sets no limit
PATIENCE_S, SPARE_S = 30.0, 10.0  # for the last answers: at least, and beyond the timeout of a call
REST_S = 0.3  # from the order to begin until the first call, so that all drivers have it


@dataclass(frozen=True, slots=True)
class Settings:
    """What a driver is started with."""

    endpoint: Endpoint
    queries: Path = queries.QUERIES
    references: Path | None = None
    timeout_ms: int | None = None  # of each call; None leaves it to the server

    @property
    def patience_s(self) -> float:
        """For a call that was sent last, before it counts as never answered."""
        return max(PATIENCE_S, (self.timeout_ms or 0) / 1000.0 + SPARE_S)


@dataclass(frozen=True, slots=True)
class Connect:
    """Opens connections, and after each handshake asks for the server's health, as a connection that says
    nothing is soon closed."""

    clients: int


@dataclass(frozen=True, slots=True)
class Run:
    """A load on the connections that are open."""

    shape: Literal["closed", "open", "burst"]
    begin: float
    seconds: float = 0.0
    calls: int = 1  # closed: at least, a client
    rate: float = 1.0  # open: of this driver
    long_share: float = 0.0
    most_s: float = 300.0


@dataclass(frozen=True, slots=True)
class ConnectAndAsk:
    """The burst from nothing: each client connects at `begin` and asks as soon as its handshake is done."""

    begin: float
    clients: int


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Closes all connections."""


Order = Connect | Run | ConnectAndAsk | Disconnect


@dataclass(frozen=True, slots=True)
class Ran:
    """What an order did. `handshakes` are moments (began, done); `offered` counts calls, also those that
    were due and never sent."""

    calls: list[Call] = field(default_factory=list)
    handshakes: list[tuple[float, float]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    offered: int = 0
    began: float = 0.0
    stopped: float = 0.0
    cpu_s: float = 0.0
    wall_s: float = 0.0


class Driver:
    """One process's clients and requests."""

    def __init__(self, settings: Settings, number: int, drivers: int) -> None:
        texts = queries.read(settings.queries)
        self._settings = settings
        self._requests = queries.Requests(settings.endpoint, texts, number, drivers, settings.timeout_ms)
        self._judge = Judge.of(settings.references, texts)
        self._context = settings.endpoint.context()
        self._clients: list[Client] = []
        self._seed = number

    async def do(self, order: Order) -> Ran:
        match order:
            case Connect():
                return await self._connect(order.clients, HANDSHAKES_AT_ONCE, time.monotonic())
            case ConnectAndAsk():
                return await self._connect_and_ask(order)
            case Run():
                return await self._run(order)
            case Disconnect():
                for client in self._clients:
                    client.close()
                self._clients = []
                await asyncio.sleep(0)
                return Ran()

    async def _connect(self, clients: int, at_once: int, begin: float) -> Ran:
        gate = asyncio.Semaphore(at_once)
        failures: list[str] = []
        health = self._settings.endpoint.health()

        async def open_one() -> tuple[float, float] | None:
            async with gate:
                began = time.monotonic()
                try:
                    client = await connect(self._settings.endpoint, self._context)
                except OSError as error:
                    failures.append(f"no connection: {error or type(error).__name__}")
                    return None
                done = time.monotonic()
                client.ask(health)
                self._clients.append(client)
                return began, done

        await asyncio.sleep(max(0.0, begin - time.monotonic()))
        pairs = await asyncio.gather(*(open_one() for _ in range(clients)))
        deadline = time.monotonic() + READY_S
        while any(client.busy and not client.closed for client in self._clients):
            if time.monotonic() > deadline:
                failures.append("no answer about the server's health")
                break
            await asyncio.sleep(0.005)
        failures += ["a connection was closed at once" for client in self._clients if client.closed]
        return Ran(handshakes=[pair for pair in pairs if pair], failures=failures)

    async def _connect_and_ask(self, order: ConnectAndAsk) -> Ran:
        """As `_connect` and a burst in one, each client on its own."""
        burst = Burst([], self._requests.short(), 0.0, keep_bodies=self._judge.compares)
        handshakes: list[tuple[float, float]] = []
        failures: list[str] = []

        async def one() -> None:
            began = time.monotonic()
            try:
                client = await connect(self._settings.endpoint, self._context)
            except OSError as error:
                failures.append(f"no connection: {error or type(error).__name__}")
                return
            handshakes.append((began, time.monotonic()))
            self._clients.append(client)
            client.owner = burst
            burst.send(client)

        await asyncio.sleep(max(0.0, order.begin - time.monotonic()))
        with _measured() as cost:
            await asyncio.gather(*(one() for _ in range(order.clients)))
            await burst.run(0.0)
        ran = self._judged(burst, order.begin, cost)
        return Ran(
            ran.calls, handshakes, failures, order.clients, ran.began, ran.stopped, ran.cpu_s, ran.wall_s
        )

    async def _run(self, order: Run) -> Ran:
        if not self._clients:
            return Ran(began=order.begin, stopped=math.inf)
        requests = self._requests.mixed(order.long_share) if order.long_share else self._requests.short()
        common: dict[str, Any] = {
            "clients": self._clients,
            "requests": requests,
            "seconds": order.seconds,
            "keep_bodies": self._judge.compares,
            "most_s": order.most_s,
            "patience_s": self._settings.patience_s,
        }
        load: Load
        if order.shape == "open":
            load = OpenLoop(**common, rate=order.rate, seed=self._seed)
        elif order.shape == "closed":
            load = ClosedLoop(**common, calls=order.calls)
        else:
            load = Burst(**common)
        with _measured() as cost:
            await load.run(order.begin)
        return self._judged(load, order.begin, cost)

    def _judged(self, load: Load, began: float, cost: _Cost) -> Ran:
        calls = [self._judge.call(raw) for raw in load.ended]
        offered = len(calls)
        if isinstance(load, OpenLoop):
            offered = load.arrivals + sum(raw.request is NO_REQUEST for raw in load.ended)
        return Ran(calls, [], [], offered, began, load.stopped, cost.cpu_s, cost.wall_s)


@dataclass
class _Cost:
    cpu_s: float = 0.0
    wall_s: float = 0.0


@contextmanager
def _measured() -> Iterator[_Cost]:
    cost = _Cost()
    cpu, wall = time.process_time(), time.monotonic()
    yield cost
    cost.cpu_s, cost.wall_s = time.process_time() - cpu, time.monotonic() - wall


def _main(orders: Connection, settings: Settings, number: int, drivers: int) -> None:
    """A driver process: answers each order with what it did, until its parent hangs up."""
    raise_file_limit()
    try:
        driver = Driver(settings, number, drivers)
    except (OSError, ValueError) as error:  # a file that is not what it should be: the parent tells
        orders.send(error)
        return
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)
    orders.send(Ran())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        while True:
            try:
                order = orders.recv()
            except (EOFError, KeyboardInterrupt):
                return
            orders.send(runner.run(driver.do(order)))


class Drivers:
    """The driver processes; a context manager."""

    def __init__(self, settings: Settings, count: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for number in range(count):
            here, there = spawn.Pipe()
            process = spawn.Process(target=_main, args=(there, settings, number, count), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        for pipe in self._pipes:
            self._receive(pipe)

    def __enter__(self) -> Drivers:
        return self

    def __exit__(self, *error: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10.0)
            if process.is_alive():
                process.kill()

    @property
    def count(self) -> int:
        return len(self._pipes)

    def each(self, orders: Sequence[Order]) -> list[Ran]:
        """One order for each driver, all under way at once. Raises RuntimeError where a driver died."""
        for pipe, order in zip(self._pipes, orders, strict=True):
            pipe.send(order)
        return [self._receive(pipe) for pipe in self._pipes]

    def all(self, order: Order) -> list[Ran]:
        return self.each([order] * self.count)

    def share(self, clients: int) -> list[int]:
        """Clients by driver; some may have none."""
        return [clients * (i + 1) // self.count - clients * i // self.count for i in range(self.count)]

    @staticmethod
    def _receive(pipe: Connection) -> Ran:
        try:
            answer = pipe.recv()
        except EOFError:
            raise RuntimeError("a driver process ended; see its message above") from None
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, Ran)
        return answer


def begin_soon() -> float:
    """The moment for all drivers to begin."""
    return time.monotonic() + REST_S
