"""`python -m mcp_discovery` is the command `mcp-discovery`."""

import sys

from mcp_discovery.cli import main

sys.exit(main())
