"""A process that serves an engine on a socket, and tells of itself whenever it is asked."""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from engine.client import Submitter
from engine.wire import EngineFacts, WireServer


@contextmanager
def wire_process(serve: Callable[[Path, Connection], None]) -> Iterator[tuple[Path, Connection]]:
    """Runs `serve`, which is to end in `serve_wire`, in a process of its own; gives its socket's path, and a
    connection on which anything that is sent is answered."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "socket"
        process = context.Process(target=serve, args=(path, there), daemon=True)
        process.start()
        here.recv()
        yield path, here
        here.send("stop")
        process.join()


async def serve_wire(
    path: Path, control: Connection, engine: Submitter, facts: EngineFacts, tell: Callable[[], object]
) -> None:
    """Until `control` says stop; to all else it answers with `tell()`."""
    done = asyncio.Event()

    def answer() -> None:
        if control.recv() == "stop":
            done.set()
        else:
            control.send(tell())

    server = WireServer()
    await server.start(path)
    server.open(engine, facts)
    asyncio.get_running_loop().add_reader(control.fileno(), answer)
    control.send("ready")
    await done.wait()
    await server.close()
