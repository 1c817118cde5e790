"""Runs a recorded run again, without its model, and compares every event."""

import json
from dataclasses import dataclass

from tqdm import tqdm

from paged_jax.engine.recorder import Event
from paged_jax.engine.request import Request
from paged_jax.engine.trace_file import encode
from paged_jax.execution.plan import SchedulerOutput
from paged_jax.experiments.replay_engine import Handle, RecordedExecutor, ReplayEngine, replay_config
from paged_jax.experiments.trace import INPUTS, Trace, counted

SILENT_SECONDS = 2.0
"""Shorter replays show no progress."""


@dataclass(frozen=True)
class ReplayOutcome:
    """What came of a replay."""

    reproduced: bool
    text: str
    """A sentence, or the first event that differs, with newlines."""


class _DifferenceError(Exception):
    """The replay decides otherwise than line `index + 1`; `got` is None when it does nothing."""

    def __init__(self, index: int, got: Event | None) -> None:
        super().__init__(index, got)
        self.index = index
        self.got = got


class _EndOfTraceError(Exception):
    """Nothing is recorded that the replay could be compared with: why."""


class _RetractedError(Exception):
    """A step's result was lost in the recorded run."""


class _RecordedClock:
    """Says what the recorded clock said."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def advance(self, seconds: float) -> None:
        """Do nothing: the time of a result is recorded."""

    def wait_until(self, time_: float) -> None:
        """Do nothing: nobody waits."""


class _Comparison:
    """A sink of events that raises at the first one that was recorded otherwise."""

    def __init__(self, trace: Trace, bar: "tqdm[None]") -> None:
        self.position = 1
        """Of the next line."""
        self.num_steps = 0
        self._trace = trace
        self._bar = bar
        self._is_over = False
        self._is_booking = False  # a step's result is there

    def write(self, event: Event) -> None:
        if event["event"] == "header" or self._is_over:
            return
        trace, position = self._trace, self.position
        if position == len(trace):
            raise self.end()
        text = encode(event)
        if text != trace.lines[position] and json.loads(text) != trace.event(position):
            raise self.differs(event)
        self.position += 1
        self.num_steps += event["event"] == "step"
        self._is_booking = event["event"] != "step" and (self._is_booking or event["event"] == "result")
        self._bar.update()

    def flush(self, *, idle: bool) -> None:
        """Nothing is kept back."""

    def end(self) -> Exception:
        """What to raise now that there are no more lines; what the engine says of that does not count."""
        self._is_over = True
        return _EndOfTraceError(f"the recording ends in the middle of step {self.num_steps}")

    def differs(self, got: Event | None, index: int | None = None) -> Exception:
        """What to raise now that the next line, or that of `index`, is not what the replay does."""
        self._is_over = True
        index = self.position if index is None else index
        if self._is_booking and self._trace.event(index)["event"] == "retract":
            left = len(self._trace) - index
            return _EndOfTraceError(
                f"step {self.num_steps} was interrupted while its tokens were booked: "
                f"{counted(left, 'event')} {'is' if left == 1 else 'are'} not replayed"
            )
        return _DifferenceError(index, got)


class _Executor(RecordedExecutor):
    """Gives results at the recorded times; what came in between arrives in between."""

    def __init__(self, trace: Trace, comparison: _Comparison, clock: _RecordedClock) -> None:
        super().__init__(trace, replay_config(trace, {}))
        self._trace = trace
        self._comparison = comparison
        self._clock = clock
        self._prompts = iter(trace.prompts)

    def submit(self, plan: SchedulerOutput) -> Handle:
        event = self._next()
        while event["event"] in INPUTS:
            self.apply(event)
            event = self._next()
        if event["event"] == "retract":
            raise _RetractedError
        if event["event"] != "result":
            raise self._comparison.differs({"event": "result"})
        self._clock.time = event["t"]
        return Handle(self.answers(plan, padded=event.get("padded", 0)))

    def lacking(self, request: Request) -> None:
        comparison, trace = self._comparison, self._trace
        rest = range(comparison.position, len(trace))
        after = next((index for index in rest if trace.event(index)["event"] not in ("result", "token")), None)
        if after is None:
            raise comparison.end()
        name = [request.request_id, request.sample_index] if request.sample_index else request.request_id
        raise comparison.differs({"event": "token", "id": name, "n": request.num_output_tokens}, after)

    def apply(self, event: Event) -> None:
        """Ask of the engine what was asked of the recorded one."""
        engine, before = self.engine, self._comparison.position
        self._clock.time = event["t"]
        match event["event"]:
            case "arrival":
                engine.add(event["id"], next(self._prompts), event.get("arrival_time", 0.0))
            case "abort":
                engine.abort(event["id"])
            case "reset":
                engine.reset_prefix_cache()
            case "weights":
                engine.update_weights(None)
        if self._comparison.position == before:
            raise self._comparison.differs(None)

    def _next(self) -> Event:
        if self._comparison.position == len(self._trace):
            raise self._comparison.end()
        return self._trace.event(self._comparison.position)


def replay(trace: Trace, *, show_progress: bool = True) -> ReplayOutcome:
    """Run a recorded run again with its own settings.

    Raises ValueError when the recording is damaged so that it cannot be run.
    """
    with tqdm(
        total=len(trace) - 1,
        desc="replay",
        unit=" events",
        delay=SILENT_SECONDS,
        leave=False,
        disable=not show_progress,
    ) as bar:
        comparison, clock = _Comparison(trace, bar), _RecordedClock()
        executor = _Executor(trace, comparison, clock)
        engine = ReplayEngine(trace, replay_config(trace, {}), executor, clock)
        engine.record(comparison)
        note = trace.note
        try:
            _run(trace, comparison, executor, clock)
        except _EndOfTraceError as end:
            note = "; ".join(filter(None, [note, str(end)]))
        except _DifferenceError as differs:
            return ReplayOutcome(False, _difference(trace, comparison.num_steps, differs))
    counts = f"{counted(comparison.position - 1, 'event')}, {counted(comparison.num_steps, 'step')}"
    return ReplayOutcome(True, f"{counts}: every decision reproduced{f' ({note})' if note else ''}\n")


def _run(trace: Trace, comparison: _Comparison, executor: _Executor, clock: _RecordedClock) -> None:
    while comparison.position < len(trace):
        event = trace.event(comparison.position)
        if event["event"] in INPUTS:
            executor.apply(event)
        elif event["event"] == "step":
            clock.time = event["t"]
            try:
                executor.engine.step()
            except _RetractedError:
                continue
        else:
            raise comparison.differs(None)


def _difference(trace: Trace, step: int, differs: _DifferenceError) -> str:
    got = "nothing: the replay is done with this step" if differs.got is None else encode(differs.got)
    return (
        f"line {differs.index + 1} of {trace.path}, {f'step {step}' if step else 'before the first step'}: "
        f"the replay differs from the recording\n"
        f"  expected  {trace.lines[differs.index]}\n"
        f"  got       {got}\n"
    )
