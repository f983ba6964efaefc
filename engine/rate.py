"""How long work takes, by what steps took: the measured rate behind deadlines and retry times."""

from __future__ import annotations

_KEEP = 0.98  # weight of the past at each step: about the last 50 steps count
_SURPRISE = 8.0  # times what was expected, a step counts at most: more is a process that was stopped


class StepTimes:
    """Fits seconds = fixed + tokens * each to the steps seen, the latest counting most.

    A step of few tokens costs nearly as much as one of many where launches or weights bound it, so
    tokens per second alone would take a lone decoding sequence for a slow engine.
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._fixed, self._each = 0.0, 0.0

    def observe(self, tokens: int, seconds: float, *, alone: bool = False) -> None:
        """A step of `tokens` new tokens kept the device busy for `seconds`: for no longer where nothing was
        in flight when it was launched (`alone`)."""
        if alone and self._is_disproved(tokens, seconds):
            self._forget()
        expected = self.seconds(tokens, 1)
        if expected > 0.0:
            seconds = min(seconds, _SURPRISE * expected)
        self._n = self._n * _KEEP + 1.0
        self._x = self._x * _KEEP + tokens
        self._y = self._y * _KEEP + seconds
        self._xx = self._xx * _KEEP + tokens * tokens
        self._xy = self._xy * _KEEP + tokens * seconds
        self._fixed, self._each = self._line()

    def _is_disproved(self, tokens: int, seconds: float) -> bool:
        """Whether the steps seen were those of a process that was stopped: a mean one, which by this step
        takes `seconds` * max(1, mean tokens / `tokens`) at most, took many times that."""
        most = seconds * max(self._n, self._x / max(tokens, 1))  # of as many mean steps
        return most * _SURPRISE < self._y

    @property
    def known(self) -> bool:
        return self._n > 0.0

    @property
    def tokens_per_s(self) -> float:
        """Over busy time; 0.0 before the first step."""
        return self._x / self._y if self._y > 0.0 else 0.0

    def seconds(self, tokens: float, steps: float) -> float:
        """Device time of `tokens` new tokens in `steps` steps; 0.0 before the first step."""
        return self._fixed * steps + self._each * tokens

    def _line(self) -> tuple[float, float]:
        """(fixed, each), neither negative: least squares, through the mean where it has no say."""
        spread = self._n * self._xx - self._x * self._x
        if spread > 1e-9 * self._n * self._xx:
            each = (self._n * self._xy - self._x * self._y) / spread
            fixed = (self._y - each * self._x) / self._n
            if each >= 0.0 and fixed >= 0.0:
                return fixed, each
            if each < 0.0:
                return self._y / self._n, 0.0
        return 0.0, self._y / self._x
