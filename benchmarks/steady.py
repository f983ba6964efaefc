"""A steady second of the whole server under load: who holds the interpreter locks, and on what.

    python -m benchmarks.steady --device cuda --clients 512 --frontends 6 [--seconds 10] [--out FILE]

Starts the server as `benchmarks.ladder --start` does, brings a closed loop of clients to its steady state,
and reads CPU (from /proc), the server's own counters and the card for some seconds. Then py-spy looks at the
process with the engine and at the busiest front-end, each once for the holder of the interpreter lock and
once for all threads. Rates are of the seconds before py-spy, which slows what it looks at; the rate beside
each profile says by how much. `benchmarks.steady_page` puts the tables into docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.ladder import host
from benchmarks.ladder.driver import Connect, Disconnect, Ran, begin_soon
from benchmarks.ladder.options import parse as ladder_options
from benchmarks.ladder.rung import Shape, Site, driver_cost, summary
from benchmarks.ladder.start import stage
from benchmarks.report import write
from benchmarks.stacks import Profile, Spy, SpyFailed
from benchmarks.steady_page import section
from engine.errors import EngineError

SETTLE_S = 3.0  # until the load is steady
SPY_BESIDE_S = 5.0  # what one profile takes beside its samples
PROFILES = 4
SHOWN_THREADS, SHOWN_FUNCTIONS = 6, 25
ENGINES = ("the engine process", "the serving process")


@dataclass(frozen=True, slots=True)
class Reading:
    """The server at one moment."""

    at: float
    threads: dict[str, float]  # CPU seconds so far, as `benchmarks.ladder.host` names them
    machine: float  # busy seconds of the cores, whoever used them
    status: dict[str, Any]  # /status.json

    @classmethod
    def take(cls, site: Site) -> Reading:
        assert site.server_pid is not None
        with urllib.request.urlopen(f"{site.admin}/status.json", timeout=30.0) as reply:
            status = json.load(reply)
        threads = host.thread_seconds(host.tree(site.server_pid))
        return cls(time.monotonic(), threads, host.busy_seconds(), status)

    @property
    def ended(self) -> int:
        """Calls that have ended, however."""
        return int(self.status["counts"]["received"] - self.status["counts"]["in_flight"])


@dataclass(frozen=True, slots=True)
class Window:
    """What happened between two readings."""

    first: Reading
    last: Reading

    @property
    def seconds(self) -> float:
        return self.last.at - self.first.at

    @property
    def calls(self) -> int:
        return self.last.ended - self.first.ended

    @property
    def calls_per_s(self) -> float:
        return round(self.calls / self.seconds, 1)

    @property
    def steps(self) -> int:
        return int(self.last.status["engine"]["steps"] - self.first.status["engine"]["steps"])

    def cores(self) -> dict[str, float]:
        """Of each thread, the share of a core it took."""
        return {
            thread: (seconds - self.first.threads.get(thread, 0.0)) / self.seconds
            for thread, seconds in self.last.threads.items()
        }

    def processes(self) -> list[dict[str, Any]]:
        """The server's processes in the order of its status, the parent first."""
        cores = self.cores()
        pids = {int(thread.partition("/")[0]) for thread in cores}
        names = {told["pid"]: told["name"] for told in self.last.status["processes"]}
        taken = {pid: sum(cores[each] for each in cores if each.startswith(f"{pid}/")) for pid in pids}
        order = sorted(pids, key=lambda pid: [-1, *names].index(pid) if pid in names else -1)
        return [
            {
                "name": names.get(pid, "the parent"),
                "pid": pid,
                "cores": round(taken[pid], 3),
                "cpu_us_per_call": round(1e6 * taken[pid] * self.seconds / max(1, self.calls), 1),
            }
            for pid in order
        ]

    def as_json(self) -> dict[str, Any]:
        return {
            "seconds": round(self.seconds, 2),
            "calls_per_s": self.calls_per_s,
            "steps_per_s": round(self.steps / self.seconds, 1),
            "calls_per_step": round(self.calls / max(1, self.steps), 2),
            "tokens_per_s": self.last.status["engine"]["tokens_per_s"],
            "waiting": self.last.status["engine"]["waiting"],
            "running": self.last.status["engine"]["running"],
            "machine_cores": round((self.last.machine - self.first.machine) / self.seconds, 2),
            "processes": self.processes(),
        }


@contextmanager
def under_load(site: Site, clients: int, seconds: float) -> Iterator[Future[list[Ran]]]:
    """A closed loop of `clients` for `seconds`; what its drivers did is there once it is over."""
    connected = site.drivers.each([Connect(share) for share in site.drivers.share(clients)])
    if failures := [sentence for ran in connected for sentence in ran.failures]:
        raise RuntimeError(f"{len(failures)} of {clients} clients could not connect: {failures[0]}")
    orders = Shape(clients, seconds, calls=1, most_s=2 * seconds).orders(site.drivers, begin_soon())
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(site.drivers.each, orders)
        yield load
        load.result()
    site.drivers.all(Disconnect())


def watched(site: Site, load: Future[list[Ran]], action: Callable[[], Any]) -> tuple[Any, Window]:
    """What `action` returns, and the window that it was. Raises SpyFailed where the load ended in it."""
    first = Reading.take(site)
    result = action()
    window = Window(first, Reading.take(site))
    if load.done():
        raise SpyFailed("the load ended before it was looked at to the end")
    return result, window


def measure(site: Site, given: argparse.Namespace) -> dict[str, Any]:
    spy = Spy(given.profile_seconds, given.rate)
    beside = PROFILES * (given.profile_seconds + SPY_BESIDE_S)
    with under_load(site, given.clients, SETTLE_S + given.seconds + beside) as load:
        time.sleep(SETTLE_S)
        _card(site)
        _, window = watched(site, load, lambda: time.sleep(given.seconds))
        busy = _card(site)
        told = window.as_json()
        profiles = [
            look(site, load, spy, process, window.cores()) for process in looked_at(told["processes"])
        ]
    runs = load.result()
    calls = [call for ran in runs for call in ran.calls]
    whole = summary(given.clients, runs, calls)
    return {
        "clients": given.clients,
        "frontends": given.frontends,
        "cores": len(os.sched_getaffinity(0)),
        "window": {**told, "card_busy_percent": busy},
        "load": {key: whole[key] for key in ("answered", "refused", "failed", "p50_ms", "p99_ms")},
        "driver": driver_cost(runs, len(calls)),
        "spy": {"seconds": given.profile_seconds, "rate": given.rate},
        "profiles": profiles,
    }


def _card(site: Site) -> float | None:
    """Percent of the time since the last call at which a kernel ran; None without a card."""
    busy = site.trace.take()[1] if site.trace is not None else None
    return busy if busy is None else round(busy, 1)


def looked_at(processes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The process with the engine and the busiest front-end, which may be one."""
    engine = next(each for each in processes if each["name"] in ENGINES)
    frontends = [each for each in processes if each["name"].startswith("front-end")]
    return [engine, *([max(frontends, key=lambda each: float(each["cores"]))] if frontends else [])]


def look(
    site: Site, load: Future[list[Ran]], spy: Spy, process: dict[str, Any], cores: dict[str, float]
) -> dict[str, Any]:
    """Profiles of one process; `cores` are the CPU of threads before py-spy. Where it fails, its words stand
    for them as `problem`."""
    pid, name = process["pid"], process["name"]
    found: dict[str, Any] = {"process": name, "pid": pid}
    try:
        lock, beside_lock = watched(site, load, lambda: spy.holding_the_lock(pid))
        every, beside_every = watched(site, load, lambda: spy.all_threads(pid))
    except SpyFailed as failure:
        return found | {"problem": str(failure)}
    if not lock.stacks:
        found["problem"] = "py-spy saw no thread that holds the interpreter lock"
    return found | {
        "calls_per_s_meanwhile": [beside_lock.calls_per_s, beside_every.calls_per_s],
        "lock_share": round(sum(lock.threads().values()), 4),
        "threads": threads(pid, lock, every, cores),
        "rooms": rooms(lock),
        "functions": functions(lock),
    }


def threads(pid: int, lock: Profile, every: Profile, cores: dict[str, float]) -> list[dict[str, Any]]:
    """The Python threads that took CPU or the lock: shares of a core and of the lock, and where each is,
    waiting or not. A place where a thread is more often than it holds the lock is one where it waits, for
    the lock or for something else, or works without the lock."""
    holds = lock.threads()
    told: list[dict[str, Any]] = []
    for tid, name in every.threads():
        held = lock.functions_self(tid)
        told.append(
            {
                "thread": name,
                "cores": round(cores.get(f"{pid}/main" if tid == pid else f"{pid}/thread {tid}", 0.0), 3),
                "lock": holds.get((tid, name), 0.0),
                "places": [
                    _place(every, place) | {"share": share, "lock": held.get(place, 0.0)}
                    for place, share in list(every.functions_self(tid).items())[:SHOWN_THREADS]
                ],
            }
        )
    told.sort(key=lambda each: (-each["lock"], -each["cores"]))
    return told[:SHOWN_THREADS]


def rooms(lock: Profile) -> list[dict[str, Any]]:
    """Shares of all moments: with the room innermost, and with the room anywhere in the stack."""
    itself = lock.rooms_self()
    told = [
        {"room": room, "self": itself.get(room, 0.0), "inclusive": share}
        for room, share in lock.rooms_inclusive().items()
    ]
    return sorted(told, key=lambda each: -float(str(each["self"])))


def functions(lock: Profile) -> list[dict[str, Any]]:
    return [
        _place(lock, place) | {"share": share}
        for place, share in list(lock.functions_self().items())[:SHOWN_FUNCTIONS]
    ]


def _place(profile: Profile, place: tuple[str, str]) -> dict[str, Any]:
    function, file = place
    line = profile.hottest_line(function, file)
    return {"function": function, "at": f"{file}:{line}" if line else file}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--clients", type=int, default=512)
    parser.add_argument("--frontends", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=10.0, help="without py-spy")
    parser.add_argument("--profile-seconds", type=float, default=5.0, help="of each profile")
    parser.add_argument("--rate", type=int, default=500, help="py-spy's samples a second")
    parser.add_argument("--model", type=Path, help="a GGUF file; left to the server by default")
    parser.add_argument("--set", nargs="+", default=[], metavar="TABLE__KEY=VALUE", help="further settings")
    parser.add_argument("--drivers", type=int, help="processes that make the load")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    try:
        with stage(_ladder(given)) as found:
            results = {**found.facts, **measure(found.site, given)}
    except (OSError, RuntimeError, SpyFailed, EngineError) as error:
        print(f"benchmarks.steady: {error}", file=sys.stderr)
        return 1
    path = write("steady", results, out=given.out)
    print("\n".join(section(results, path.name)))
    return 1 if results["load"]["failed"] else 0


def _ladder(given: argparse.Namespace) -> argparse.Namespace:
    """The same as options of the ladder, whose server and drivers these are."""
    settings = [f"SERVER__FRONTENDS={given.frontends}", *given.set]
    if given.model is not None:
        settings.append(f"ENGINE__MODEL={given.model}")
    drivers = [] if given.drivers is None else ["--drivers", str(given.drivers)]
    return ladder_options(["--start", "--device", given.device, *drivers, "--set", *settings])


if __name__ == "__main__":
    sys.exit(main())
