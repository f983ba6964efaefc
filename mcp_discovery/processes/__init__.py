"""The processes of `serve`: a light parent that owns the sockets and starts again what fails.

mcp-discovery serve            the parent: settings, sockets, signals, restarts, admin pages
└── the serving process        TLS, MCP, discovery and the engine

mcp-discovery serve --frontends 2
├── the engine process         the engine behind the wire protocol
├── front-end 1                TLS, MCP and discovery; warms the engine
└── front-end 2                TLS, MCP and discovery
"""
