"""The requests of a trace: read, put on one clock, cut, drawn, and given tokens.

`trace_requests` is what a trial runs; `workload_notes` says in words what was done to the file on the way, and
`workload_fingerprint` which file it was.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from paged_jax.experiments.arrival_times import starts
from paged_jax.experiments.request_traces.azure import read_azure
from paged_jax.experiments.request_traces.burstgpt import read_burstgpt
from paged_jax.experiments.request_traces.lengths import read_lengths
from paged_jax.experiments.request_traces.mooncake import HASH_BLOCK_SIZE, read_mooncake
from paged_jax.experiments.request_traces.prompts import read_prompts
from paged_jax.experiments.request_traces.row import TraceRow
from paged_jax.experiments.request_traces.sharegpt import read_sharegpt
from paged_jax.experiments.request_traces.source import fingerprint
from paged_jax.experiments.request_traces.spec import TEXTS, TIMED, StandIn, TraceWorkload
from paged_jax.experiments.request_traces.timestamps import TimeUnit, clock_notes
from paged_jax.experiments.request_traces.token_windows import TokenWindows
from paged_jax.experiments.workload_spec import Streams

if TYPE_CHECKING:
    from paged_jax.checkpoints.tokenizer import Tokenizer


class TraceRequest(NamedTuple):
    """One request of a trial."""

    time: float | None
    """Seconds after the first; None when the workload's arrival process decides."""
    prompt_token_ids: tuple[int, ...]
    output_len: int


def trace_requests(
    spec: TraceWorkload, seed: int, vocab_size: int, tokenizer: "Tokenizer | None"
) -> list[TraceRequest]:
    """The requests of one trial by arrival time, equal times in the order of the file.

    `tokenizer` is needed by the formats of texts; `vocab_size` bounds made-up token ids, which `seed` draws, as it does
    the requests with `shuffle`. Raises ValueError, one sentence with file, line and remedy, for a file that is missing
    or not what the spec says.
    """
    streams = Streams.of(seed)
    if not _stands_in(spec) and spec.format in TEXTS:
        rows, _ = _read(spec)
        return _text_requests(spec, rows, streams, tokenizer)[0]
    rows, _ = _length_rows(spec, streams)
    origin = rows[0].time_ns or 0
    scale = spec.time_scale or 1.0
    times = [
        (row.time_ns - origin) / 1e9 * scale if spec.keeps_times and row.time_ns is not None else None for row in rows
    ]
    prompts = _prompts(rows, vocab_size, streams.contents)
    return [TraceRequest(time, prompt, row.output_len) for time, prompt, row in zip(times, prompts, rows, strict=True)]


def workload_notes(spec: Any, seed: int = 0, tokenizer: "Tokenizer | None" = None) -> list[str]:
    """What was left out of a trace's file or changed in it, or stands in for it, one sentence each; [] for other kinds.

    Of formats of texts the lengths, and so how many were left out for them, are known only with a tokenizer; they
    depend on the seed if it draws the requests.
    """
    if not isinstance(spec, TraceWorkload):
        return []
    streams = Streams.of(seed)
    if _stands_in(spec) or spec.format not in TEXTS:
        notes = _length_rows(spec, streams)[1]
    else:
        rows, notes = _read(spec)
        if tokenizer is not None:
            notes += _text_requests(spec, rows, streams, tokenizer)[1]
    if spec.format not in TIMED and spec.request_rate is None and spec.num_clients is None:
        notes.append(
            f"{spec.file}: format {spec.format!r} has no times, so all requests arrive at once: set request_rate or "
            "num_clients for another arrival process"
        )
    return notes


def workload_fingerprint(spec: Any) -> str | None:
    """SHA-256 of a trace's file, "stand-in" when that is missing and something stands in; None for other kinds."""
    if not isinstance(spec, TraceWorkload):
        return None
    return "stand-in" if _stands_in(spec) else fingerprint(Path(spec.file))


def _stands_in(spec: TraceWorkload) -> bool:
    return spec.stand_in is not None and not Path(spec.file).exists()


def _read(spec: TraceWorkload) -> tuple[list[TraceRow], list[str]]:
    """All rows in the order of the file, and notes on its clock."""
    path = Path(spec.file)
    try:
        found = path.stat()
        state = (found.st_mtime_ns, found.st_size)
    except OSError:
        state = ()  # reading will say what is wrong
    rows, notes = _read_once(path, spec.format, spec.time_unit, state)
    return list(rows), list(notes)


@lru_cache(maxsize=1)
def _read_once(
    path: Path, file_format: str, time_unit: TimeUnit | None, state: tuple[int, ...]
) -> tuple[tuple[TraceRow, ...], tuple[str, ...]]:
    """The file as it is in this `state`: the settings of a sweep do not each read it again."""
    match file_format:
        case "lengths":
            return tuple(read_lengths(path)), ()
        case "sharegpt":
            return tuple(read_sharegpt(path)), ()
        case "prompts":
            return tuple(read_prompts(path)), ()
        case "azure":
            rows = read_azure(path, time_unit)
        case "mooncake":
            rows = read_mooncake(path, time_unit)
        case _:
            rows = read_burstgpt(path, time_unit)
    times, lines = [row.time_ns or 0 for row in rows], [row.line for row in rows]
    return tuple(rows), tuple(clock_notes(times, lines, path))


def _stand_in_rows(spec: TraceWorkload, stand_in: StandIn, streams: Streams) -> tuple[list[TraceRow], list[str]]:
    count = stand_in.num_requests
    prompts, outputs = stand_in.prompt.draw(count, streams.lengths), stand_in.output.draw(count, streams.lengths)
    times = [round(start.time * 1e9) for start in starts(stand_in, count, streams.gaps)] if spec.keeps_times else []
    rows = [TraceRow(i + 1, prompts[i], outputs[i], times[i] if times else None) for i in range(count)]
    return rows, [
        f"{spec.file} is not there: {count} made-up requests stand in for it (workload.stand_in), which are not the "
        "trace: no figure of this run is one of the trace"
    ]


def _length_rows(spec: TraceWorkload, streams: Streams) -> tuple[list[TraceRow], list[str]]:
    """The rows of a trial by time, whose lengths the file or the stand-in tells, and what became of the others."""
    if spec.stand_in is not None and _stands_in(spec):
        rows, notes = _stand_in_rows(spec, spec.stand_in, streams)
    else:
        rows, notes = _read(spec)
    if rows[0].time_ns is not None:
        rows = sorted(rows, key=lambda row: row.time_ns or 0)  # a stable sort: equal times keep their order
        rows = _cut(spec, rows, notes)
    reasons = [_reason(spec, row.prompt_len, row.output_len) for row in rows]
    notes += _drop_notes(spec, Counter(reasons))
    rows = [row for row, reason in zip(rows, reasons, strict=True) if reason is None]
    if not rows:
        raise ValueError(_nothing_left(spec))
    order = _order(spec, len(rows), streams)[: spec.max_requests]
    if len(order) < len(rows):
        notes.append(f"{spec.file}: {len(order)} of {len(rows)} requests are taken (max_requests)")
    taken = [rows[i] for i in (sorted(order) if spec.keeps_times else order)]
    if spec.keeps_times and len(taken) > 1 and not _stands_in(spec):
        notes.append(_pace(spec, taken))
    return taken, notes


def _pace(spec: TraceWorkload, rows: Sequence[TraceRow]) -> str:
    """How fast requests come, which tells a wrong unit of time at a glance."""
    seconds = ((rows[-1].time_ns or 0) - (rows[0].time_ns or 0)) / 1e9 * (spec.time_scale or 1.0)
    rate = f"{len(rows) / seconds:.4g} a second" if seconds else "at one instant"
    return (
        f"{spec.file}: {len(rows)} requests in {seconds:.4g} s, {rate} (if that cannot be, set workload.time_unit or "
        "time_scale)"
    )


def _text_requests(
    spec: TraceWorkload, rows: Sequence[TraceRow], streams: Streams, tokenizer: "Tokenizer | None"
) -> tuple[list[TraceRequest], list[str]]:
    """The requests whose lengths the tokenizer tells, which reads no more of them than are asked for, and notes."""
    if tokenizer is None:
        raise ValueError(
            f"workload.format {spec.format!r} holds texts, and this model has no tokenizer to make tokens of them: use "
            "a model that has one, or format 'lengths'"
        )
    requests: list[TraceRequest] = []
    dropped: Counter[str | None] = Counter()
    for i in _order(spec, len(rows), streams):
        if len(requests) == spec.max_requests:
            break
        row = rows[i]
        prompt = tuple(tokenizer.encode(row.prompt)) if row.prompt else ()
        if spec.output is not None:
            output = spec.output.draw(1, streams.lengths)[0]
        elif row.answer is not None:
            output = len(tokenizer.encode(row.answer, add_special_tokens=False))
        else:
            raise ValueError(
                f"{spec.file}, line {row.line}: the prompt has no answer that says how long the output is: set "
                "workload.output, such as {mean: 200, sigma: 0.8, max: 1000}"
            )
        reason = _reason(spec, len(prompt), output)
        dropped[reason] += 1
        if reason is None:
            requests.append(TraceRequest(None, prompt, output))
    if not requests:
        raise ValueError(_nothing_left(spec))
    notes = _drop_notes(spec, dropped)
    if (seen := dropped.total()) < len(rows):
        notes.append(
            f"{spec.file}: {len(requests)} requests are taken, of {seen} looked at and {len(rows)} in the file"
        )
    return requests, notes


def _prompts(rows: Sequence[TraceRow], vocab_size: int, rng: np.random.Generator) -> Iterator[tuple[int, ...]]:
    """Made-up prompts of these rows: equal tokens where hash ids are equal, else nothing in common."""
    if not rows[0].hash_ids:
        windows = TokenWindows(len(rows), max(row.prompt_len for row in rows), vocab_size, rng)
        yield from (windows.window(i, row.prompt_len) for i, row in enumerate(rows))
        return
    numbers: dict[int, int] = {}
    for row in rows:
        for hash_id in row.hash_ids:
            numbers.setdefault(hash_id, len(numbers))
    windows = TokenWindows(len(numbers), HASH_BLOCK_SIZE, vocab_size, rng)
    for row in rows:
        prompt: list[int] = []
        for hash_id in row.hash_ids:
            prompt += windows.window(numbers[hash_id], min(HASH_BLOCK_SIZE, row.prompt_len - len(prompt)))
        yield tuple(prompt)


def _order(spec: TraceWorkload, count: int, streams: Streams) -> list[int]:
    return streams.structure.permutation(count).tolist() if spec.shuffle else list(range(count))


def _cut(spec: TraceWorkload, rows: list[TraceRow], notes: list[str]) -> list[TraceRow]:
    """Rows from `start_s` to before `end_s`, counted from the first."""
    if spec.start_s is None and spec.end_s is None:
        return rows
    start, end = spec.start_s or 0.0, float("inf") if spec.end_s is None else spec.end_s
    origin, last = rows[0].time_ns or 0, rows[-1].time_ns or 0
    kept = [row for row in rows if start <= ((row.time_ns or 0) - origin) / 1e9 < end]
    if not kept:
        raise ValueError(
            f"{spec.file} has no request from start_s ({start:g}) to end_s ({end:g}); its last is at "
            f"{(last - origin) / 1e9:g} s: choose other ones"
        )
    notes.append(f"{spec.file}: {len(kept)} of {len(rows)} rows lie within start_s and end_s")
    return kept


def _reason(spec: TraceWorkload, prompt_len: int, output_len: int) -> str | None:
    """Why a row is left out; None if it is not."""
    if not prompt_len or not output_len:
        return "with an empty prompt or no output"
    if spec.min_len is not None and min(prompt_len, output_len) < spec.min_len:
        return f"with fewer than min_len ({spec.min_len}) tokens of prompt or output"
    if spec.max_prompt_len is not None and prompt_len > spec.max_prompt_len:
        return f"with a prompt of more than max_prompt_len ({spec.max_prompt_len}) tokens"
    if spec.max_total_tokens is not None and prompt_len + output_len > spec.max_total_tokens:
        return f"of more than max_total_tokens ({spec.max_total_tokens}) tokens"
    return None


def _drop_notes(spec: TraceWorkload, dropped: Counter[str | None]) -> list[str]:
    total = dropped.total()
    return [
        f"{spec.file}: {count} of {total} rows {reason} {'is' if count == 1 else 'are'} left out"
        for reason, count in sorted((reason, count) for reason, count in dropped.items() if reason is not None)
    ]


def _nothing_left(spec: TraceWorkload) -> str:
    return (
        f"{spec.file} has no request with tokens of prompt and output within min_len, max_prompt_len and "
        "max_total_tokens: raise the limits, or correct workload.file"
    )
