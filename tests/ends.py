"""The end of a process that is not this one's child, waited for without polling."""

from __future__ import annotations

import os
import select

WAIT_S = 30.0


def is_gone(pid: int) -> bool:
    """Waits until the process has ended; False where it has not after `WAIT_S`. Linux only."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], WAIT_S)[0])
    finally:
        os.close(handle)
