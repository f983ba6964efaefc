"""What the benchmark of overload says of its findings, and that a part which breaks off harms no other."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from benchmarks import overload_page
from benchmarks.marked import replaced
from benchmarks.overload import __main__ as command
from benchmarks.overload.targets import targets

AT_REST = {"waiting": 0, "running": 0, "held_pages": 0}
TIMES = {"p50": 1.0, "p99": 2.0, "max": 3.0}


def crowd(**more: Any) -> dict[str, Any]:
    told = {
        "max_pages": None, "clients": 500, "calls": 100, "answered": 60, "refused": 20, "hung_up": 20,
        "failed": 0, "contaminated": 0, "compared": 60, "refusals_wrong": 0, "refusals_checked": 20,
        "imbalance": "", "at_rest": AT_REST, "answer_ms": TIMES, "resident_peak_mib": 2000.0,
        "planned_mib": 2740.0, "failures": [], "contaminations": [], "wrong_refusals": [],
    }  # fmt: skip
    return told | more


def run_of(factor: float = 0.0, **more: Any) -> dict[str, Any]:
    told = {
        "factor": factor, "clients": 4, "answers_per_s": 2.0, "answered": 20, "refused": 0, "failed": 0,
        "imbalance": "", "p50_ms": 1.0, "p99_ms": None,
    }  # fmt: skip
    return told | more


def row(**more: Any) -> dict[str, Any]:
    told = {
        "asked": 10_000, "refused": 10_000, "by_code": {"deadline": 10_000}, "refusal_ms": TIMES, "wrong": 0,
        "wrong_refusals": [], "resident_mib": [1.0, 2.0], "growth_of_the_second_half_mib": 1.0,
        "beside": {"matched": 5}, "accounted": True, "at_rest": AT_REST,
    }  # fmt: skip
    return told | more


def kind(answered: int) -> dict[str, Any]:
    return {"answered": answered, "latency_ms": TIMES if answered else None}


def results(**parts: Any) -> dict[str, Any]:
    opened = [run_of(1.0), run_of(10.0, answers_per_s=1.9)]
    alone = run_of(long_share=0.0, short=kind(9), long=kind(0), verdict=None, seconds=1.0)
    beside = alone | {
        "long_share": 0.1,
        "long": kind(1),
        "verdict": {"short_p99_ratio": 1.4, "cause": "the queue"},
    }
    first = {"first_call_ms": TIMES}
    return {
        "crowd": [crowd(), crowd(max_pages=400)],
        "goodput": {
            "sustainable_per_s": 2.0, "peak_per_s": 2.0, "closed": [run_of()], "open": opened,
            "of_the_peak": {"1": 1.0, "10": 0.95}, "failed": 0, "imbalances": [],
        },
        "fairness": {
            "greedy_calls": 1000, "modest": 50, "modest_calls": 4, "seconds": 60.0, "jain": 0.99,
            "jain_without_turns": 0.05, "alone": first,
            "beside_the_greedy_one": first | {
                "answers_of_greedy": 9, "answers_of_modest": {"least": 8, "most": 10},
            },
        },
        "stop": crowd(stopped_s=10.0, in_flight_at_stop=64),
        "refusals": {"too_large": row(), "in_a_hurry": row()},
        "mixed": {"rate": 0.7, "runs": [alone, beside], "abort": None},
    } | parts  # fmt: skip


def measured(found: dict[str, Any]) -> dict[str, float]:
    return {target.key.removeprefix("overload."): target.measured for target in targets(found)}


def test_a_whole_run_has_every_target() -> None:
    known = tomllib.loads(command.FOLDER.joinpath("targets.toml").read_text())["overload"]
    found = measured(results())
    assert found.keys() == known.keys() | {"mixed.cpu_short_p99_ratio"}
    assert found["goodput_at_10x"] == 0.95
    assert found["mixed.cpu_short_p99_ratio"] == 1.4
    assert {found[name] for name in ("failed", "contaminated", "refusals_wrong", "accounts_wrong")} == {0}


@pytest.mark.parametrize(
    ("part", "finding", "key"),
    [
        ("crowd", [crowd(failed=1)], "failed"),
        ("crowd", [crowd(contaminated=1)], "contaminated"),
        ("crowd", [crowd(refusals_wrong=1)], "refusals_wrong"),
        ("crowd", [crowd(imbalance="one is missing")], "accounts_wrong"),
        ("crowd", [crowd(at_rest=AT_REST | {"held_pages": 3})], "accounts_wrong"),
        ("goodput", results()["goodput"] | {"failed": 1}, "failed"),
        ("goodput", results()["goodput"] | {"imbalances": ["one is missing"]}, "accounts_wrong"),
        ("refusals", {"too_large": row(beside={"failed": 1})}, "failed"),
        ("refusals", {"too_large": row(wrong=1)}, "refusals_wrong"),
        ("refusals", {"too_large": row(accounted=False)}, "accounts_wrong"),
        ("stop", crowd(stopped_s=10.0, contaminated=1), "lost_by_a_stop"),
        ("stop", crowd(stopped_s=10.0, imbalance="one is missing"), "lost_by_a_stop"),
    ],
)
def test_what_went_wrong_in_any_part_counts(part: str, finding: Any, key: str) -> None:
    assert measured(results(**{part: finding}))[key] == 1


@pytest.mark.parametrize(
    ("part", "finding", "key"),
    [
        ("crowd", [crowd(compared=0), crowd()], "contaminated"),
        ("crowd", [crowd(refusals_checked=0)], "refusals_wrong"),
        ("goodput", results()["goodput"] | {"open": [run_of(10.0, failed=1)]}, "goodput_at_10x"),
        ("refusals", {"too_large": row(refusal_ms=None)}, "refusal_p99_ms"),
    ],
)
def test_a_target_that_was_not_measured_is_not_stated(part: str, finding: Any, key: str) -> None:
    assert key not in measured(results(**{part: finding}))


def test_a_part_that_breaks_off_is_told_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(run: command.Run) -> None:
        run.so_far = [crowd()]
        raise ExceptionGroup("unhandled errors", [ConnectionError("the server hung up")])

    def ends(run: command.Run) -> None:
        raise SystemExit("the server did not start: ''")

    out = tmp_path / "overload.json"
    monkeypatch.setattr(
        command, "PARTS", {"crowd": breaks, "goodput": ends, "stop": lambda run: results()["stop"]}
    )
    monkeypatch.setattr("sys.argv", ["overload", "--out", str(out)])
    assert command.main() == 1
    told = json.loads(out.read_text())
    assert list(told["results"]) == ["stop"]
    assert told["broken"]["crowd"]["reason"] == "ConnectionError: the server hung up"
    assert told["broken"]["crowd"]["found"][0]["calls"] == 100
    assert {target["key"] for target in told["targets"]} == {"overload.stop_s", "overload.lost_by_a_stop"}
    assert told["conditions"].keys() == {"crowd", "goodput", "stop"}
    assert "goodput broke off: SystemExit: the server did not start" in capsys.readouterr().out
    text = "\n".join(overload_page.overload(told, "overload.json"))
    assert "**crowd broke off**" in text
    assert "**fairness** was not part of this run" in text


def test_parts_are_added_to_a_file_of_the_same_commit_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(run: command.Run) -> None:
        raise ConnectionError("the server hung up")

    def go(at: str, part: str, does: Any) -> dict[str, Any]:
        monkeypatch.setenv("BENCHMARK_COMMIT", at)
        monkeypatch.setattr(command, "PARTS", {part: does})
        monkeypatch.setattr("sys.argv", ["overload", "--out", str(out), "--only", part])
        command.main()
        told: dict[str, Any] = json.loads(out.read_text())
        return told

    out = tmp_path / "overload.json"
    go("one", "goodput", lambda run: results()["goodput"])
    told = go("one", "stop", lambda run: results()["stop"])
    assert list(told["results"]) == list(told["conditions"]) == ["goodput", "stop"]
    assert "overload.goodput_at_10x" in {target["key"] for target in told["targets"]}
    assert told["conditions"]["goodput"]["command"].endswith("--only goodput")
    assert f"by `{told['conditions']['goodput']['command']}`" in "\n".join(
        overload_page.overload(told, "overload.json")
    )
    told = go("one", "stop", fails)
    assert (list(told["results"]), list(told["broken"])) == (["goodput"], ["stop"])
    told = go("one", "stop", lambda run: results()["stop"])
    assert (list(told["results"]), told["broken"]) == (["goodput", "stop"], {})
    for at in ("two", "two+changes", "two+changes"):
        assert list(go(at, "stop", lambda run: results()["stop"])["results"]) == ["stop"]
        assert list(go(at, "goodput", lambda run: results()["goodput"])["results"])[-1] == "goodput"


def rows_are_whole(lines: list[str]) -> None:
    columns = 0
    for before, line in zip(["", *lines], lines, strict=False):
        if line.startswith("|"):
            columns = line.count("|") if not before.startswith("|") else columns
            assert line.count("|") == columns, line


def envelope(**more: Any) -> dict[str, Any]:
    return {
        "command": "python -m benchmarks.overload", "at": "2026-01-01T00:00:00+00:00",
        "commit": "0123456789abcdef", "hardware": {"cpu": "a CPU", "cores": 2},
    } | more  # fmt: skip


def test_the_page_shows_every_part_and_verdict() -> None:
    found = results()
    own = {
        "seconds": 60.0,
        "load_average_before": [0.5, 0.5, 0.5],
        "command": "python -m benchmarks.overload",
    }
    conditions = dict.fromkeys(found, own)
    miss = {"key": "overload.failed", "target": 0, "good": "at most", "measured": 1, "hit": False}
    told = envelope(results=found, targets=[miss], conditions=conditions, commit="0123456789abcdef+changes")
    whole = json.loads(json.dumps(told))
    lines = list(overload_page.overload(whole, "overload-cpu.json"))
    rows_are_whole(lines)
    text = "\n".join(lines)
    assert "| `overload.failed` | at most | 0 | 1 | **miss** |" in text
    assert "commit 0123456789ab with changes, a CPU, 2 cores" in text
    assert all(f"**{name}** (60 s, load average before it 0.5)" in text for name in found)
    assert "| 10% | 9 | 1.0, 2.0 | 1.4 | 1 |" in text


def test_the_page_shows_each_seed_of_a_simulation_and_its_violations() -> None:
    tally = {
        "requests": 10, "events": 20, "steps": 5,
        "outcomes": {"scored": 5, "embedded": 1, "deadline": 3, "cancelled": 1},
        "disturbances": {"jump": 2}, "refusals_recomputed": 1, "pools_rebuilt": 1, "most_passed": 32,
        "digest": "0123456789abcdef",
    }  # fmt: skip
    told = {
        "violations": ["seed 1, world 2 of 5000 requests: a page is lost"],
        "requests_per_s_per_core": 4000,
        "all": tally,
        "seeds": {"1": tally},
    }
    lines = list(overload_page.simulation(envelope(results=told), "simulation.json"))
    rows_are_whole(lines)
    text = "\n".join(lines)
    assert "**1 violations**" in text
    assert "**Violation:** seed 1, world 2 of 5000 requests: a page is lost" in text
    assert text.count("| 10 | 6 | 3 | 1 | 0 | 0 | 2 | 32 | `0123456789ab` |") == 2
    assert "Refused: 3 deadline." in text


@pytest.mark.parametrize("begin", [overload_page.SIMULATION, overload_page.MEASURED])
def test_the_page_has_a_place_for_each_section(begin: str) -> None:
    page = command.FOLDER.parent / "docs" / "overload.md"
    assert "new\n" in replaced(page.read_text(encoding="utf-8"), ["new"], begin)
