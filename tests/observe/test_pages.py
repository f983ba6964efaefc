"""The admin listener: metrics that parse, a page that shows the report, JSON of the documented form."""

from __future__ import annotations

import logging
import time
from html.parser import HTMLParser
from io import StringIO

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from engine.client import EngineStatus, PageCounts
from mcp_discovery.discovery.catalogue import ServerState
from mcp_discovery.observe.admin import create_admin_app
from mcp_discovery.observe.counts import Counts
from mcp_discovery.observe.ledger import Ledger
from mcp_discovery.observe.log import OneLine
from mcp_discovery.observe.rates import Rates, quantile
from mcp_discovery.observe.status import CatalogueReport, PlanLine, ProcessReport, StatusReport, page

ENGINE = EngineStatus(
    ready=True,
    draining=False,
    reason="",
    pages=PageCounts(free=70, held=10, cached=20, total=100),
    waiting=3,
    waiting_tokens=400,
    running=2,
    steps=1234,
    tokens_per_s=567.0,
    kernels="torch cpu float32",
)
COUNTS = Counts(received=10, answered=5, no_match=1, refused={"queue_full": 2}, cancelled=1, in_flight=1)

LEDGER = Ledger()
LEDGER.begin()
LEDGER.end("matched", "", 0.2)


def states() -> tuple[ServerState, ...]:
    """As of now, since the page shows ages."""
    now = time.time()
    return (
        ServerState("github", "mcp.json", "listed", 30, now - 3700),
        ServerState("lost", "mcp.json", "missing", 0, None, "it <ended>"),
        ServerState("time", "mcp.json", "stale", 2, now - 61, "it did not answer in time"),
    )


def report(not_ready: str = "", revision: str = "abc123") -> StatusReport:
    return StatusReport(
        version="0.1.0",
        uptime_s=3725,
        not_ready=not_ready,
        model="SmolLM2",
        canary="passed",
        warm_up="12 of 32 tools",
        is_warm=False,
        counts=COUNTS,
        engine=ENGINE,
        catalogue=CatalogueReport(
            revision,
            "2026-01-01",
            {"github": 30, "time": 2},
            missing=("lost",),
            states=states(),
            listing_tokens=10_000,
            answers=4,
            answer_tokens=1_000,
        ),
        plan=(PlanLine("weights", 3 << 20, "the model"), PlanLine("pages", 1 << 20, "100 x 16 tokens")),
        rates={"matched": 12.5},
        p50_ms=41.0,
        p99_ms=250.0,
        processes=(
            ProcessReport("the engine process", 41, serves=True),
            ProcessReport("front-end 1", None, serves=False, restarts=2, last_failure="ended by SIGKILL"),
        ),
        latencies=LEDGER.latencies(),
    )


def client(now: StatusReport, hosts: tuple[str, ...] = ("*",)) -> TestClient:
    async def asked() -> StatusReport:
        return now

    return TestClient(create_admin_app(asked, hosts))


class Cells(HTMLParser):
    """The table rows of a page, and every tag's attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[str, str] = {}
        self.links: list[str] = []
        self._tag, self._name = "", ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        if self._tag == "th":
            self._name = data
        elif self._tag == "td":
            self.rows[self._name] = data

    def handle_endtag(self, tag: str) -> None:
        self._tag = ""


def test_the_page_shows_the_report_and_loads_nothing() -> None:
    cells = Cells()
    html = page(report())
    cells.feed(html)
    assert cells.rows["answered"] == "5"
    assert cells.rows["warm-up"] == "12 of 32 tools"
    assert cells.rows["refused: queue_full"] == "2"
    assert cells.rows["pages free / held / cached"] == "70 / 10 / 20 of 100"
    assert cells.rows["total"] == "4.0 MiB"
    assert cells.rows["tools"] == "32 of 2 servers"
    assert cells.rows["lost"] == "missing, 0: it <ended>"
    assert cells.rows["the engine process"] == "process 41, serves"
    again = "started again 2 times, the last time because: ended by SIGKILL"
    assert cells.rows["front-end 1"] == f"does not serve; {again}"
    assert cells.rows["recent latency, p50 / p99"] == "41 / 250 ms"
    assert cells.links == []
    assert "<script" not in html
    assert 'http-equiv="refresh"' in html


def test_the_page_says_why_it_is_not_ready_and_escapes_what_it_shows() -> None:
    html = page(report(not_ready="warming up", revision="<script>alert(1)</script>"))
    assert "not ready: warming up" in html
    assert "<script" not in html


def test_accounting_is_the_documented_object() -> None:
    shown = client(report()).get("/accounting").json()
    assert shown == {
        "received": 10,
        "answered": 5,
        "no_match": 1,
        "refused": {"queue_full": 2},
        "failed": 0,
        "cancelled": 1,
        "in_flight": 1,
        "invalid": 0,
        "pages": {"free": 70, "held": 10, "cached": 20, "total": 100},
    }


def test_metrics_parse_and_agree_with_the_ledger() -> None:
    text = client(report()).get("/metrics").text
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["mcp_discovery_calls_received_total", ()] == 10
    assert samples["mcp_discovery_calls_ended_total", (("state", "answered"),)] == 5
    assert samples["mcp_discovery_calls_ended_total", (("state", "refused"),)] == 2
    assert samples["mcp_discovery_refusals_total", (("code", "queue_full"),)] == 2
    assert samples["mcp_discovery_pages", (("state", "cached"),)] == 20
    assert samples["mcp_discovery_call_seconds_count", (("status", "matched"),)] == 1
    assert samples["mcp_discovery_call_seconds_bucket", (("le", "0.1"), ("status", "matched"))] == 0
    assert samples["mcp_discovery_call_seconds_bucket", (("le", "0.25"), ("status", "matched"))] == 1
    assert samples["mcp_discovery_call_seconds_bucket", (("le", "+Inf"), ("status", "matched"))] == 1
    assert samples["mcp_discovery_call_seconds_sum", (("status", "matched"),)] == pytest.approx(0.2)
    assert samples["mcp_discovery_catalogue_tools", ()] == 32
    assert samples["mcp_discovery_restarts_total", (("process", "front-end 1"),)] == 2
    assert samples["mcp_discovery_process_up", (("process", "front-end 1"),)] == 0
    assert samples["mcp_discovery_process_up", (("process", "the engine process"),)] == 1


def test_status_json_holds_the_same_numbers() -> None:
    shown = client(report(not_ready="draining")).get("/status.json").json()
    assert (shown["ready"], shown["not_ready"]) == (False, "draining")
    assert shown["engine"]["pages"]["held"] == 10
    assert shown["catalogue"]["tools"] == 32
    assert shown["restarts"] == 2
    assert [process["pid"] for process in shown["processes"]] == [41, None]
    assert "latencies" not in shown


def test_a_loopback_listener_answers_to_its_own_names_alone() -> None:
    reached = client(report(), hosts=("localhost", "127.0.0.1"))
    assert reached.get("/accounting", headers={"host": "localhost:9464"}).status_code == 200
    assert reached.get("/accounting", headers={"host": "evil.example.org"}).status_code == 400


def test_rates_forget_what_is_older_than_a_minute() -> None:
    now = [1000.0]
    rates = Rates(clock=lambda: now[0])
    for _ in range(120):
        rates.observe("matched", 0.1)
    now[0] += 30
    rates.observe("refused", 0.3)
    assert rates.per_second() == {"matched": pytest.approx(4.0), "refused": pytest.approx(1 / 30)}
    now[0] += 40
    assert rates.per_second() == {"refused": pytest.approx(1 / 60)}
    now[0] += 1000
    assert rates.per_second() == {}
    assert quantile(rates.recent_ms(), 0.5) == pytest.approx(100)
    assert quantile(rates.recent_ms(), 0.999) == pytest.approx(300)
    assert quantile([], 0.5) is None


def test_a_log_line_stays_one_line() -> None:
    stream = StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(OneLine())
    record = logging.LogRecord(
        "mcp_discovery.serve", logging.WARNING, "", 0, "bad\nname %s", ("x\r\ny",), None
    )
    handler.emit(record)
    line = stream.getvalue()
    assert line.count("\n") == 1
    assert line.endswith("warning serve: bad\\nname x\\r\\ny\n")


def test_the_page_shows_each_server_its_age_and_why_it_does_not_answer() -> None:
    text = page(report())
    assert "30, listed 1 h 1 min" in text
    assert "stale, 2, listed 0 h 1 min" in text
    assert "ago: it did not answer in time" in text
    assert "missing, 0: it &lt;ended&gt;" in text
    assert "10,000 tokens" in text
    assert "250 tokens on average, 97.5% less" in text
