"""One entry of a tool list: a valid tool, or the sentence that says why it is none."""

from __future__ import annotations

from mcp_discovery.discovery.catalogue import Found, Problem, Tool
from mcp_discovery.discovery.validate import unacceptable


def checked(entry: object, server: str | None, where: str) -> Found | Problem:
    """The tool that `entry` defines. `server` None: the entry itself names it, in `server`.

    The definition stays the entry's own object where it can, so that it leaves as it came.
    """
    if isinstance(entry, ValueError):
        return Problem(where, f"not JSON: {entry}.")
    if not isinstance(entry, dict):
        return Problem(where, "a tool must be an object.")
    definition = entry
    if server is None:
        definition = {key: value for key, value in entry.items() if key != "server"}
        server = entry.get("server")
    tool = Tool(server=server, name=entry.get("name"), definition=definition)  # type: ignore[arg-type]
    reason = unacceptable(tool)
    if reason is None:
        return Found(tool, where)
    known = f" (tool {tool.name!r:.80})" if isinstance(tool.name, str) and tool.name else ""
    return Problem(where, reason.removesuffix(".") + f"{known}.")
