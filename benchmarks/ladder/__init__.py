"""The load ladder: TLS clients in several processes, rung by rung, until a condition stops it."""
