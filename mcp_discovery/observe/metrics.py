"""Prometheus metrics: a report in their text format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from engine.client import EngineStatus
from mcp_discovery.observe.counts import Counts
from mcp_discovery.observe.ledger import BUCKETS_S, Latencies
from mcp_discovery.observe.status import ProcessReport, StatusReport

PREFIX = "mcp_discovery"


def exposition(report: StatusReport) -> bytes:
    """The Prometheus text format of a report."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Once(report))
    return generate_latest(registry)


class _Once(Collector):
    """Collects from one report."""

    def __init__(self, report: StatusReport) -> None:
        self._report = report

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        report = self._report
        yield from _calls(report.counts)
        yield _seconds(report.latencies)
        yield from _engine(report.engine)
        yield from _processes(report.processes)
        yield _gauge("catalogue_tools", "Tools in the catalogue.", report.catalogue.tools)


def _seconds(latencies: Mapping[str, Latencies]) -> Metric:
    family = HistogramMetricFamily(
        f"{PREFIX}_call_seconds", "Time from a call's arrival to its end.", labels=["status"]
    )
    for status, held in latencies.items():
        bounds = [*map(str, BUCKETS_S), "+Inf"]
        family.add_metric([status], list(zip(bounds, accumulate(held.buckets), strict=True)), held.sum_s)
    return family


def _processes(processes: Iterable[ProcessReport]) -> Iterable[Metric]:
    restarts = CounterMetricFamily(
        f"{PREFIX}_restarts", "Times a process was started again.", labels=["process"]
    )
    up = GaugeMetricFamily(f"{PREFIX}_process_up", "1 where the process serves.", labels=["process"])
    for process in processes:
        restarts.add_metric([process.name], process.restarts)
        up.add_metric([process.name], float(process.serves))
    yield restarts
    yield up


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
