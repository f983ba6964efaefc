"""A deterministic simulation of overload: the engine's own core, pages and scheduler on a virtual clock.

    python -m benchmarks.simulation --seeds 0-9 --requests 1000000 --processes 10 --out FILE

Nothing is computed and nothing waits, so that a million requests pass in minutes. `traffic` says
who asks for what, `simulator` drives the core as the engine's thread does, `checks` holds what must be true
after every event. A seed gives the same run every time, down to the hash of its events.
"""
