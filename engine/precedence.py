"""Who goes first where the step loop and other threads share an interpreter."""

from __future__ import annotations

import threading
import time

LONGEST_WAIT_S = 0.005  # about a full step of a card: by then a loop that does not wait is late itself
SPARE_S = 0.001  # that the loop has waited for the device, if others are to have time enough
GRACE_S = 0.001  # for who has waited so long: the loop has no time to spare, but needs what others bring


class Precedence:
    """Keeps other threads from taking the interpreter lock away from a step loop that is at work.

    Between two waits for the device the loop calls numpy and torch some twenty times, and each of these calls
    gives the interpreter lock away: a thread that has anything to do takes it, and keeps it for a switch
    interval. So others ask here before each piece of their work, and do it while the loop waits. Where the
    loop hardly waits, because steps are small, they would come to nothing: then all compete as ever. This
    is a courtesy, not a lock: nothing depends on it but speed, and nobody waits for long.
    """

    def __init__(self, longest_wait_s: float = LONGEST_WAIT_S, grace_s: float = GRACE_S) -> None:
        self._longest_wait_s, self._grace_s = longest_wait_s, grace_s
        self._at_work = threading.Lock()
        self._owner = 0  # ident of the loop's thread, while it is at work
        self._grace_until = 0.0

    def begin(self, waited_s: float) -> None:
        """The loop is at work, after it has waited for the device for so long. From its own thread alone, and
        not twice."""
        if waited_s >= SPARE_S:
            self._at_work.acquire()
            self._owner = threading.get_ident()

    def end(self) -> None:
        """The loop waits. Does nothing where it had no precedence."""
        if self._owner:
            self._owner = 0
            self._at_work.release()

    def give_way(self) -> None:
        """Waits until the loop does, not for long. From any thread; that of the loop never waits."""
        if not self._at_work.locked() or self._owner == threading.get_ident():
            return
        if time.monotonic() < self._grace_until:
            return
        if self._at_work.acquire(timeout=self._longest_wait_s):
            self._at_work.release()
        else:
            self._grace_until = time.monotonic() + self._grace_s
