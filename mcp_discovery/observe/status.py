"""What the server is doing, for people: one report, as JSON and as a page without any script or asset."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

from engine.client import EngineStatus
from mcp_discovery.discovery.catalogue import ServerState
from mcp_discovery.observe.counts import Counts
from mcp_discovery.observe.ledger import Latencies

REFRESH_S = 3
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class PlanLine:
    """One line of the memory plan."""

    name: str
    bytes: int
    why: str


@dataclass(frozen=True, slots=True)
class CatalogueReport:
    """Servers with their number of tools; `problems` are sentences about definitions left out or doubtful.

    `listing_tokens` is what an agent would read that lists every tool, `answer_tokens` what all `answers`
    together gave it to read instead.
    """

    revision: str
    indexed_at: str
    servers: Mapping[str, int]
    missing: Sequence[str] = ()
    problems: Sequence[str] = ()
    states: Sequence[ServerState] = ()
    listing_tokens: int = 0
    answers: int = 0
    answer_tokens: int = 0

    @property
    def tools(self) -> int:
        return sum(self.servers.values())


@dataclass(frozen=True, slots=True)
class ServiceReport:
    """What a process that answers calls says of itself. `recent_ms` are the latencies of its last calls."""

    not_ready: str  # why, "" when ready
    model: str
    warm_up: str
    is_warm: bool
    catalogue: CatalogueReport
    rates: Mapping[str, float] = field(default_factory=dict)  # status -> calls a second
    recent_ms: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What the process with the engine says of it."""

    status: EngineStatus
    canary: str
    plan: Sequence[PlanLine] = ()


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """One process of the server, as its parent sees it."""

    name: str
    pid: int | None  # None between its end and its next start
    serves: bool
    restarts: int = 0
    last_failure: str = ""
    received: int = 0  # calls, over all its restarts
    in_flight: int = 0


@dataclass(frozen=True, slots=True)
class StatusReport:
    """Everything that `/status` shows, at one moment, of all processes together."""

    version: str
    uptime_s: float
    not_ready: str  # why, "" when ready
    model: str
    canary: str
    warm_up: str
    is_warm: bool
    counts: Counts
    engine: EngineStatus
    catalogue: CatalogueReport
    plan: Sequence[PlanLine] = ()
    rates: Mapping[str, float] = field(default_factory=dict)  # status -> calls a second
    p50_ms: float | None = None
    p99_ms: float | None = None
    processes: Sequence[ProcessReport] = ()
    latencies: Mapping[str, Latencies] = field(default_factory=dict)  # status -> its calls; metrics only

    @property
    def restarts(self) -> int:
        return sum(process.restarts for process in self.processes)

    def as_json(self) -> dict[str, Any]:
        """The object of `/status.json`."""
        shown = asdict(self)
        del shown["latencies"]
        return {
            **shown,
            "ready": not self.not_ready,
            "restarts": self.restarts,
            "counts": self.counts.as_json(),
            "catalogue": {**asdict(self.catalogue), "tools": self.catalogue.tools},
        }


def page(report: StatusReport) -> str:
    """The report as one HTML page that reloads itself."""
    state = "ready" if not report.not_ready else f"not ready: {report.not_ready}"
    sections = [
        _section("Server", _server_rows(report)),
        _section("Processes", _process_rows(report.processes)),
        _section("Calls", _call_rows(report)),
        _section("Pages and queue", _engine_rows(report.engine), bar=_pages_bar(report.engine)),
        _section("Memory plan", _plan_rows(report.plan)),
        _section("Catalogue", _catalogue_rows(report.catalogue)),
    ]
    return _PAGE.format(
        refresh=REFRESH_S,
        state=escape(state),
        tone="good" if not report.not_ready else "bad",
        sections="\n".join(sections),
    )


Row = tuple[str, str]


def _server_rows(report: StatusReport) -> Iterable[Row]:
    yield "version", report.version
    yield "up for", _duration(report.uptime_s)
    yield "model", report.model
    yield "kernels", report.engine.kernels
    yield "canary", report.canary
    yield "warm-up", report.warm_up


def _process_rows(processes: Iterable[ProcessReport]) -> Iterable[Row]:
    for process in processes:
        state = f"process {process.pid}, " if process.pid else ""
        state += "serves" if process.serves else "does not serve"
        if process.received:
            state += f"; {process.received:,} calls, {process.in_flight:,} in flight"
        if process.restarts:
            state += f"; started again {process.restarts:,} times, the last time because: "
            state += process.last_failure
        yield process.name, state


def _call_rows(report: StatusReport) -> Iterable[Row]:
    counts = report.counts
    yield "received", f"{counts.received:,}"
    for name in ("answered", "no_match", "failed", "cancelled", "in_flight", "invalid"):
        yield name.replace("_", " "), f"{getattr(counts, name):,}"
    for code, count in counts.refused.items():
        yield f"refused: {code}", f"{count:,}"
    if counts.surplus:
        yield "unaccounted for", f"{counts.surplus:,} (a bug: please report it)"
    for status, rate in report.rates.items():
        yield f"{status} a second (last minute)", f"{rate:,.1f}"
    if report.p50_ms is not None and report.p99_ms is not None:
        yield "recent latency, p50 / p99", f"{report.p50_ms:,.0f} / {report.p99_ms:,.0f} ms"


def _engine_rows(status: EngineStatus) -> Iterable[Row]:
    pages = status.pages
    yield (
        "pages free / held / cached",
        f"{pages.free:,} / {pages.held:,} / {pages.cached:,} of {pages.total:,}",
    )
    yield "waiting", f"{status.waiting:,} requests, {status.waiting_tokens:,} tokens"
    yield "running", f"{status.running:,} requests"
    yield "steps", f"{status.steps:,}"
    yield "measured rate", f"{status.tokens_per_s:,.0f} tokens/s"


def _plan_rows(plan: Sequence[PlanLine]) -> Iterable[Row]:
    for line in plan:
        yield f"{line.name} ({line.why})" if line.why else line.name, _mib(line.bytes)
    if plan:
        yield "total", _mib(sum(line.bytes for line in plan))


def _catalogue_rows(catalogue: CatalogueReport) -> Iterable[Row]:
    yield "revision", catalogue.revision
    yield "indexed", catalogue.indexed_at
    yield "tools", f"{catalogue.tools:,} of {len(catalogue.servers):,} servers"
    yield "listing everything", f"{catalogue.listing_tokens:,} tokens"
    if catalogue.answers and catalogue.listing_tokens:
        average = catalogue.answer_tokens / catalogue.answers
        saved = 1 - average / catalogue.listing_tokens
        yield "an answer instead", f"{average:,.0f} tokens on average, {max(0.0, saved):.1%} less"
    states = {state.server: state for state in catalogue.states}
    for server in sorted({*catalogue.servers, *catalogue.missing, *states}):
        yield server, _server_words(catalogue.servers.get(server, 0), states.get(server))
    for problem in catalogue.problems:
        yield "problem", problem


def _server_words(tools: int, state: ServerState | None) -> str:
    """Tools, where the server stands, how old its list is, and why it does not answer."""
    if state is None:
        return f"{tools:,}" if tools else "missing"
    age = "" if state.listed_at is None else f", listed {_duration(time.time() - state.listed_at)} ago"
    if state.presence == "listed":
        return f"{tools:,}{age}"
    return f"{state.presence}, {tools:,}{age}: {state.error}"


def _pages_bar(status: EngineStatus) -> str:
    total = max(1, status.pages.total)
    spans = "".join(
        f'<i class="{state}" style="width:{100 * getattr(status.pages, state) / total:.2f}%"></i>'
        for state in ("held", "cached", "free")
    )
    return f'<div class="bar" role="img" aria-label="pages held, cached and free">{spans}</div>'


def _section(title: str, rows: Iterable[Row], bar: str = "") -> str:
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
    body = f"<table>{cells}</table>" if cells else "<p>Not known yet.</p>"
    return f"<section><h2>{escape(title)}</h2>{bar}{body}</section>"


def _mib(count: int) -> str:
    return f"{count / MIB:,.1f} MiB"


def _duration(seconds: float) -> str:
    minutes, _ = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h {minutes} min" if days else f"{hours} h {minutes} min {int(seconds) % 60} s"


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="refresh" content="{refresh}">
<title>mcp-discovery: {state}</title>
<style>
body {{ font: 16px/1.4 system-ui, sans-serif; margin: 1rem auto; max-width: 44rem; padding: 0 1rem;
  color: #222; background: #fff }}
h1 {{ font-size: 1.3rem }} h2 {{ font-size: 1rem; margin: 1.4rem 0 .4rem }}
table {{ width: 100%; border-collapse: collapse }}
th {{ text-align: left; font-weight: normal; color: #555; padding: .2rem .6rem .2rem 0 }}
td {{ text-align: right; font-variant-numeric: tabular-nums; overflow-wrap: anywhere }}
tr {{ border-bottom: 1px solid #ddd }}
.good {{ color: #18703a }} .bad {{ color: #a32020 }}
.bar {{ display: flex; height: .8rem; background: #eee; border-radius: .2rem; overflow: hidden }}
.held {{ background: #b4572b }} .cached {{ background: #3b6ea8 }} .free {{ background: #cfe3d4 }}
@media (prefers-color-scheme: dark) {{
  body {{ color: #ddd; background: #161616 }} th {{ color: #aaa }} tr {{ border-color: #333 }}
  .good {{ color: #6fce93 }} .bad {{ color: #ff8f8f }} .free {{ background: #2f4a38 }}
}}
</style>
</head>
<body>
<h1>mcp-discovery: <span class="{tone}">{state}</span></h1>
{sections}
</body>
</html>
"""
