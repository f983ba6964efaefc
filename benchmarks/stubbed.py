"""`mcp-discovery serve` with an engine process that answers at once: what is left is everything else.

    python -m benchmarks.stubbed                 the server, by the environment's settings
    python -m benchmarks.stubbed child CHANNEL   one of its children; started by it

The front-ends and the wire are the real ones, and there is an engine process even for one front-end.
"""

from __future__ import annotations

import sys
from functools import partial

import uvloop

from benchmarks.wire import FACTS, StubEngine
from engine.wire import WireServer
from mcp_discovery.cli import main
from mcp_discovery.commands import serve
from mcp_discovery.observe.status import EngineReport
from mcp_discovery.processes import child
from mcp_discovery.processes.assignment import Assignment
from mcp_discovery.processes.child import Parent, stop_on_signals
from mcp_discovery.processes.layout import apart
from mcp_discovery.processes.overview import child_report
from mcp_discovery.processes.supervisor import Supervisor


def run(assignment: Assignment, parent: Parent) -> int:
    """The engine process: a stub behind the real wire."""
    uvloop.run(_serve(assignment, parent))
    return 0


async def _serve(assignment: Assignment, parent: Parent) -> None:
    assert assignment.engine_socket is not None
    stop, server, stub = stop_on_signals(), WireServer(), StubEngine()
    parent.listen(lambda: child_report(None, EngineReport(stub.status(), "a stub")))
    await server.start(assignment.engine_socket)
    server.open(stub, FACTS)
    parent.tell_ready()
    await stop.wait()
    await server.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child.MODULES["engine"] = "benchmarks.stubbed"
        sys.exit(child.main(int(sys.argv[2])))
    command = [sys.executable, "-m", "benchmarks.stubbed", "child"]
    vars(serve).update(Supervisor=partial(Supervisor, command=command), layout=apart)
    sys.exit(main(["serve"]))
