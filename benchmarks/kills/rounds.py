"""One kill: load, wait until it is there, kill, wait until the server is itself again, and take stock."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from benchmarks.kills.driver import Driver
from benchmarks.kills.judge import Books, Round
from benchmarks.kills.sockets import left_of, peers_of
from benchmarks.ladder import ledger
from benchmarks.ladder.host import tree
from benchmarks.serving import Server

ENGINE = "the engine process"
LOADED_SHARE = 0.75  # of the connections have a call in flight when a process is killed
LOADED_S, RECOVERY_S, END_S = 60.0, 180.0, 10.0
LOOK_S = 0.02  # between two looks at another process's state


@dataclass(frozen=True, slots=True)
class Stage:
    """A server under the load of a driver. `delay_s` from when the load is there until the kill."""

    server: Server
    driver: Driver
    delay_s: float

    def status(self) -> dict[str, Any]:
        """The object of `/status.json`."""
        with urllib.request.urlopen(f"{self.server.admin}/status.json", timeout=30.0) as reply:
            shown: dict[str, Any] = json.load(reply)
        return shown

    def child(self, kind: Literal["engine", "front-end"]) -> Round:
        """Kills the engine's process, or of the front-ends with calls in flight one that was killed least."""
        self.server.await_warm()
        before = ledger.settled(self.server.admin, 0)
        self.driver.begin()
        self._await_load()
        asked, victim = time.monotonic(), self._victim(kind)
        name, pid = victim["name"], victim["pid"]
        victims = peers_of([pid], self.server.port)
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        ready = self._await_ready(name, pid)
        self._await_answers()
        seen = self.driver.end()
        self.server.await_warm()
        after = ledger.settled(self.server.admin, before["received"])
        received = {each["name"]: each["received"] for each in self.status()["processes"]}
        found = Round(kind, name, killed, victims, seen, ready)
        cut_off = max(0, found.cut_off(victim["in_flight"], asked))
        return replace(found, books=Books(before, after, received, cut_off))

    def parent(self) -> Round:
        """Kills the parent. The server is of no more use."""
        self.driver.begin()
        self._await_load()
        pids = tree(self.server.pid)
        victims = peers_of(pids, self.server.port)
        killed = time.monotonic()
        os.kill(self.server.pid, signal.SIGKILL)
        gone = _moment(lambda: not left_of(pids), END_S)
        seen = self.driver.end()
        left = left_of(pids)
        for pid in left:  # nobody else would
            os.kill(pid, signal.SIGKILL)
        return Round("parent", "the parent", killed, victims, seen, gone=gone, left=left)

    def _await_load(self) -> None:
        """Until it has been there for `delay_s`. Raises RuntimeError where it does not come."""
        enough = LOADED_SHARE * self.driver.load.connections

        def is_there() -> bool:
            return bool(sum(each["in_flight"] for each in self.status()["processes"]) >= enough)

        if _moment(is_there, LOADED_S) is None:
            raise RuntimeError(f"there were never {enough:g} calls in flight")
        time.sleep(self.delay_s)

    def _victim(self, kind: Literal["engine", "front-end"]) -> dict[str, Any]:
        """As `/status.json` tells of it."""
        processes: list[dict[str, Any]] = self.status()["processes"]
        if kind == "engine":
            return next(each for each in processes if each["name"] == ENGINE)
        busy = [each for each in processes if each["in_flight"]]
        return min(busy, key=lambda each: (each["restarts"], -each["in_flight"]))

    def _await_ready(self, name: str, pid: int) -> float | None:
        """When the server was ready again, with another process in the place of the one that was killed."""

        def is_ready() -> bool:
            shown = self.status()
            others = (each for each in shown["processes"] if each["name"] == name and each["pid"] != pid)
            return bool(shown["ready"]) and any(each["serves"] for each in others)

        return _moment(is_ready, RECOVERY_S)

    def _await_answers(self) -> None:
        """As many more as there are connections, so that most have had one, or no longer than a call may
        take."""

        def answered() -> int:
            account = ledger.read(self.server.admin)
            return int(account["answered"] + account["no_match"])

        enough = answered() + self.driver.load.connections
        _moment(lambda: answered() >= enough, self.driver.load.bound_s)


def _moment(condition: Callable[[], bool], most_s: float) -> float | None:
    """When it came to be, None where it has not within `most_s`."""
    deadline = time.monotonic() + most_s
    while not condition():
        if time.monotonic() > deadline:
            return None
        time.sleep(LOOK_S)
    return time.monotonic()
