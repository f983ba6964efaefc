"""The processes of `serve`: a light parent that owns the sockets and starts again what fails.

mcp-discovery serve            the parent: settings, sockets, signals, restarts
└── a serving process          TLS, MCP, discovery and the engine
"""
