"""A CPU server over TLS under more load than it can carry: what is answered, refused, lost and counted."""
