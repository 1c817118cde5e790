"""Time as the engine sees it: the wall's, or a virtual one that only moves when told to."""

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since the clock was made. Executors that model time move it with `advance`."""

    def now(self) -> float:
        """Seconds since the clock was made."""
        ...

    def advance(self, seconds: float) -> None:
        """Account for modelled work; a wall clock ignores it, since real work takes its own time."""
        ...

    def wait_until(self, time_: float) -> None:
        """Return once `now()` is at least `time_`."""
        ...


class WallClock:
    """Real time."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def now(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self._start

    def advance(self, seconds: float) -> None:
        """Do nothing: real work has already taken its time."""

    def wait_until(self, time_: float) -> None:
        """Sleep until then."""
        time.sleep(max(0.0, time_ - self.now()))


class VirtualClock:
    """Time that only moves when told to: deterministic, and as fast as the host can step."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        """Seconds of virtual time."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        self._now += seconds

    def wait_until(self, time_: float) -> None:
        """Jump there, never back."""
        self._now = max(self._now, time_)
