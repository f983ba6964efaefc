"""Which resource a rung was limited by, as far as its own measurements say."""

from __future__ import annotations

from benchmarks.ladder.conditions import Rung

FULL = 0.9  # of a core or of the card
PLACES = {
    "queue": "in the queue",
    "retrieve": "in retrieval",
    "engine": "in the engine",
    "outside": "outside (TLS, HTTP, MCP, waiting for the event loop)",
}


def limiting(rung: Rung) -> str:
    """A sentence. A thread at its core's limit is named before the card, as a card that waits for its host
    also counts as busy. The server's main thread is the event loop: TLS, HTTP, JSON and retrieval."""
    if rung["driver"]["busiest_share"] >= FULL:
        return f"the driver: its busiest process takes {rung['driver']['busiest_share']:.0%} of a core"
    threads = (rung["server"] or {}).get("threads", {})
    name = max(threads, key=lambda each: float(threads[each]), default=None)
    if name is not None and threads[name] >= FULL:
        what = (
            "the event loop" if name.endswith("/main") else "a thread beside the event loop (the step loop)"
        )
        return f"{what} of the server: {threads[name]:.0%} of a core"
    busy = rung["card_busy_percent"]
    if busy is not None and busy >= 100 * FULL:
        beside = rung["neighbour"] and rung["neighbour"]["mode"] == "busy"
        whose = ", its neighbour's among them" if beside else ""
        return f"the card: kernels run {busy:.0f}% of the time{whose}"
    return f"no resource is at its limit; {_where(rung)}"


def _where(rung: Rung) -> str:
    """Where the median answer spends most of its time."""
    parts = {name: part["p50"] for name, part in rung["parts_ms"].items() if part}
    total = sum(parts.values())
    if not total:
        return "nothing was answered"
    most = max(parts, key=lambda name: float(parts[name]))
    return f"a median answer spends {parts[most] / total:.0%} of its time {PLACES[most]}"
