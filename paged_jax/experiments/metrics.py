"""What a trial measured: from finished requests and per-step statistics to one flat dict of numbers.

Names are the field's, with the unit at the end where there is one. `METRICS` defines each of them. A metric
without data (inter-token latency when every output has one token) is NaN.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from paged_jax.engine.request import Request
from paged_jax.engine.stats import StepStats

BLOCK_TABLE_ENTRY_BYTES = 4


@dataclass(frozen=True)
class Metric:
    """What a metric's name stands for."""

    label: str
    """For axes and table headings, without the unit."""
    unit: str
    """Such as "s" or "tokens/s"; "ratio" for parts of 1, "" for a plain count."""
    definition: str

    def display(self, values: Sequence[float]) -> tuple[float, str]:
        """Factor and unit for showing these values to people: ratios as %, short times as ms."""
        if self.unit == "ratio":
            return 100.0, "%"
        seconds, slash, per = self.unit.partition("/")
        if seconds == "s" and max((abs(v) for v in values if math.isfinite(v)), default=1.0) < 1:
            return 1000.0, "ms" + slash + per
        return 1.0, self.unit


_LATENCIES = {
    "ttft_s": Metric("TTFT", "s", "first_token_time - arrival_time of each request"),
    "inter_token_latency_s": Metric(
        "inter-token latency", "s", "time between successive output tokens, all requests pooled"
    ),
    "e2e_latency_s": Metric("end-to-end latency", "s", "finished_time - arrival_time of each request"),
    "normalized_latency_s_per_token": Metric(
        "normalized latency", "s/token", "end-to-end latency / output tokens of each request"
    ),
    "queue_time_s": Metric("queue time", "s", "first_scheduled_time - arrival_time of each request"),
}
_SUMMARIES = ("mean", "p50", "p95", "p99")

KV_SHARES = ("kv_token_states", "kv_internal_fragmentation", "kv_cached", "kv_free")
"""Parts of the KV pool; they sum to 1."""

METRICS: dict[str, Metric] = {
    "wall_s": Metric("wall time", "s", "from the first arrival to the end of the last step"),
    "requests_per_s": Metric("request throughput", "requests/s", "(finished_requests + truncated_requests) / wall_s"),
    "output_tokens_per_s": Metric("output throughput", "tokens/s", "output tokens / wall_s"),
    "total_tokens_per_s": Metric("total throughput", "tokens/s", "(prompt + output tokens) / wall_s"),
    "finished_requests": Metric("finished requests", "", "requests that ended with their length reached"),
    "truncated_requests": Metric(
        "truncated requests", "", "requests that ended with fewer output tokens than the workload asked for"
    ),
    "prompt_tokens": Metric("prompt tokens", "", "sum over requests"),
    "output_tokens": Metric("output tokens", "", "sum over requests"),
    **{
        f"{name}_{summary}": Metric(f"{m.label} {summary}", m.unit, f"{summary} of {m.definition}")
        for name, m in _LATENCIES.items()
        for summary in _SUMMARIES
    },
    "kv_token_states": Metric(
        "token states",
        "ratio",
        "share of the KV pool that holds keys and values of running requests, over time",
    ),
    "kv_internal_fragmentation": Metric(
        "unused in blocks", "ratio", "share of the KV pool in blocks in use that holds nothing, over time"
    ),
    "kv_cached": Metric("prefix cache", "ratio", "share of the KV pool that only the prefix cache keeps, over time"),
    "kv_free": Metric("free", "ratio", "share of the KV pool that holds nothing, over time"),
    "internal_fragmentation": Metric(
        "internal fragmentation", "ratio", "unused slots of blocks in use / slots of blocks in use, over time"
    ),
    "peak_blocks": Metric("peak blocks in use", "blocks", "most blocks in use in a step"),
    "peak_kv_tokens": Metric("peak token states", "tokens", "most tokens held in blocks in use in a step"),
    "block_table_bytes_peak": Metric(
        "peak block-table size", "bytes", "4 * most block-table entries of running requests in a step"
    ),
    "prefix_hit_tokens": Metric("prefix-hit tokens", "tokens", "prompt tokens taken from the prefix cache"),
    "prefix_hit_rate": Metric("prefix-hit rate", "ratio", "prefix_hit_tokens / prompt_tokens"),
    "preemptions": Metric("preemptions", "", "requests preempted, counted at each preemption"),
    "mean_running_requests": Metric("running requests", "", "requests that run, over time"),
    "steps": Metric("steps", "", "engine steps"),
    "computed_tokens": Metric("computed tokens", "tokens", "tokens computed in all steps, padding excluded"),
    "padded_tokens": Metric("padded tokens", "tokens", "padding computed besides"),
    "padding_fraction": Metric("padding", "ratio", "padded_tokens / (computed_tokens + padded_tokens)"),
    "compilations": Metric("compilations", "", "programs compiled during the trial; 0 after a full warm-up"),
    "warmup_compilations": Metric("warm-up compilations", "", "programs compiled before the setting's trials"),
    "compile_s": Metric("compile time", "s", "time spent compiling before the setting's trials"),
}
"""Every metric of a trial. "Over time" is the mean over steps weighted by their duration: sum(d * x) /
sum(d), with d = end_time - start_time; time without a step, when no request is there, does not count."""


def trial_metrics(
    requests: Sequence[Request],
    steps: Sequence[StepStats],
    start_time: float,
    *,
    compilations: int,
    warmup_compilations: int,
    compile_s: float,
) -> dict[str, float]:
    """All of `METRICS` for one trial that began at `start_time` seconds on the engine's clock."""
    if not requests or not steps:
        raise ValueError("a trial without finished requests or steps has no metrics")
    wall = steps[-1].end_time - start_time
    prompt = sum(r.num_prompt_tokens for r in requests)
    output = sum(r.num_output_tokens for r in requests)
    truncated = sum(r.num_output_tokens < (r.sampling_params.max_tokens or 0) for r in requests)
    return {
        "wall_s": wall,
        "requests_per_s": len(requests) / wall,
        "output_tokens_per_s": output / wall,
        "total_tokens_per_s": (prompt + output) / wall,
        "finished_requests": len(requests) - truncated,
        "truncated_requests": truncated,
        "prompt_tokens": prompt,
        "output_tokens": output,
        **latencies(requests),
        **kv_usage(steps),
        "prefix_hit_tokens": (hits := sum(r.metrics.num_cached_tokens for r in requests)),
        "prefix_hit_rate": hits / prompt,
        **step_counts(steps),
        "compilations": compilations,
        "warmup_compilations": warmup_compilations,
        "compile_s": compile_s,
    }


def latencies(requests: Iterable[Request]) -> dict[str, float]:
    """Mean and percentiles of the five latencies, in seconds.

    Percentiles interpolate linearly between the two nearest ranks.
    """
    samples: dict[str, list[float]] = {name: [] for name in _LATENCIES}
    for request in requests:
        m = request.metrics
        if m.first_scheduled_time is not None:
            samples["queue_time_s"].append(m.first_scheduled_time - m.arrival_time)
        if m.first_token_time is None or m.finished_time is None:
            continue  # ended without a token, for example too long for the pool: it has no latency
        e2e = m.finished_time - m.arrival_time
        samples["ttft_s"].append(m.first_token_time - m.arrival_time)
        samples["inter_token_latency_s"].extend(np.diff(m.token_times).tolist())
        samples["e2e_latency_s"].append(e2e)
        samples["normalized_latency_s_per_token"].append(e2e / request.num_output_tokens)
    summaries: dict[str, float] = {}
    for name, values in samples.items():
        row = [np.mean(values), *np.percentile(values, [50, 95, 99])] if values else [math.nan] * 4
        summaries |= {f"{name}_{s}": float(v) for s, v in zip(_SUMMARIES, row, strict=True)}
    return summaries


def kv_usage(steps: Sequence[StepStats]) -> dict[str, float]:
    """Shares of the KV pool over time, and its peaks.

    With d the duration of a step and n, f, c, e its slots of token states, internal fragmentation, cached and
    free, each share is sum(d * part) / sum(d * (n + f + c + e)), and internal_fragmentation is sum(d * f) /
    sum(d * (n + f)).
    """
    duration = _durations(steps)
    parts = np.array(
        [(s.kv.token_states, s.kv.internal_fragmentation, s.kv.cached, s.kv.free) for s in steps], dtype=float
    )
    held = duration @ parts
    in_use = float(held[0] + held[1])
    shares = (held / held.sum()).tolist()
    return {
        **dict(zip(KV_SHARES, shares, strict=True)),
        "internal_fragmentation": float(held[1]) / in_use if in_use else math.nan,
        "peak_blocks": max(s.blocks_in_use for s in steps),
        "peak_kv_tokens": max(s.kv.token_states for s in steps),
        "block_table_bytes_peak": BLOCK_TABLE_ENTRY_BYTES * max(s.block_table_entries for s in steps),
    }


def step_counts(steps: Sequence[StepStats]) -> dict[str, float]:
    """Steps, tokens computed and padded, preemptions, and running requests over time."""
    duration = _durations(steps)
    computed = sum(s.num_tokens for s in steps)
    padded = sum(s.num_padded_tokens for s in steps)
    return {
        "preemptions": sum(s.num_preempted for s in steps),
        "mean_running_requests": float(duration @ [s.num_running for s in steps] / duration.sum()),
        "steps": len(steps),
        "computed_tokens": computed,
        "padded_tokens": padded,
        "padding_fraction": padded / (computed + padded),
    }


def tokens_sha256(requests: Iterable[Request]) -> str:
    """A fingerprint of every output token, independent of the order in which requests finished."""
    outputs = sorted((r.request_id, r.output_token_ids) for r in requests)
    return hashlib.sha256(json.dumps(outputs).encode()).hexdigest()


def _durations(steps: Sequence[StepStats]) -> np.ndarray:
    return np.array([s.end_time - s.start_time for s in steps])
