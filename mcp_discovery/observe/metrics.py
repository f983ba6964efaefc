"""Prometheus metrics: what the ledger and the engine say at the moment of the scrape, and latencies."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from engine.client import EngineStatus
from mcp_discovery.observe.accounting import Counts

PREFIX = "mcp_discovery"
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """The metrics of one process, in a registry of their own."""

    def __init__(
        self,
        counts: Callable[[], Counts],
        engine: Callable[[], EngineStatus],
        tools: Callable[[], int],
        restarts: int = 0,
    ) -> None:
        """`restarts`: how often the serving process was started again before this one."""
        self._registry = CollectorRegistry()
        self._seconds = Histogram(
            f"{PREFIX}_call_seconds",
            "Time from a call's arrival to its end.",
            ["status"],
            buckets=BUCKETS_S,
            registry=self._registry,
        )
        self._registry.register(_Readings(counts, engine, tools, restarts))

    def observe(self, status: str, seconds: float) -> None:
        """Adds a call that ended with `status` after `seconds` to the latencies."""
        self._seconds.labels(status).observe(seconds)

    def exposition(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self._registry)


class _Readings(Collector):
    """Everything that has a current value elsewhere is read there, not kept twice."""

    def __init__(
        self,
        counts: Callable[[], Counts],
        engine: Callable[[], EngineStatus],
        tools: Callable[[], int],
        restarts: int,
    ) -> None:
        self._restarts = restarts
        self._counts = counts
        self._engine = engine
        self._tools = tools

    def collect(self) -> Iterable[Metric]:
        yield from _calls(self._counts())
        yield from _engine(self._engine())
        yield CounterMetricFamily(
            f"{PREFIX}_restarts", "Times the serving process was started again.", value=self._restarts
        )
        yield _gauge("catalogue_tools", "Tools in the catalogue.", self._tools())


def _calls(counts: Counts) -> Iterable[Metric]:
    yield CounterMetricFamily(f"{PREFIX}_calls_received", "Valid calls that arrived.", value=counts.received)
    ended = CounterMetricFamily(f"{PREFIX}_calls_ended", "Calls by how they ended.", labels=["state"])
    for state, count in counts.as_json().items():
        if state not in ("received", "in_flight", "refused"):
            ended.add_metric([state], count)
    ended.add_metric(["refused"], sum(counts.refused.values()))
    yield ended
    refused = CounterMetricFamily(f"{PREFIX}_refusals", "Refused calls by code.", labels=["code"])
    for code, count in counts.refused.items():
        refused.add_metric([code], count)
    yield refused
    yield _gauge("calls_in_flight", "Calls that have not ended.", counts.in_flight)


def _engine(status: EngineStatus) -> Iterable[Metric]:
    pages = GaugeMetricFamily(f"{PREFIX}_pages", "KV cache pages by state.", labels=["state"])
    for state in ("free", "held", "cached"):
        pages.add_metric([state], getattr(status.pages, state))
    yield pages
    yield _gauge("pages_capacity", "KV cache pages in all.", status.pages.total)
    yield _gauge("ready", "1 where the engine serves.", float(status.ready and not status.draining))
    yield _gauge("queue_requests", "Requests that wait for admission.", status.waiting)
    yield _gauge("queue_tokens", "Prefill tokens that wait for admission.", status.waiting_tokens)
    yield _gauge("running_requests", "Requests admitted and not ended.", status.running)
    yield _gauge("tokens_per_second", "Measured rate of the engine.", status.tokens_per_s)
    yield CounterMetricFamily(f"{PREFIX}_steps", "Steps of the engine.", value=status.steps)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{PREFIX}_{name}", text, value=value)
