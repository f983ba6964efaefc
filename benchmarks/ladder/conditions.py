"""What stops a ladder. The first condition that a rung breaks is named, and nothing is averaged away."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Rung = dict[str, Any]
"""A rung as the result file has it: `benchmarks.ladder.rung.summary`."""

GAIN = 1.02  # below this times the rate two rungs before, a rung gained nothing


@dataclass(frozen=True, slots=True)
class Bounds:
    """`neighbour_p99_ratio` is of the neighbour's step beside us to the same while we are idle."""

    p99_ms: float = 10_000.0
    allowance_mib: float | None = None
    neighbour_p99_ratio: float = 5.0
    neighbour_alone_p99_ms: float | None = None


def failed(rung: Rung, bounds: Bounds) -> str:
    if not rung["failed"]:
        return ""
    return f"{rung['failed']} calls failed: {'; '.join(rung['failures'])}"


def contaminated(rung: Rung, bounds: Bounds) -> str:
    if not rung["contaminated"]:
        return ""
    return f"{rung['contaminated']} answers are contaminated: {'; '.join(rung['contaminations'])}"


def accounts(rung: Rung, bounds: Bounds) -> str:
    return f"the accounting does not balance: {rung['imbalance']}" if rung["imbalance"] else ""


def footprint(rung: Rung, bounds: Bounds) -> str:
    peak = rung["memory_peak_mib"]
    if peak is None or bounds.allowance_mib is None or peak <= bounds.allowance_mib:
        return ""
    return f"the footprint of {peak:,.1f} MiB is above the allowance of {bounds.allowance_mib:,.0f} MiB"


def latency(rung: Rung, bounds: Bounds) -> str:
    p99 = rung["p99_ms"]
    if p99 is None or p99 <= bounds.p99_ms:
        return ""
    return f"the p99 of {p99:,.0f} ms is above its bound of {bounds.p99_ms:,.0f} ms"


def neighbour(rung: Rung, bounds: Bounds) -> str:
    told, alone = rung["neighbour"], bounds.neighbour_alone_p99_ms
    if alone is None or not told or told.get("step_p99_ms") is None:
        return ""
    most = alone * bounds.neighbour_p99_ratio
    if told["step_p99_ms"] <= most:
        return ""
    return (
        f"the neighbour's step has a p99 of {told['step_p99_ms']:,.1f} ms, above its bound of {most:,.1f} ms"
    )


def nothing_answered(rung: Rung, bounds: Bounds) -> str:
    return "" if rung["answered"] or rung["refused"] else "nothing was answered"


CONDITIONS: dict[str, Callable[[Rung, Bounds], str]] = {
    "failed": failed,
    "contaminated": contaminated,
    "accounting": accounts,
    "footprint": footprint,
    "p99": latency,
    "neighbour": neighbour,
    "answers": nothing_answered,
}


@dataclass(frozen=True, slots=True)
class Abort:
    """Which condition stopped the ladder, at which rung, and why in a sentence."""

    condition: str
    clients: int
    sentence: str

    def as_json(self) -> dict[str, Any]:
        return {"condition": self.condition, "clients": self.clients, "reason": self.sentence}


def first_abort(rung: Rung, bounds: Bounds) -> Abort | None:
    """The first condition that the rung breaks."""
    for name, condition in CONDITIONS.items():
        sentence = condition(rung, bounds)
        if sentence:
            return Abort(name, rung["clients"], sentence)
    return None


def without_gain(rungs: Sequence[Rung]) -> list[str]:
    """A sentence for each rung whose throughput is no higher than two rungs before."""
    found = []
    for earlier, rung in zip(rungs, rungs[2:], strict=False):
        if rung["answers_per_s"] <= GAIN * earlier["answers_per_s"]:
            found.append(
                f"{rung['clients']} clients gained nothing over {earlier['clients']}: "
                f"{rung['answers_per_s']:,.1f} after {earlier['answers_per_s']:,.1f} answers/s"
            )
    return found
