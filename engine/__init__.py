"""A batched paged-KV engine inside a byte allowance. Knows nothing of tools, MCP or HTTP."""
