"""`mcp-discovery serve` whose children are started by a command of ours.

    python -m tests.faults.serve MODULE ARGUMENT...

Settings come from the environment; the children are `python -m MODULE ARGUMENT... CHANNEL`.
"""

from __future__ import annotations

import sys
from functools import partial

from mcp_discovery.cli import main
from mcp_discovery.commands import serve
from mcp_discovery.processes.supervisor import Supervisor

if __name__ == "__main__":
    command = [sys.executable, "-m", *sys.argv[1:]]
    vars(serve).update(Supervisor=partial(Supervisor, command=command))
    sys.exit(main(["serve"]))
