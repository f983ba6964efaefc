"""Front-ends and an engine process, killed under load: every call ends, and the account balances."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from mcp_discovery.certificates import Pki
from tests.clients.conftest import small_catalogue
from tests.clients.raw import MODERN, call_message, headers, trusting
from tests.clients.server import WAIT_S, Process
from tests.faults.test_recovery import ANSWERS, await_lines, children, failing, replace, status
from tests.processes.test_supervisor import is_gone

__all__ = ["small_catalogue"]  # a fixture
CALLS = 12


class Client:
    """One TLS connection that is kept; `call` says what became of a call, `broken` where nothing came."""

    def __init__(self, server: Process) -> None:
        self._http = http.client.HTTPSConnection(
            server.host, server.port, timeout=WAIT_S, context=trusting(server.pki.ca)
        )
        self.answered_at = 0.0
        assert self.connect()

    def connect(self) -> bool:
        """Whether it is connected, again where the connection has broken."""
        if self._http.sock is None:
            try:
                self._http.connect()
            except OSError:
                self._http.close()
                return False
        return True

    def call(self, query: str) -> tuple[str, str]:
        """(status, code of an error or refusal)"""
        body = json.dumps(call_message(MODERN, query, timeout_ms=60_000))
        assert self._http.sock is not None  # the same connection as before
        try:
            self._http.request("POST", "/mcp", body, headers(MODERN))
            result = json.loads(self._http.getresponse().read())["result"]["structuredContent"]
        except (OSError, http.client.HTTPException):
            self._http.close()
            return "broken", ""
        self.answered_at = time.monotonic()
        told = result["error"] or result["refusal"] or {"code": ""}
        return result["status"], told["code"]

    def close(self) -> None:
        self._http.close()


@contextmanager
def held_calls(
    server: Process, trip: Path, clients: list[Client], then: str = "go"
) -> Iterator[list[Future[tuple[str, str]]]]:
    """One call on each connection, all in the engine, the device held, at the end for `then`."""
    trip.write_text("hold")
    with ThreadPoolExecutor(len(clients)) as pool:
        answers = [
            pool.submit(client.call, f"send an email to number {n}") for n, client in enumerate(clients)
        ]
        try:
            # The engine tells of itself at times, the front-ends at every change: both have to be there.
            await_status(server, lambda shown: in_engine(shown) == in_front_ends(shown) == len(clients))
            yield answers
        finally:
            replace(trip, then)


@pytest.fixture
def served(pki: Pki, small_catalogue: Path, tmp_path: Path) -> Iterator[tuple[Process, Path]]:
    with failing(pki, tmp_path, small_catalogue, SERVER__FRONTENDS=2) as both:
        await_warm(both[0])
        yield both


@pytest.fixture
def clients(served: tuple[Process, Path]) -> Iterator[list[Client]]:
    made = [Client(served[0]) for _ in range(CALLS)]
    yield made
    for client in made:
        client.close()


def await_status(server: Process, condition: Any) -> dict[str, Any]:
    pause = threading.Event()
    for _ in range(int(WAIT_S / 0.05)):
        shown = status(server)
        if condition(shown):
            return shown
        pause.wait(0.05)  # another process's state has no event to wait for
    raise AssertionError(shown)


def await_warm(server: Process) -> None:
    await_status(server, lambda shown: shown["is_warm"])


def in_engine(shown: dict[str, Any]) -> int:
    return int(shown["engine"]["running"] + shown["engine"]["waiting"])


def in_front_ends(shown: dict[str, Any]) -> int:
    return sum(each["in_flight"] for each in shown["processes"] if each["name"].startswith("front-end"))


def process(server: Process, name: str) -> dict[str, Any]:
    (found,) = [each for each in status(server)["processes"] if each["name"] == name]
    return found


def balanced(shown: dict[str, Any]) -> bool:
    ended = sum(shown[key] for key in ("answered", "no_match", "failed", "cancelled"))
    return shown["received"] == ended + sum(shown["refused"].values()) + shown["in_flight"]


def idle(shown: dict[str, Any]) -> bool:
    return shown["in_flight"] == 0 and shown["pages"]["held"] == 0


def test_a_front_end_that_is_killed_takes_only_its_own_calls_along(
    served: tuple[Process, Path], clients: list[Client]
) -> None:
    server, trip = served
    with held_calls(server, trip, clients) as answers:
        fronts = [each for each in status(server)["processes"] if each["name"].startswith("front-end")]
        victim = max(fronts, key=lambda each: each["in_flight"])
        os.kill(victim["pid"], signal.SIGKILL)
        shown = server.until(lambda shown: shown["cancelled"] == victim["in_flight"])
        assert shown["in_flight"] == CALLS - victim["in_flight"]
        assert balanced(shown)
    became = Counter(answer.result(WAIT_S)[0] for answer in answers)
    assert became["broken"] == victim["in_flight"]
    assert sum(became[status] for status in ANSWERS) == CALLS - victim["in_flight"]
    shown = server.until(idle)
    assert balanced(shown)
    assert (shown["received"], shown["cancelled"]) == (CALLS, victim["in_flight"])
    await_status(
        server,
        lambda shown: (
            shown["ready"]
            and any(
                each["name"] == victim["name"] and each["serves"] and each["pid"] != victim["pid"]
                for each in shown["processes"]
            )
        ),
    )
    assert process(server, victim["name"])["restarts"] == 1
    assert process(server, victim["name"])["last_failure"] == "ended by SIGKILL"
    with closing(Client(server)) as client:
        assert client.call("list the events")[0] in ANSWERS


def test_an_engine_that_is_killed_ends_every_call_and_no_connection(
    served: tuple[Process, Path], clients: list[Client]
) -> None:
    server, trip = served
    with held_calls(server, trip, clients) as answers:
        killed_at = time.monotonic()
        os.kill(process(server, "the engine process")["pid"], signal.SIGKILL)
        became = {answer.result(WAIT_S) for answer in answers}
        assert became == {("failed", "engine_lost")}
        last = max(client.answered_at for client in clients)
        print(f"the last of {CALLS} calls was told {1000 * (last - killed_at):.0f} ms after the kill")
        assert clients[0].call("list the events") == ("refused", "not_ready")
    await_lines(server, "ready:", 2)
    await_warm(server)
    assert status(server)["warm_up"] == "done, 11 tools"  # all of them anew
    assert all(client.call("list the events")[0] in ANSWERS for client in clients)
    shown = server.until(idle)
    assert balanced(shown)
    assert (shown["received"], shown["failed"]) == (2 * CALLS + 1, CALLS)
    assert shown["refused"] == {"not_ready": 1}
    assert process(server, "the engine process")["restarts"] == 1


def test_a_device_that_fails_behind_front_ends_is_told_once(
    served: tuple[Process, Path], clients: list[Client]
) -> None:
    server, trip = served
    with held_calls(server, trip, clients, then="once") as answers:
        pass
    assert {answer.result(WAIT_S) for answer in answers} == {("failed", "device_fault")}
    await_lines(server, "ready:", 2)
    assert clients[0].call("list the events")[0] in ANSWERS
    assert process(server, "the engine process")["last_failure"] == "a step failed on the device"
    assert server.until(idle)["failed"] == CALLS


def test_a_parent_that_is_killed_leaves_nothing(served: tuple[Process, Path]) -> None:
    server, _ = served
    pids = children(server.popen.pid)
    assert len(pids) == 3
    server.popen.kill()
    assert all(is_gone(pid) for pid in pids)


def test_a_signal_lets_every_call_end(served: tuple[Process, Path], clients: list[Client]) -> None:
    server, trip = served
    idle_client, *busy = clients
    with held_calls(server, trip, busy) as answers:
        server.popen.send_signal(signal.SIGTERM)
        await_status(server, lambda shown: shown["engine"]["draining"])
        assert idle_client.call("list the events") == ("refused", "draining")
        assert not any(answer.done() for answer in answers)
    assert {answer.result(WAIT_S)[0] for answer in answers} <= set(ANSWERS)
    assert server.popen.wait(WAIT_S) == 0
    assert "Traceback" not in server.output


def test_the_account_balances_through_kills_under_load(
    served: tuple[Process, Path], clients: list[Client]
) -> None:
    """Clients and server keep books of their own; what the clients were told the server has counted."""
    server, _ = served
    stop = threading.Event()

    def work(client: Client) -> Counter[str]:
        became: Counter[str] = Counter()
        while not stop.is_set():
            if not client.connect():
                continue
            became[client.call(f"send an email to number {sum(became.values())}")[0]] += 1
        return became

    with ThreadPoolExecutor(len(clients)) as pool:
        working = [pool.submit(work, client) for client in clients]
        try:
            for name in ("front-end 1", "the engine process", "front-end 2"):
                seen = server.accounting()["received"]
                server.until(lambda shown, seen=seen: shown["received"] > seen + CALLS)
                restart(server, name)
        finally:
            stop.set()
        told: Counter[str] = sum((each.result(WAIT_S) for each in working), Counter())
    shown = server.until(idle)
    assert balanced(shown)
    assert shown["pages"]["free"] + shown["pages"]["cached"] == shown["pages"]["total"]
    counted = {
        "matched": shown["answered"],
        "no_match": shown["no_match"],
        "refused": sum(shown["refused"].values()),
        "failed": shown["failed"],
    }
    lost = {status: counted[status] - told[status] for status in counted}  # counted, and cut off on their way
    assert all(count >= 0 for count in lost.values()), (counted, told)
    assert shown["cancelled"] + sum(lost.values()) <= told["broken"]
    assert shown["received"] <= sum(told.values())


def restart(server: Process, name: str) -> None:
    """Kills a process, and waits until another of its name serves."""
    pid = process(server, name)["pid"]
    os.kill(pid, signal.SIGKILL)
    await_status(
        server,
        lambda shown: (
            shown["ready"]
            and any(
                each["name"] == name and each["serves"] and each["pid"] != pid for each in shown["processes"]
            )
        ),
    )
