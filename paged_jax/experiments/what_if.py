"""What a recorded run would have been under other settings: the same requests on a modelled clock."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from paged_jax.config import EngineConfig
from paged_jax.engine.clock import VirtualClock
from paged_jax.engine.recorder import Event, Sink
from paged_jax.engine.request import Request
from paged_jax.engine.trace_file import TraceFile
from paged_jax.execution.plan import SchedulerOutput
from paged_jax.experiments.config import read_overrides
from paged_jax.experiments.no_device import check_has_effect
from paged_jax.experiments.replay import SILENT_SECONDS
from paged_jax.experiments.replay_engine import Handle, RecordedExecutor, ReplayEngine, replay_config
from paged_jax.experiments.totals import Totals, totals_table
from paged_jax.experiments.trace import RecordedPrompt, Trace, counted


class _Tee:
    """Hands events to several sinks."""

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = sinks

    def write(self, event: Event) -> None:
        for sink in self._sinks:
            sink.write(event)

    def flush(self, *, idle: bool) -> None:
        for sink in self._sinks:
            sink.flush(idle=idle)


class _Executor(RecordedExecutor):
    """Every step takes the same time."""

    def __init__(self, trace: Trace, config: EngineConfig) -> None:
        super().__init__(trace, config)
        self.seconds_per_step = trace.median_step_seconds
        self.num_cut = 0
        """Requests that ended because nobody knows how they go on."""

    def submit(self, plan: SchedulerOutput) -> Handle:
        return Handle(self.answers(plan, seconds=self.seconds_per_step))

    def lacking(self, request: Request) -> None:
        prompt, _ = self.recorded[request]
        if prompt.has_ended and not prompt.was_aborted:
            raise ValueError(
                f"request {request.request_id!r} goes on after its {request.num_output_tokens} recorded tokens under "
                "these settings, and nobody knows how: leave max_model_len and num_blocks as they were recorded"
            )
        self.num_cut += 1
        self.engine.abort(request.request_id)


def what_if(trace: Trace, overrides: Sequence[str], output: str | None = None, *, show_progress: bool = True) -> str:
    """Serve the recorded requests under other settings; returns totals beside those under the recorded settings.

    `overrides` are `key=value`: a field of EngineConfig and a YAML value. A request generates what was recorded,
    whatever the policy. Every step takes the median time of a recorded one, since programs may have been compiled in
    some: times are those of a model, for both columns, and decisions are the engine's own. Requests that were aborted,
    or had not ended, end when their recorded tokens do, or when they were aborted. Policies that are told true lengths
    get the recorded ones. `output` records the run. Raises ValueError, one sentence, for settings that cannot work.
    """
    changes = _changes(trace, overrides)
    replayed, executor = _serve(trace, changes, output, show_progress)
    recorded, _ = _serve(trace, {}, None, show_progress)
    settings = ", ".join(f"{key}={value}" for key, value in changes.items())
    table = totals_table(
        f"{counted(len(trace.prompts), 'request')}, replayed with {settings}",
        {"as recorded": recorded, "replayed": replayed},
    )
    notes = [f"every step of the replay takes {executor.seconds_per_step:.6g} s, the median of those recorded"]
    if executor.num_cut:
        were = "was" if executor.num_cut == 1 else "were"
        notes.append(f"{counted(executor.num_cut, 'request')} {were} cut off where what was recorded ends")
    if replayed.values()["tokens sampled"] < recorded.values()["tokens sampled"]:
        notes.append("the KV cache is too small for some requests with these settings: they end early, less is done")
    names = {prompt.arrival["id"] for prompt in trace.prompts}
    if len(names) < len(trace.prompts):
        notes.append("where a request id was used again, the replay calls the request id#2, id#3 and so on")
    notes += [trace.note] * bool(trace.note)
    return f"{table.terminal()}\n" + "".join(f"note: {note}\n" for note in notes)


def _serve(trace: Trace, changes: dict[str, Any], output: str | None, show_progress: bool) -> tuple[Totals, _Executor]:
    """The totals of the recorded requests under these settings, on a modelled clock."""
    config, clock = replay_config(trace, changes), VirtualClock()
    executor = _Executor(trace, config)
    engine = ReplayEngine(trace, config, executor, clock)
    totals = Totals()
    file = TraceFile(output) if output is not None else None
    bar = tqdm(
        total=len(trace.prompts), desc="what if", unit=" requests", delay=SILENT_SECONDS, leave=False,
        disable=not show_progress,
    )  # fmt: skip
    engine.record(totals if file is None else _Tee(totals, file))
    try:
        with bar, closing(file) if file is not None else nullcontext():
            _run(trace, engine, clock, bar)
    except BaseException:
        if output is not None:
            Path(output).unlink()  # half a run, which would be in the way of the next try
        raise
    return totals, executor


def _run(trace: Trace, engine: ReplayEngine, clock: VirtualClock, bar: "tqdm[None]") -> None:
    """Requests arrive, are aborted, and the prefix cache is reset, at the times that were recorded."""
    pending = deque(sorted(_inputs(trace, engine), key=lambda entry: entry[0]))
    while pending or engine.has_unfinished_requests():
        while pending and pending[0][0] <= clock.now():
            pending.popleft()[1]()
        if engine.has_unfinished_requests():
            bar.update(sum(request.is_finished and not request.sample_index for request in engine.step()))
        elif pending:
            clock.wait_until(pending[0][0])


def _inputs(trace: Trace, engine: ReplayEngine) -> Iterator[tuple[float, Callable[[], None]]]:
    """What is to be asked of the engine, and when, in the order of the recording."""
    told = engine.config.length_predictor == "oracle" or engine.config.allocator in ("reserve_pow2", "reserve_oracle")
    prompts = zip(_names(trace.prompts), map(_with_length, trace.prompts) if told else trace.prompts, strict=True)
    names: dict[str, str] = {}  # of the latest request with a recorded id, whom an abort is about
    for event in trace.events():
        match event["event"]:
            case "arrival":
                names[event["id"]], prompt = next(prompts)
                yield prompt.time, partial(engine.add, names[event["id"]], prompt, prompt.time)
            case "abort":
                yield event["t"], partial(engine.abort, names[event["id"]])
            case "reset":
                yield event["t"], engine.reset_prefix_cache


def _with_length(prompt: RecordedPrompt) -> RecordedPrompt:
    """The prompt with its true output length, which the recording knows: that of its longest sample."""
    if prompt.arrival.get("expected_output_len") is not None or not prompt.has_ended:
        return prompt
    return replace(prompt, arrival={**prompt.arrival, "expected_output_len": max(1, *map(len, prompt.answers))})


def _names(prompts: Sequence[RecordedPrompt]) -> list[str]:
    """An id for each prompt, `id#2` where `id` is used again: under other settings both may be unfinished at once."""
    recorded = [prompt.arrival["id"] for prompt in prompts]
    taken, latest = set(recorded), dict.fromkeys(recorded, 0)
    names = []
    for request_id in recorded:
        latest[request_id] += 1
        name = request_id
        while latest[request_id] > 1 and name in taken:
            name = f"{request_id}#{latest[request_id]}"
            latest[request_id] += name in taken  # somebody was called like that
        taken.add(name)
        names.append(name)
    return names


def _changes(trace: Trace, overrides: Sequence[str]) -> dict[str, Any]:
    changes = read_overrides(overrides)
    check_has_effect(changes, "a replay")
    recorded = trace.header["config"]
    if changes.get("block_size", recorded["block_size"]) != recorded["block_size"] and "num_blocks" not in changes:
        raise ValueError(
            f"block_size changes what num_blocks means ({trace.header['num_blocks']} blocks of "
            f"{recorded['block_size']} tokens were recorded): give num_blocks, too"
        )
    if changes.get("preemption_mode") in ("swap", "auto") and not (
        trace.header["num_swap_blocks"] or changes.get("num_swap_blocks")
    ):
        raise ValueError(
            f"preemption_mode {changes['preemption_mode']!r} needs host memory, and the recorded run had none: add "
            "num_swap_blocks=N"
        )
    return changes
