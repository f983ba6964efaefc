"""Recent traffic: calls a second by status, and latency quantiles, from bounded memory."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable

WINDOW_S = 60
SAMPLES = 2048


class Rates:
    """Calls that ended in the last `WINDOW_S` seconds, and the latency of the last `SAMPLES` of them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()
        self._seconds: deque[tuple[int, Counter[str]]] = deque()
        self._latencies: deque[float] = deque(maxlen=SAMPLES)

    def observe(self, status: str, seconds: float) -> None:
        """Counts a call that ended with `status` after `seconds`."""
        now = int(self._clock())
        if not self._seconds or self._seconds[-1][0] != now:
            self._seconds.append((now, Counter()))
            self._forget(now)
        self._seconds[-1][1][status] += 1
        self._latencies.append(seconds)

    def per_second(self) -> dict[str, float]:
        """Status -> calls a second, over the window or since the start where that is less."""
        now = self._clock()
        self._forget(int(now))
        total: Counter[str] = sum((counts for _, counts in self._seconds), Counter())
        span = max(1.0, min(WINDOW_S, now - self._started))
        return {status: count / span for status, count in sorted(total.items())}

    def recent_ms(self) -> list[float]:
        """The latencies of the last `SAMPLES` calls."""
        return [round(1000 * seconds, 3) for seconds in self._latencies]

    def _forget(self, now: int) -> None:
        while self._seconds and self._seconds[0][0] <= now - WINDOW_S:
            self._seconds.popleft()


def quantile(values: Iterable[float], share: float) -> float | None:
    """What `share` of the values do not exceed, None of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None
