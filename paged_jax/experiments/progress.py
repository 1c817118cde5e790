"""A progress bar whose estimate knows that warm-ups and trials take different times."""

import time
from types import TracebackType
from typing import Self

from tqdm import tqdm


class RunProgress:
    """Counts warm-ups (load, compile, discarded run) and trials; estimates the time left from both means."""

    def __init__(self, warm_ups: int, trials: int, *, show: bool) -> None:
        self._left = {"warm-up": warm_ups, "trial": trials}
        self._seconds: dict[str, list[float]] = {"warm-up": [], "trial": []}
        self._began = time.perf_counter()
        self._bar = tqdm(
            total=warm_ups + trials,
            disable=not show,
            dynamic_ncols=True,
            bar_format="{percentage:3.0f}%|{bar:20}| {n_fmt}/{total_fmt} [{elapsed}{postfix}] {desc}",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def begin(self, what: str) -> None:
        """Say what runs now."""
        self._began = time.perf_counter()
        self.say(what)

    def say(self, what: str) -> None:
        """Change the words beside the bar."""
        self._bar.set_description_str(what, refresh=False)
        left = self.seconds_left()
        self._bar.set_postfix_str("" if left is None else f"about {tqdm.format_interval(left)} left", refresh=False)
        self._bar.refresh()

    def end(self, kind: str) -> None:
        """Count one `warm-up` or `trial` as done."""
        self._seconds[kind].append(time.perf_counter() - self._began)
        self._left[kind] -= 1
        self._bar.update()

    def seconds_left(self) -> float | None:
        """Estimate from the mean of what is done; None until each kind of work left has been seen once."""
        total = 0.0
        for kind, left in self._left.items():
            seen = self._seconds[kind]
            if left and not seen:
                return None
            total += left * sum(seen) / len(seen) if left else 0.0
        return total
