"""What a trial measured: from finished requests and per-step statistics to one flat dict of numbers.

Names are the field's, with the unit at the end where there is one. `METRICS` defines each of them. A metric
without data (inter-token latency when every output has one token) is NaN. A prompt with its n samples is one request:
it begins with the first token of any sample and ends with the last sample; its output is that of all samples.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paged_jax.experiments.measurements import Served, StepTable

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
    "ttft_s": Metric("TTFT", "s", "first_token_time - arrival_time of each request, of its first sample to begin"),
    "inter_token_latency_s": Metric(
        "inter-token latency", "s", "time between successive output tokens of a sample, all samples pooled"
    ),
    "e2e_latency_s": Metric(
        "end-to-end latency",
        "s",
        "finished_time - arrival_time of each request, of its last sample to end; in a static batch all end together",
    ),
    "normalized_latency_s_per_token": Metric(
        "normalized latency", "s/token", "end-to-end latency / output tokens of each request, of its longest sample"
    ),
    "queue_time_s": Metric("queue time", "s", "first_scheduled_time - arrival_time of each request"),
}
_MODELLED = {
    "gemm_s": ("gemm", "logits", "collectives"),
    "attention_s": ("attention",),
    "swap_s": ("swaps",),
    "host_s": ("host", "launch", "block_tables"),
}
"""Metrics of a simulated device, and the parts of `StepCost` that they add up."""
SIZES = (
    "kv_page_bytes",
    "hidden_state_bytes",
    "hidden_bytes_per_token",
    "kv_projection_share",
    "page_efficiency",
    "scalar_memory_use",
)
"""Metrics of a simulated model's shape, and of its pages on the simulated device."""
_SUMMARIES = ("mean", "p50", "p95", "p99")

KV_SHARES = (
    "kv_token_states",
    "kv_reserved",
    "kv_internal_fragmentation",
    "kv_external_fragmentation",
    "kv_cached",
    "kv_free",
)
"""Parts of the KV pool; they sum to 1. With several cache groups they are shares of memory."""

METRICS: dict[str, Metric] = {
    "wall_s": Metric("wall time", "s", "from the first arrival to the end of the last step"),
    "requests_per_s": Metric("request throughput", "requests/s", "(finished_requests + truncated_requests) / wall_s"),
    "output_tokens_per_s": Metric("output throughput", "tokens/s", "output tokens / wall_s"),
    "total_tokens_per_s": Metric("total throughput", "tokens/s", "(prompt + output tokens) / wall_s"),
    "finished_requests": Metric("finished requests", "", "requests whose samples all ended with their length reached"),
    "truncated_requests": Metric(
        "truncated requests", "", "requests with a sample of fewer output tokens than the workload asked for"
    ),
    "prompt_tokens": Metric("prompt tokens", "", "sum over requests"),
    "output_tokens": Metric("output tokens", "", "sum over requests and their samples"),
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
    "kv_reserved": Metric(
        "reserved", "ratio", "share of the KV pool that is kept for tokens that will come, over time"
    ),
    "kv_internal_fragmentation": Metric(
        "unused in blocks",
        "ratio",
        "share of the KV pool in blocks in use that holds nothing and, as far as is known, never will, over time",
    ),
    "kv_external_fragmentation": Metric(
        "too scattered",
        "ratio",
        "share of the KV pool that is free in runs too short for the next request, over time",
    ),
    "kv_cached": Metric("prefix cache", "ratio", "share of the KV pool that only the prefix cache keeps, over time"),
    "kv_free": Metric("free", "ratio", "share of the KV pool that holds nothing and could be given out, over time"),
    "internal_fragmentation": Metric(
        "internal fragmentation",
        "ratio",
        "slots of blocks in use that hold nothing and never will / slots of blocks in use, over time",
    ),
    "tail_waste_tokens": Metric(
        "unused slots of a request",
        "tokens",
        "slots of blocks in use that hold nothing and never will / running requests, over time; with several cache "
        "groups counted as in peak_kv_tokens",
    ),
    "peak_blocks": Metric("peak blocks in use", "blocks", "most blocks in use in a step, of all cache groups together"),
    "peak_kv_tokens": Metric(
        "peak token states",
        "tokens",
        "most tokens held in blocks in use in a step; with several cache groups a token counts in each of them, once "
        "for each layer, divided by the greatest common divisor of the groups' numbers of layers",
    ),
    "block_table_bytes_peak": Metric(
        "peak block-table size",
        "bytes",
        "4 * most block-table entries of running requests in a step, of all cache groups together",
    ),
    "prefix_hit_tokens": Metric(
        "prefix-hit tokens", "tokens", "prompt tokens taken from the prefix cache at first admission, once per prompt"
    ),
    "prefix_hit_rate": Metric("prefix-hit rate", "ratio", "prefix_hit_tokens / prompt_tokens"),
    "sharing_saving": Metric(
        "saved by sharing",
        "ratio",
        "1 - blocks in use / entries of block tables, over time: what requests would need besides without it",
    ),
    "evicted_blocks": Metric("evicted blocks", "blocks", "cached blocks given up for others, of all cache groups"),
    "copied_blocks": Metric(
        "copied blocks", "blocks", "blocks copied so that samples of a prompt can write their own, of all cache groups"
    ),
    "preemptions": Metric("preemptions", "", "times that a request or a sample was preempted, sum over requests"),
    "preempted_step_rate": Metric("steps with preemption", "ratio", "steps with at least one preemption / steps"),
    "swapped_out_blocks": Metric("swapped out", "blocks", "blocks moved to host memory, of all cache groups"),
    "swapped_in_blocks": Metric("swapped in", "blocks", "blocks moved back from host memory, of all cache groups"),
    "max_wait_s": Metric("longest wait", "s", "longest time that any request spent in the queue at a stretch"),
    "mean_running_requests": Metric("running requests", "", "requests that run, each sample counted, over time"),
    "mean_waiting_requests": Metric("waiting requests", "", "requests in the queue once a step is planned, over time"),
    "steps": Metric("steps", "", "engine steps"),
    "computed_tokens": Metric(
        "computed tokens",
        "tokens",
        "tokens computed in all steps, padding excluded; those of ended rows of static batches are included",
    ),
    "decode_token_share": Metric(
        "decode tokens", "ratio", "computed tokens of requests that computed just their newest one / computed_tokens"
    ),
    "padded_tokens": Metric("padded tokens", "tokens", "padding computed besides"),
    "padding_fraction": Metric("padding", "ratio", "padded_tokens / (computed_tokens + padded_tokens)"),
    "num_blocks": Metric("capacity", "blocks", "usable KV blocks of each cache group"),
    "kv_bytes_per_token": Metric(
        "KV size of a token", "bytes", "keys and values of one token in all layers, on all devices; no padding of pages"
    ),
    "kv_block_bytes": Metric("KV block size", "bytes", "block_size * kv_bytes_per_token"),
    "kv_page_bytes": Metric("KV page size", "bytes", "kv_block_bytes / layers; NaN for a real device"),
    "hidden_state_bytes": Metric(
        "hidden state of a token", "bytes", "what one layer hands to the next for one token; NaN for a real device"
    ),
    "hidden_bytes_per_token": Metric(
        "hidden states of a token", "bytes", "inputs of all layers for one token; NaN for a real device"
    ),
    "kv_projection_share": Metric(
        "key and value projections",
        "ratio",
        "multiplications that make a token's keys and values / all those with the layers' weights; NaN for a real "
        "device",
    ),
    "page_efficiency": Metric(
        "page efficiency",
        "ratio",
        "time that contiguous memory would take to read a page's bytes / time that the page takes; NaN for a real "
        "device",
    ),
    "scalar_memory_use": Metric(
        "block table in scalar memory",
        "ratio",
        "4 * max_num_seqs * blocks of max_model_len tokens / scalar memory of the device: a kernel that keeps the "
        "whole table there cannot have more than 1; NaN for a device that reads tables from main memory, and for a "
        "real one",
    ),
    "gemm_s": Metric("time in products", "s", "modelled time of matrix products, logits and collectives included"),
    "attention_s": Metric("time in attention", "s", "modelled time of attention"),
    "swap_s": Metric("time of swaps", "s", "modelled time of moving blocks to the host and back"),
    "host_s": Metric(
        "time of the host",
        "s",
        "modelled time that the device waits for scheduling, launches and block tables; of a real device, time in "
        "which the host does not wait for it",
    ),
    "host_share": Metric("host", "ratio", "host_s / time of all steps"),
    "compilations": Metric(
        "compilations",
        "",
        "programs compiled during the trial; 0 after a full warm-up; of a simulated device, the buckets that were used",
    ),
    "warmup_compilations": Metric("warm-up compilations", "", "programs compiled before the setting's trials"),
    "compile_s": Metric("compile time", "s", "time spent compiling before the setting's trials"),
}
"""Every metric of a trial. "Over time" is the mean over steps weighted by their duration: sum(d * x) /
sum(d), with d = end_time - start_time; time without a step, when no request is there, does not count."""


def trial_metrics(
    requests: Sequence[Served],
    steps: StepTable,
    start_time: float,
    *,
    num_blocks: int,
    block_size: int,
    kv_bytes_per_token: float,
    modelled: Mapping[str, float] | None = None,
    sizes: Mapping[str, float] | None = None,
    host_s: float = math.nan,
    compilations: int,
    warmup_compilations: int = 0,
    compile_s: float = 0.0,
) -> dict[str, float]:
    """All of `METRICS` for one trial that began at `start_time` seconds on the engine's clock.

    Of a simulated device: `modelled`, seconds of all steps by the parts of `StepCost`, and `sizes`, those of `SIZES`.
    Of a real one: `host_s`, the seconds of all steps in which the host did not wait for it.
    """
    if not requests or not len(steps):
        raise ValueError("a trial without finished requests or steps has no metrics")
    wall = float(steps["end_time"][-1]) - start_time
    prompts = _by_prompt(requests)
    prompt = sum(samples[0].num_prompt_tokens for samples in prompts)
    output = sum(r.num_output_tokens for r in requests)
    hits = sum(samples[0].metrics.num_cached_tokens for samples in prompts)
    times = modelled_times(modelled) | ({"host_s": host_s} if modelled is None else {})
    truncated = sum(any(r.num_output_tokens < r.max_tokens for r in samples) for samples in prompts)
    return {
        "wall_s": wall,
        "requests_per_s": len(prompts) / wall,
        "output_tokens_per_s": output / wall,
        "total_tokens_per_s": (prompt + output) / wall,
        "finished_requests": len(prompts) - truncated,
        "truncated_requests": truncated,
        "prompt_tokens": prompt,
        "output_tokens": output,
        **latencies(requests),
        **kv_usage(steps),
        "prefix_hit_tokens": hits,
        "prefix_hit_rate": hits / prompt,
        # not of the steps: a plan that only takes places away is not run, and has no statistics
        "preemptions": sum(r.metrics.num_preemptions for r in requests),
        "max_wait_s": max(r.metrics.max_wait for r in requests),
        **step_counts(steps),
        "num_blocks": num_blocks,
        "kv_bytes_per_token": kv_bytes_per_token,
        "kv_block_bytes": kv_bytes_per_token * block_size,
        **(sizes or dict.fromkeys(SIZES, math.nan)),
        **times,
        "host_share": times["host_s"] / float(steps.durations.sum()),
        "compilations": compilations,
        "warmup_compilations": warmup_compilations,
        "compile_s": compile_s,
    }


def latencies(requests: Iterable[Served]) -> dict[str, float]:
    """Mean and percentiles of the five latencies, in seconds.

    Percentiles interpolate linearly between the two nearest ranks.
    """
    values: dict[str, list[float]] = {name: [] for name in _LATENCIES}
    between: list[np.ndarray] = []
    for samples in _by_prompt(requests):
        arrival = samples[0].metrics.arrival_time
        begun = [t for r in samples if (t := r.metrics.first_scheduled_time) is not None]
        if begun:
            values["queue_time_s"].append(min(begun) - arrival)
        # one that ended without a token, for example too long for the pool, has no latency
        served = [r for r in samples if r.metrics.token_times and r.metrics.finished_time is not None]
        if not served:
            continue
        e2e = max(r.metrics.finished_time or 0.0 for r in served) - arrival
        values["ttft_s"].append(min(r.metrics.token_times[0] for r in served) - arrival)
        between += [np.diff(request.metrics.token_times) for request in served]
        values["e2e_latency_s"].append(e2e)
        values["normalized_latency_s_per_token"].append(e2e / max(r.num_output_tokens for r in served))
    measured = {name: np.array(own) for name, own in values.items()}
    measured["inter_token_latency_s"] = np.concatenate(between) if between else np.array([])
    summaries: dict[str, float] = {}
    for name, own in measured.items():
        row = [np.mean(own), *np.percentile(own, [50, 95, 99])] if len(own) else [math.nan] * 4
        summaries |= {f"{name}_{s}": float(v) for s, v in zip(_SUMMARIES, row, strict=True)}
    return summaries


def kv_usage(steps: StepTable) -> dict[str, float]:
    """Shares of the KV pool over time, its peaks, and what sharing saves.

    With d the duration of a step and n, r, f, x, c, e its slots of token states, reserved, internal and external
    fragmentation, cached and free, each share is sum(d * part) / sum(d * (n + r + f + x + c + e)), and
    internal_fragmentation is sum(d * f) / sum(d * (n + r + f)). With q its running requests, tail_waste_tokens is
    sum(d * f) / sum(d * q). With b its blocks in use and t the entries of all block tables, sharing_saving is
    1 - sum(d * b) / sum(d * t).
    """
    duration = steps.durations
    held = np.array([duration @ steps[name.removeprefix("kv_")] for name in KV_SHARES])
    in_use = float(held[:3].sum())  # token states, reserved, internal fragmentation
    running = float(duration @ steps["num_running"])
    shares = (held / held.sum()).tolist()
    entries = float(duration @ steps["block_table_entries"])
    return {
        **dict(zip(KV_SHARES, shares, strict=True)),
        "internal_fragmentation": float(held[2]) / in_use if in_use else math.nan,
        "tail_waste_tokens": float(held[2]) / running if running else math.nan,
        "sharing_saving": 1 - float(duration @ steps["blocks_in_use"]) / entries if entries else math.nan,
        "peak_blocks": int(steps["blocks_in_use"].max()),
        "peak_kv_tokens": int(steps["token_states"].max()),
        "block_table_bytes_peak": BLOCK_TABLE_ENTRY_BYTES * int(steps["block_table_entries"].max()),
    }


def step_counts(steps: StepTable) -> dict[str, float]:
    """What steps did, and requests that ran and waited over time."""
    duration = steps.durations
    computed, padded = steps.total("num_tokens"), steps.total("num_padded_tokens")
    return {
        "preempted_step_rate": int((steps["num_preempted"] > 0).sum()) / len(steps),
        "swapped_out_blocks": steps.total("num_swapped_out"),
        "swapped_in_blocks": steps.total("num_swapped_in"),
        "copied_blocks": steps.total("num_copied"),
        "evicted_blocks": steps.total("num_evicted"),
        "mean_running_requests": float(duration @ steps["num_running"] / duration.sum()),
        "mean_waiting_requests": float(duration @ steps["num_waiting"] / duration.sum()),
        "steps": len(steps),
        "computed_tokens": computed,
        "decode_token_share": steps.total("num_decode_tokens") / computed,
        "padded_tokens": padded,
        "padding_fraction": padded / (computed + padded),
    }


def block_table_bytes(max_num_seqs: int, max_model_len: int, block_size: int) -> int:
    """Bytes of one cache group's table as a compiled step has it: a row for each request, room for the longest."""
    return BLOCK_TABLE_ENTRY_BYTES * max_num_seqs * -(-max_model_len // block_size)


def modelled_times(parts: Mapping[str, float] | None) -> dict[str, float]:
    """Where a simulated device spent its time, in seconds; NaN for a real one."""
    return {name: sum(parts[part] for part in of) if parts is not None else math.nan for name, of in _MODELLED.items()}


def tokens_sha256(requests: Iterable[Served]) -> str:
    """A fingerprint of every sample's output tokens, independent of the order in which samples finished."""
    outputs = sorted((r.request_id, r.sample_index, r.output_sha256) for r in requests)
    return hashlib.sha256(json.dumps(outputs).encode()).hexdigest()


def _by_prompt(requests: Iterable[Served]) -> list[list[Served]]:
    """The samples of each prompt."""
    prompts: dict[str, list[Served]] = {}
    for request in requests:
        prompts.setdefault(request.request_id, []).append(request)
    return list(prompts.values())
