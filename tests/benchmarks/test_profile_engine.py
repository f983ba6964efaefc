"""The profile's bookkeeping: time counts once, for the innermost part, and kernels fall into groups."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from benchmarks.profile_engine import IDLE, OTHER, Replaced, Stopwatch, group_of, kernels
from benchmarks.profile_page import section


class Clock:
    """Advances when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Worker:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def outer(self) -> str:
        self._clock.now += 2
        self.inner()
        self.inner()
        self._clock.now += 3
        return "done"

    def inner(self) -> None:
        self._clock.now += 10

    def fails(self) -> None:
        self._clock.now += 1
        self.inner()
        raise KeyError("planted")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(clock: Clock) -> Stopwatch:
    return Stopwatch(clock=clock, cpu_clock=clock, on=True)


@pytest.fixture
def worker(clock: Clock, watch: Stopwatch) -> Worker:
    worker = Worker(clock)
    for method in ("outer", "inner", "fails"):
        watch.wrap(worker, method, method)
    return worker


def told(watch: Stopwatch) -> dict[str, tuple[float, int]]:
    return {part: (spent.wall, spent.calls) for (_, part), spent in watch.spent.items()}


def test_what_a_part_spends_in_another_counts_for_the_other(watch: Stopwatch, worker: Worker) -> None:
    assert worker.outer() == "done"
    worker.inner()
    assert told(watch) == {"outer": (5.0, 1), "inner": (30.0, 3)}


def test_a_part_that_raises_is_counted_and_leaves_the_next_alone(watch: Stopwatch, worker: Worker) -> None:
    with pytest.raises(KeyError):
        worker.fails()
    worker.outer()
    assert told(watch) == {"fails": (1.0, 1), "inner": (30.0, 3), "outer": (5.0, 1)}


def test_nothing_is_counted_while_it_is_off(watch: Stopwatch, worker: Worker) -> None:
    watch.on = False
    worker.outer()
    assert watch.spent == {}


def test_threads_are_told_apart(watch: Stopwatch, worker: Worker) -> None:
    thread = threading.Thread(target=worker.inner, name="engine")
    thread.start()
    thread.join()
    worker.inner()
    assert {thread for thread, _ in watch.spent} == {"engine", threading.current_thread().name}


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("void flashinfer::BatchPrefillWithPagedKVCacheKernel<KernelTraits<...>>", "attention"),
        ("_silu_mul", "MLP activation"),
        ("_rms_norm", "norms"),
        ("_rotate_append", "rotation and append"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT", "matrix products"),
        ("sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64", "matrix products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "matrix products"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        (
            "void at::native::vectorized_elementwise_kernel<4, MulFunctor>",
            "gathers, scaling, likeliest token",
        ),
        ("void at::native::indexSelectLargeIndex<c10::Half, long>", "gathers, scaling, likeliest token"),
        ("something_new", OTHER),
    ],
)
def test_kernels_fall_into_groups(kernel: str, group: str) -> None:
    assert group_of(kernel) == group


def test_groups_and_idle_time_are_the_whole_second() -> None:
    ran = [("_rms_norm", 100_000.0), ("nvjet_a", 400_000.0), ("nvjet_b", 500_000.0), ("_rms_norm", 200_000.0)]
    found = kernels(ran, 2.0)["kernels"]
    assert [(each["group"], each["ms_a_second"]) for each in found] == [
        ("matrix products", 450.0), (IDLE, 400.0), ("norms", 150.0),
    ]  # fmt: skip
    assert found[0]["longest"] == ["nvjet_b", "nvjet_a"]
    assert found[2]["launches_a_second"] == 1
    assert sum(each["ms_a_second"] for each in found) == 1000.0


def test_the_section_shows_every_group_and_part() -> None:
    step: dict[str, Any] = {"thread": "step", "part": "begin", "ms_a_second": 700.0, "cpu_ms_a_second": 600.0}
    others = {"thread": "others", "part": "submit", "ms_a_second": 90.0, "cpu_ms_a_second": 80.0}
    host = {"requests_per_s": 1000.0, "steps_per_s": 200.0, "parts": [step, others]}
    results = {"scenario": "some", "outstanding": 9, "host": host, "card": kernels([("nvjet", 5e5)], 1.0)}
    text = "\n".join(section(results, "file.json"))
    assert "| begin | 700 | 600 |" in text
    assert "| submit (on other threads) | 90 | 80 |" in text
    assert "| matrix products | 500 | 100.0% |" in text
    assert f"| {IDLE} | 500 |" in text


def test_a_method_is_replaced_and_everything_else_is_the_others_own(clock: Clock) -> None:
    worker = Worker(clock)
    replaced = Replaced(worker, {"outer": lambda: "mine"})
    assert (replaced.outer(), clock.now) == ("mine", 0.0)
    replaced.other = "set"
    assert (worker.__dict__["other"], replaced.other) == ("set", "set")
    assert worker.__dict__.keys() == {"_clock", "other"}
