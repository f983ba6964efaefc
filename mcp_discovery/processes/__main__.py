"""A child of `mcp-discovery serve`. Started by it, with the number of its channel; not by people."""

from __future__ import annotations

import sys

from mcp_discovery.processes import child

sys.exit(child.main(int(sys.argv[1])))
