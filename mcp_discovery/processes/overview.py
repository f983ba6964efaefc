"""All processes of a server as one report: counts added up, and whatever only one of them knows."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter

from engine.client import EngineStatus, no_engine
from mcp_discovery import __version__
from mcp_discovery.observe.counts import Counts
from mcp_discovery.observe.ledger import Latencies
from mcp_discovery.observe.rates import quantile
from mcp_discovery.observe.status import CatalogueReport, EngineReport, ServiceReport, StatusReport
from mcp_discovery.processes.member import Member, added
from mcp_discovery.processes.supervisor import Supervisor

SERVICE = TypeAdapter(ServiceReport)
ENGINE = TypeAdapter(EngineReport)


def child_report(service: ServiceReport | None, engine: EngineReport | None) -> dict[str, Any]:
    """What a child answers when it is asked, as JSON has it."""
    return {
        "service": None if service is None else SERVICE.dump_python(service, mode="json"),
        "engine": None if engine is None else ENGINE.dump_python(engine, mode="json"),
    }


class Overview:
    """Reports on the members of a supervisor."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._started = time.monotonic()

    async def report(self) -> StatusReport:
        """Asks every child; one that does not answer is told of as it last was."""
        members = self._supervisor.members
        await asyncio.gather(*(member.ask() for member in members))
        services = _parts(members, "service", SERVICE)
        engines = _parts(members, "engine", ENGINE)
        first = services[0] if services else _NOTHING
        engine = (
            engines[0] if engines else EngineReport(no_engine("the model is being loaded"), "not run yet")
        )
        not_ready = self._not_ready(services, engines)
        recent = [value for service in services for value in service.recent_ms]
        return StatusReport(
            version=__version__,
            uptime_s=time.monotonic() - self._started,
            not_ready=not_ready,
            model=first.model,
            canary=engine.canary,
            warm_up=first.warm_up,
            is_warm=bool(services) and all(service.is_warm for service in services),
            counts=sum((member.counts for member in members), Counts()),
            engine=_seen(engine.status, not_ready),
            catalogue=replace(
                first.catalogue,
                answers=sum(service.catalogue.answers for service in services),
                answer_tokens=sum(service.catalogue.answer_tokens for service in services),
            ),
            plan=engine.plan,
            rates=_rates(services),
            p50_ms=quantile(recent, 0.5),
            p99_ms=quantile(recent, 0.99),
            processes=[member.process_report() for member in members],
            latencies=_latencies(members),
        )

    def _not_ready(self, services: Sequence[ServiceReport], engines: Sequence[EngineReport]) -> str:
        if self._supervisor.is_stopping:
            return "draining"
        members = self._supervisor.members
        for member in members:
            if not member.is_running and not member.is_frontend:
                return f"{member.name} failed and is started again: {member.restarts.last_failure}"
        if not services or not engines:
            return "the model is being loaded"
        if not any(member.serves for member in members if member.answers_calls):
            return "no process that answers calls has started yet"
        return engines[0].status.reason or next((each.not_ready for each in services if each.not_ready), "")


_NOTHING = ServiceReport("", "", "not begun", False, CatalogueReport("", "", {}))


def _parts(members: Sequence[Member], part: str, adapter: TypeAdapter[Any]) -> list[Any]:
    """That part of every member's report, of members that have one."""
    found = [member.report.get(part) for member in members if member.report is not None]
    return [adapter.validate_python(value) for value in found if value is not None]


def _seen(status: EngineStatus, not_ready: str) -> EngineStatus:
    return status if not not_ready else replace(status, ready=False, reason=status.reason or not_ready)


def _rates(services: Sequence[ServiceReport]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for service in services:
        total.update(service.rates)
    return dict(sorted(total.items()))


def _latencies(members: Sequence[Member]) -> dict[str, Latencies]:
    total: dict[str, Latencies] = {}
    for member in members:
        total = added(total, member.latencies)
    return total
