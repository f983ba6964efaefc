"""A batched paged-KV engine inside a byte allowance. Knows nothing of tools, MCP or HTTP."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.client import Choose, EngineClient, EngineStatus, PageCounts, Submission, Submitter
    from engine.config import EngineConfig, ModelShape
    from engine.engine import Engine, RequestHandle
    from engine.errors import (
        CanaryFailed,
        ConfigError,
        EngineError,
        EngineFault,
        LoadRefused,
        ModelError,
        Refusal,
        RefusalCode,
    )
    from engine.local import LocalClient
    from engine.memory import CPUCosts, MemoryLine, MemoryPlan, plan_memory
    from engine.request import (
        Answer,
        Cancelled,
        Constraint,
        Embed,
        Embedded,
        Failed,
        Generate,
        Generated,
        Outcome,
        Rank,
        Request,
        Score,
        Scored,
        Timing,
        Tokens,
        Usage,
    )

_HOMES = {
    "client": (
        "Choose",
        "EngineClient",
        "EngineStatus",
        "PageCounts",
        "Submission",
        "Submitter",
    ),
    "config": (
        "EngineConfig",
        "ModelShape",
    ),
    "engine": (
        "Engine",
        "RequestHandle",
    ),
    "errors": (
        "CanaryFailed",
        "ConfigError",
        "EngineError",
        "EngineFault",
        "LoadRefused",
        "ModelError",
        "Refusal",
        "RefusalCode",
    ),
    "local": ("LocalClient",),
    "memory": (
        "CPUCosts",
        "MemoryLine",
        "MemoryPlan",
        "plan_memory",
    ),
    "request": (
        "Answer",
        "Cancelled",
        "Constraint",
        "Embed",
        "Embedded",
        "Failed",
        "Generate",
        "Generated",
        "Outcome",
        "Rank",
        "Request",
        "Score",
        "Scored",
        "Timing",
        "Tokens",
        "Usage",
    ),
}
"""Module -> what it gives to the package. Imported when asked for: errors and settings need no torch."""

__all__ = [
    "Answer",
    "CPUCosts",
    "CanaryFailed",
    "Cancelled",
    "Choose",
    "ConfigError",
    "Constraint",
    "Embed",
    "Embedded",
    "Engine",
    "EngineClient",
    "EngineConfig",
    "EngineError",
    "EngineFault",
    "EngineStatus",
    "Failed",
    "Generate",
    "Generated",
    "LoadRefused",
    "LocalClient",
    "MemoryLine",
    "MemoryPlan",
    "ModelError",
    "ModelShape",
    "Outcome",
    "PageCounts",
    "Rank",
    "Refusal",
    "RefusalCode",
    "Request",
    "RequestHandle",
    "Score",
    "Scored",
    "Submission",
    "Submitter",
    "Timing",
    "Tokens",
    "Usage",
    "plan_memory",
]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"engine.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
