"""What happened to each request when: a Gantt chart from recorded events."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from paged_jax.engine.recorder import Event
from paged_jax.experiments.trace import shown

Activity = Literal["waiting", "prefill", "decode", "idle", "preempted", "swapped"]
_LOOKS: Mapping[Activity, tuple[str, str, float]] = {
    "waiting": ("white", "", 0.25),
    "prefill": ("#D55E00", "", 0.8),
    "decode": ("#56B4E9", "", 0.8),
    "idle": ("white", "xxxx", 0.8),
    "preempted": ("white", "....", 0.4),
    "swapped": ("0.8", "----", 0.4),
}
"""Colour, hatch and height of each bar: dark, light, hatched and thin, so that print tells them apart."""


class EventList:
    """Keeps a run's events in memory: give it to `Engine.record` before the run."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def write(self, event: Event) -> None:
        """Keep the event."""
        self.events.append(event)

    def flush(self, *, idle: bool) -> None:
        """Nothing is buffered."""


class Span(NamedTuple):
    """A stretch of time in which a request, or one of its samples, did one thing."""

    request: str
    """`id`, or `id/2` for a sample or beam."""
    slot: int | None
    """Its row of the batch; None while it waits."""
    activity: Activity
    """`idle`: its row of a static batch computes for nothing; `preempted`, `swapped`: it waits again, its keys and
    values lost or in host memory."""
    start: float
    """Seconds on the engine's clock."""
    end: float


def spans_of(events: Iterable[Event]) -> list[Span]:
    """Every request's activities in order of time, from the events of a recorded run.

    A running request that a step leaves out, for want of budget, waits meanwhile. A static batch's rows that have ended
    are idle. Activities of one kind that follow each other are one span.
    """
    spans: list[Span] = []
    last: dict[str, int] = {}  # request -> its latest span
    slots: dict[str, int | None] = {}
    waits: dict[str, Activity] = {}  # who is in the queue or held up, and why
    answered: set[str] = set()
    start, plan = 0.0, {}

    def add(request: str, slot: int | None, activity: Activity, begin: float, end: float) -> None:
        index = last.get(request)
        if index is not None:
            before = spans[index]
            if before.end == begin and (before.activity, before.slot) == (activity, slot):
                spans[index] = before._replace(end=end)
                return
        last[request] = len(spans)
        spans.append(Span(request, slot, activity, begin, end))

    def fill(request: str, end: float) -> None:
        """What it did since its last span, if that ended earlier: it waited."""
        before = spans[last[request]]
        if end > before.end:
            activity = waits.get(request, "waiting")
            add(request, before.slot if activity == "waiting" else None, activity, before.end, end)

    def ran(request: str, activity: Activity, end: float) -> None:
        if request not in last:  # a sample begins where its prompt ends
            last[request] = len(spans)
            spans.append(Span(request, slots[request], activity, start, start))
        fill(request, start)
        waits.pop(request, None)
        add(request, slots[request], activity, start, end)

    for event in events:
        kind = event["event"]
        if kind == "arrival":
            request = shown(event["id"])
            arrived = event.get("arrival_time", 0.0)
            slots[request] = None
            last[request] = len(spans)
            spans.append(Span(request, None, "waiting", arrived, arrived))
        elif kind == "step":
            start = event["t"]
        elif kind in ("preempt", "wait"):
            request = shown(event["id"])
            fill(request, start)
            waits[request] = "swapped" if event.get("how") == "swap" else "preempted"
            slots[request] = None
        elif kind == "schedule":
            plan = event
            slots |= {shown(name): slot for name, slot in event.get("admitted", ())}
        elif kind == "result":
            activities: tuple[tuple[str, Activity], ...] = (("decodes", "decode"), ("idle", "idle"))
            for field, activity in activities:
                for name in plan.get(field, ()):
                    ran(shown(name), activity, event["t"])
            for name, _, count in plan.get("chunks", ()):
                # whoever comes back from host memory goes on with one token
                goes_on = count == 1 and shown(name) in answered
                ran(shown(name), "decode" if goes_on else "prefill", event["t"])
        elif kind == "token":
            answered.add(shown(event["id"]))
    return [span for span in spans if span.end > span.start]


def draw_timeline(
    spans: Sequence[Span], ax: Axes, *, by: Literal["request", "slot"] = "request", end: float | None = None
) -> None:
    """A row for each request in order of arrival, or for each slot of the batch, and time to the right.

    By slot, a request's name stands in its row, and what waits is left out. `end` is the right end of the axis, in
    seconds, to compare runs of different length.
    """
    shown_spans = [span for span in spans if by == "request" or span.slot is not None]
    rows: list[Any] = list(dict.fromkeys(s.request if by == "request" else s.slot for s in shown_spans))
    if by == "slot":
        rows.sort()
    for span in shown_spans:
        row = rows.index(span.request if by == "request" else span.slot)
        colour, hatch, height = _LOOKS[span.activity]
        ax.barh(
            row,
            span.end - span.start,
            left=span.start,
            height=height,
            color=colour,
            hatch=hatch,
            edgecolor="black",
            linewidth=0.5,
        )
    if by == "slot":
        _name_tenants(shown_spans, rows, ax)
    ax.set_yticks(range(len(rows)), [str(row) for row in rows])
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_xlim(0, end or max(span.end for span in spans))
    ax.set_xlabel("time (s)")
    ax.set_ylabel(by)
    ax.grid(False, axis="y")


def _name_tenants(spans: Sequence[Span], rows: Sequence[Any], ax: Axes) -> None:
    """Who has the slot, at the beginning of each stay."""
    seen: dict[Any, str] = {}
    for span in spans:
        if seen.get(span.slot) != span.request:
            seen[span.slot] = span.request
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
            ax.text(span.start, rows.index(span.slot), span.request, fontsize=5.5, va="center", bbox=box)


def activity_legend(spans: Iterable[Span]) -> list[Patch]:
    """Handles for a legend of the activities that occur."""
    present = {span.activity for span in spans}
    return [
        Patch(facecolor=colour, hatch=hatch, edgecolor="black", linewidth=0.5, label=activity)
        for activity in get_args(Activity)
        if activity in present
        for colour, hatch, _ in (_LOOKS[activity],)
    ]


def seconds_by_activity(spans: Iterable[Span]) -> dict[str, float]:
    """Request-seconds of each activity."""
    totals: dict[str, float] = {}
    for span in spans:
        totals[span.activity] = totals.get(span.activity, 0.0) + span.end - span.start
    return totals
