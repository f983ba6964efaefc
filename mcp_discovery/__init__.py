"""An MCP server that tells an agent which of its tools it needs now."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcp_discovery.transport.app import create_app

__version__ = "0.1.0"
__all__ = ["__version__", "create_app"]


def __getattr__(name: str) -> Any:
    # Late, so that the command line answers `--help` without importing the MCP SDK.
    if name == "create_app":
        from mcp_discovery.transport.app import create_app

        return create_app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
