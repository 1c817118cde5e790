"""Reads what an engine has recorded: the file, what was asked of the engine, and what came of each request."""

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from paged_jax.engine.recorder import FORMAT, Event
from paged_jax.sampling.params import BeamSearchParams, SamplingParams

INPUTS = ("arrival", "abort", "reset", "weights")
"""Events that come from outside, between steps or within one."""


@dataclass
class RecordedPrompt:
    """A request as it arrived, and what its samples or beams generated."""

    arrival: Event
    params: SamplingParams | BeamSearchParams
    answers: list[dict[int, Event]]
    """Of each sample, by the number of its output tokens before: the token event."""
    endings: list[Event | None]
    """Of each sample: the finish event, unless the recording ends before."""
    was_aborted: bool = False
    """Whether somebody ended it."""

    @property
    def time(self) -> float:
        """When it arrived, in seconds on the recorded clock."""
        return min(self.arrival["t"], self.arrival.get("arrival_time", 0.0))

    @property
    def has_ended(self) -> bool:
        """Whether the recording knows its end."""
        return None not in self.endings

    @property
    def arguments(self) -> dict[str, Any]:
        """Those of `Engine.add_request`, besides its id and the arrival time."""
        arrival = self.arrival
        return {
            "prompt": arrival["prompt"],
            "params": self.params,
            "priority": arrival.get("priority", 0),
            "user": arrival.get("user", ""),
            "cache_salt": arrival.get("cache_salt", ""),
            "expected_output_len": arrival.get("expected_output_len"),
        }


class Trace:
    """A recorded run. A last line that was torn off, by a crash for one, is left out and told in `note`.

    Raises ValueError, one sentence, for a file that is no trace, or is of another format.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            text = Path(path).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise FileNotFoundError(f"no trace at {path}: EngineConfig.trace_file records one") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read {path} as a trace: {error}") from None
        self.lines = text.split("\n")
        self.note = ""
        """What is to be said of the file, or nothing."""
        torn = self.lines.pop()
        if torn:
            self.note = f"the last line of {path} is torn, and left out"
        self.header = self._header()

    def __len__(self) -> int:
        """Number of lines, the header included."""
        return len(self.lines)

    def event(self, index: int) -> Event:
        """The event in line `index + 1`; ValueError if there is none."""
        try:
            event = json.loads(self.lines[index])
        except ValueError:
            event = None
        if not isinstance(event, dict) or "event" not in event or (index and "t" not in event):
            raise ValueError(f"line {index + 1} of {self.path} is not an event: {self.lines[index][:80]!r}")
        return event

    def events(self) -> Iterator[Event]:
        """All events after the header."""
        return map(self.event, range(1, len(self)))

    @cached_property
    def prompts(self) -> list[RecordedPrompt]:
        """All requests in order of arrival."""
        prompts: list[RecordedPrompt] = []
        latest: dict[str, RecordedPrompt] = {}
        for index in range(1, len(self)):
            event = self.event(index)
            kind = event["event"]
            try:
                if kind == "arrival":
                    latest[event["id"]] = prompt = _prompt(event)
                    prompts.append(prompt)
                elif kind == "abort":
                    latest[event["id"]].was_aborted = True
                elif kind in ("token", "finish"):
                    name, sample = sample_of(event["id"])
                    if kind == "token":
                        latest[name].answers[sample][event.get("n", 0)] = event
                    else:
                        latest[name].endings[sample] = event
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise ValueError(
                    f"line {index + 1} of {self.path} makes no sense after the lines before it ({error!r}): "
                    f"{self.lines[index][:80]!r}"
                ) from None
        return prompts

    @cached_property
    def median_step_seconds(self) -> float:
        """Median seconds from a step's beginning to its result, whatever some spent compiling; 0 without steps."""
        seconds: list[float] = []
        start = 0.0
        for event in self.events():
            if event["event"] == "step":
                start = event["t"]
            elif event["event"] == "result":
                seconds.append(event["t"] - start)
        return statistics.median(seconds) if seconds else 0.0

    def _header(self) -> Event:
        what = f"{self.path} is not a trace of paged-jax"
        try:
            header = self.event(0)
        except (ValueError, IndexError):
            raise ValueError(f"{what}: its first line is no header") from None
        if header["event"] != "header" or "format" not in header:
            raise ValueError(f"{what}: its first line is no header")
        if header["format"] != FORMAT:
            raise ValueError(
                f"{self.path} has trace format {header['format']!r} (of paged-jax {header.get('paged_jax')}), and this "
                f"version reads format {FORMAT}: record it again"
            )
        return header


def sample_of(name: str | list[Any]) -> tuple[str, int]:
    """Request id and sample index of a recorded name."""
    return (name, 0) if isinstance(name, str) else (name[0], name[1])


def shown(name: str | list[Any]) -> str:
    """A recorded name for people: `id`, or `id/2` for a sample or beam."""
    return name if isinstance(name, str) else f"{name[0]}/{name[1]}"


def counted(count: int, noun: str) -> str:
    """`1 request`, `2 requests`."""
    return f"{count} {noun}{'s' * (count != 1)}"


def _prompt(arrival: Event) -> RecordedPrompt:
    params: SamplingParams | BeamSearchParams
    if "beams" in arrival:
        params = BeamSearchParams(**arrival["beams"])
        width = params.beam_width
    else:
        params = SamplingParams(**arrival["params"])
        width = params.n
    return RecordedPrompt(arrival, params, [{} for _ in range(width)], [None] * width)
