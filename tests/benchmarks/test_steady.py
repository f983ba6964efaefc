"""What samples of a process add up to, and what is said of them."""

from __future__ import annotations

import stat
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import steady
from benchmarks.ladder import host
from benchmarks.stacks import OTHER, Frame, Profile, Spy, SpyFailed, Stack, parse
from benchmarks.steady import Reading, Window
from benchmarks.steady_page import limit, resources, section

RAW = """\
thread (41): MainThread;<module> (mcp_discovery/__main__.py:5);Runner.run (asyncio/runners.py:118) 30
thread (43): engine;Thread.run (threading.py:982);Engine._run (engine/engine.py:330);Core.begin_step (engine/core.py:90) 40
thread (43): engine;Thread.run (threading.py:982);Engine._run (engine/engine.py:330);Core.begin_step (engine/core.py:97) 10
thread (43): engine;Thread.run (threading.py:982);Engine._run (engine/engine.py:330);Event.wait (torch/cuda/streams.py) 20
thread (0x7F): ;operator() (x.cpp:1) 5
process 41:"python" 7
"""  # noqa: E501 - as py-spy writes it
FILES = ("engine/core.py", "engine/schedule.py", "torch/functional.py", "threading.py", "elsewhere.py")

frames = st.builds(Frame, st.sampled_from("fgh"), st.sampled_from(FILES), st.integers(1, 3))
stacks = st.builds(
    Stack,
    st.sampled_from(("engine", "MainThread")),
    st.integers(1, 2),
    st.lists(frames, min_size=1, max_size=5).map(tuple),
    st.integers(1, 50),
)


def test_each_line_of_the_raw_format_is_a_stack() -> None:
    found = list(parse(RAW))
    assert [(stack.thread, stack.tid, stack.samples) for stack in found] == [
        ("MainThread", 41, 30), ("engine", 43, 40), ("engine", 43, 10), ("engine", 43, 20),
        ("unnamed", 0x7F, 5),
    ]  # fmt: skip
    assert found[1].frames[-1] == Frame("Core.begin_step", "engine/core.py", 90)
    assert found[3].frames[-1] == Frame("Event.wait", "torch/cuda/streams.py", 0)


def test_lines_of_a_function_are_one_place_and_the_hottest_is_shown() -> None:
    profile = Profile(list(parse(RAW)), 200)
    assert profile.functions_self(43) == {
        ("Core.begin_step", "engine/core.py"): 0.25,
        ("Event.wait", "torch/cuda/streams.py"): 0.1,
    }
    assert profile.hottest_line("Core.begin_step", "engine/core.py") == 90
    assert profile.rooms_self()["engine: core"] == 0.25
    assert profile.rooms_inclusive()["engine: loop"] == 0.35
    assert profile.threads()[(43, "engine")] == 0.35


@given(st.lists(stacks, max_size=20))
def test_shares_add_up_and_a_room_has_at_least_what_it_spends_itself(found: list[Stack]) -> None:
    moments = 10_000
    profile = Profile(found, moments)
    whole = sum(stack.samples for stack in found) / moments
    for shares in (profile.threads(), profile.rooms_self(), profile.functions_self()):
        assert sum(shares.values()) == pytest.approx(whole)
        assert list(shares.values()) == sorted(shares.values(), reverse=True)
    inclusive = profile.rooms_inclusive()
    assert all(share <= inclusive[room] <= whole + 1e-9 for room, share in profile.rooms_self().items())
    by_hand: Counter[str] = Counter()
    for stack in found:
        for room in {frame.room for frame in stack.frames}:
            by_hand[room] += stack.samples
    assert {room: round(count / moments, 4) for room, count in by_hand.items()} == inclusive


def test_a_file_of_no_room_is_elsewhere() -> None:
    assert Frame("f", "elsewhere.py", 1).room == OTHER
    assert Frame("f", "site/engine/core.py", 1).room == OTHER


def stand_in(folder: Path, script: str) -> Spy:
    """A program in place of py-spy."""
    program = folder / "spy"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return Spy(seconds=2.0, rate=100, program=str(program))


def test_the_moments_are_those_that_could_be_read(tmp_path: Path) -> None:
    (tmp_path / "raw").write_text(RAW)
    copy = (
        f'while [ "$1" != --output ]; do shift; done; cp {tmp_path}/raw "$2"; echo "Samples: 1 Errors: 9" >&2'
    )
    profile = stand_in(tmp_path, copy).holding_the_lock(1)
    assert profile.moments == 2 * 100 - 9
    assert len(profile.stacks) == 5


def test_who_may_not_look_says_so(tmp_path: Path) -> None:
    spy = stand_in(tmp_path, 'echo "Error: Permission Denied:\n try again as root" >&2; exit 1')
    with pytest.raises(SpyFailed, match="failed: Error: Permission Denied: try again as root"):
        spy.all_threads(1)
    with pytest.raises(SpyFailed, match="pip install py-spy"):
        Spy(program=str(tmp_path / "none")).all_threads(1)


def reading(at: float, cpu: float, calls: int, steps: int) -> Reading:
    names = ("the engine process", "front-end 1", "front-end 2")
    in_flight = int(at) - 97  # another one each time
    status = {
        "counts": {"received": calls + in_flight, "in_flight": in_flight},
        "engine": {"steps": steps, "tokens_per_s": 1.0, "waiting": 0, "running": 3},
        "processes": [{"name": name, "pid": 11 + number} for number, name in enumerate(names)],
    }
    threads = {
        "10/main": 0.0,
        "11/main": cpu / 2,
        "11/thread 15": cpu,
        "12/main": cpu / 4,
        "13/main": cpu / 3,
    }
    return Reading(at, threads, 2 * cpu, status)


@pytest.fixture
def window() -> Window:
    return Window(reading(100.0, 1.0, 50, 7), reading(110.0, 7.0, 1050, 57))


def test_a_window_is_the_difference_of_its_readings(window: Window) -> None:
    told = window.as_json()
    assert (told["calls_per_s"], told["steps_per_s"], told["calls_per_step"]) == (100.0, 5.0, 20.0)
    assert told["machine_cores"] == 1.2
    assert [(each["name"], each["cores"]) for each in told["processes"]] == [
        ("the parent", 0.0), ("the engine process", 0.9), ("front-end 1", 0.15), ("front-end 2", 0.2),
    ]  # fmt: skip
    assert told["processes"][1]["cpu_us_per_call"] == 9000.0


def test_the_engine_and_the_busiest_front_end_are_looked_at(window: Window) -> None:
    names = [each["name"] for each in steady.looked_at(window.processes())]
    assert names == ["the engine process", "front-end 2"]
    alone = [{"name": "the parent", "cores": 0.0}, {"name": "the serving process", "cores": 0.5}]
    assert [each["name"] for each in steady.looked_at(alone)] == ["the serving process"]


def results(window: Window, **more: Any) -> dict[str, Any]:
    lock, every = Profile(list(parse(RAW)), 200), Profile(list(parse(RAW)), 105)
    engine = {
        "process": "the engine process",
        "lock_share": 0.95,
        "threads": steady.threads(41, lock, every, {"41/main": 0.3, "41/thread 43": 0.7}),
        "rooms": steady.rooms(lock),
        "functions": steady.functions(lock),
    }
    return {
        "clients": 512,
        "frontends": 2,
        "cores": 2,
        "device": "cuda",
        "window": {**window.as_json(), "card_busy_percent": 61.0},
        "load": {"refused": 0, "failed": 0, "p50_ms": 5.0},
        "driver": {"processes": 2, "busiest_share": 0.4},
        "profiles": [engine, {"process": "front-end 2", "problem": "py-spy failed: no permission"}],
        **more,
    }


def test_a_thread_has_its_cpu_its_lock_and_the_places_where_it_waits(window: Window) -> None:
    engine, main, *_ = results(window)["profiles"][0]["threads"]
    assert (engine["thread"], engine["cores"], engine["lock"]) == ("engine", 0.7, 0.35)
    assert (main["thread"], main["cores"]) == ("MainThread", 0.3)
    assert [place["function"] for place in engine["places"]] == ["Core.begin_step", "Event.wait"]
    assert engine["places"][0]["at"] == "engine/core.py:90"


def test_the_resource_at_its_limit_is_named_and_none_where_none_is(window: Window) -> None:
    told = results(window)
    assert next(iter(resources(told).items())) == ("the interpreter lock of the engine process", 0.95)
    assert limit(told).startswith("The limit is the interpreter lock of the engine process. In use:")
    told["profiles"][0]["lock_share"] = 0.5
    assert limit(told).startswith("No resource is at its limit.")
    told["driver"]["busiest_share"] = 0.97
    assert "The limit is the load's own processes" in limit(told)


def test_a_section_has_whole_tables_and_says_what_is_missing(window: Window) -> None:
    lines = list(section(results(window), "steady.json"))
    text = "\n".join(lines)
    assert "The profile of front-end 2 is not whole: py-spy failed: no permission." in text
    assert "| engine: core | 250 / 250 |" in text
    assert "| 2 front-ends together | 0.35 | 3,500 |" in text
    columns = 0
    for line in lines:
        columns = (columns or line.count("|")) if line.startswith("|") else 0
        assert line.count("|") == columns
    assert len(lines) <= 40


def test_the_cores_of_this_process_get_busier() -> None:
    before = host.busy_seconds()
    assert before > 0
    assert host.busy_seconds() >= before
