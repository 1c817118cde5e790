"""What a recorded run amounts to: counts, and seconds waited."""

from collections.abc import Mapping

from paged_jax.engine.recorder import Event
from paged_jax.experiments.tables import Table, number
from paged_jax.experiments.trace import shown

ROWS = {
    "steps": "",
    "tokens computed": "",
    "tokens sampled": "",
    "prompt tokens found cached": "",
    "preemptions": "",
    "blocks swapped out": "",
    "blocks swapped in": "",
    "blocks evicted": "",
    "blocks copied": "",
    "requests finished": "",
    "mean wait": "s",
    "longest wait": "s",
    "time": "s",
}
"""Names of totals, and their units. A wait is the time from arrival to first admission."""


class Totals:
    """Adds up the events of a run from step `first_step` on; a sink for a recorder, too."""

    def __init__(self, first_step: int = 0) -> None:
        self._first_step = first_step
        self._step = 0
        self._counts = dict.fromkeys(ROWS, 0.0)
        self._waits: list[float] = []
        self._arrivals: dict[str, float] = {}
        self._began: float | None = None
        self._now = 0.0

    def write(self, event: Event) -> None:
        """Count an event."""
        kind, counts = event["event"], self._counts
        if kind == "header":
            return
        self._now = event["t"]
        if kind == "arrival":
            self._arrivals[shown(event["id"])] = event.get("arrival_time", 0.0)
        if kind == "step":
            self._step = event["step"]
        if self._step < self._first_step:
            if kind == "schedule":
                self._admit(event)
            return
        if self._began is None:
            self._began = event["t"]
        match kind:
            case "schedule":
                counts["steps"] += bool(event.get("num_tokens", 0))
                counts["tokens computed"] += event.get("num_tokens", 0)
                self._waits += self._admit(event)
            case "token":
                counts["tokens sampled"] += len(event.get("tokens", "1"))  # a beam answers with candidates for one
            case "allocate":
                counts["prompt tokens found cached"] += event.get("cached", 0)
            case "preempt":
                counts["preemptions"] += 1
            case "swap":
                moved = sum(map(len, event["device_blocks"]))
                counts["blocks swapped out" if event["to"] == "host" else "blocks swapped in"] += moved
            case "evict":
                counts["blocks evicted"] += 1
            case "copy":
                counts["blocks copied"] += 1
            case "finish":
                counts["requests finished"] += 1

    def flush(self, *, idle: bool) -> None:
        """Nothing is kept back."""

    def values(self) -> dict[str, float]:
        """All totals, by name."""
        waits = self._waits or [0.0]
        seconds = 0.0 if self._began is None else self._now - self._began
        own = {"mean wait": sum(waits) / len(waits), "longest wait": max(waits), "time": seconds}
        return {**self._counts, **own}

    def _admit(self, event: Event) -> list[float]:
        """Seconds that those who are admitted for the first time have waited; samples wait with their prompt."""
        names = [shown(name) for name, *_ in event.get("admitted", ())]
        return [event["t"] - self._arrivals.pop(name) for name in names if name in self._arrivals]


def totals_table(title: str, columns: Mapping[str, Totals]) -> Table:
    """Totals side by side; of two, also their difference, second less first."""
    values = [totals.values() for totals in columns.values()]
    rows = []
    for name, unit in ROWS.items():
        cells = [number(each[name]) for each in values]
        if len(values) == 2:
            difference = values[1][name] - values[0][name]
            if abs(difference) < 1e-9 * abs(values[0][name]):  # sums of times in another order
                difference = 0.0
            cells.append(f"{'+' if difference > 0 else ''}{number(difference)}")
        rows.append((f"{name} ({unit})" if unit else name, *cells))
    headings = ("", *columns, *(["difference"] if len(values) == 2 else []))
    return Table(title, headings, ("",) * len(headings), tuple(rows))
