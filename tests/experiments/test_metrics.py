"""A schedule computed by hand: block size 4, 4 blocks (16 slots), steps of 1 s, two requests, one preemption.

A (prompt 4, 3 outputs) and B (prompt 6, 2 outputs) arrive at 0 and 0.5.
  step 0-1  A prefills 4: holds 4 tokens in 1 block. A gains token 1.
  step 1-2  A decodes (5 tokens, 2 blocks), B prefills 6 (2 blocks). A token 2, B token 1.
  step 2-3  B is preempted, 1 of its 2 blocks stays cached. A decodes (6 tokens), ends with token 3.
  step 4-6  (the clock was idle for 1 s) B recomputes 7 tokens (2 blocks), ends with token 2.
"""

import math

import pytest

from paged_jax.engine.request import Request, RequestMetrics, RequestStatus
from paged_jax.engine.stats import StepStats
from paged_jax.experiments.measurements import Served, StepTable
from paged_jax.experiments.metrics import (
    KV_SHARES,
    METRICS,
    Metric,
    kv_usage,
    latencies,
    step_counts,
    tokens_sha256,
    trial_metrics,
)
from paged_jax.kv_cache.usage import KVUsage
from paged_jax.sampling.params import SamplingParams

CAPACITY = {"num_blocks": 4, "block_size": 4, "kv_bytes_per_token": 10.0}


def request(name, prompt_len, outputs, metrics, max_tokens=None, sample_index=0):
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens or len(outputs))
    r = Request(
        request_id=name,
        number=0,
        prompt_token_ids=tuple(range(prompt_len)),
        sampling_params=params,
        seed=0,
        max_total_tokens=64,
        metrics=metrics,
        sample_index=sample_index,
    )
    r.token_ids += outputs
    r.status = RequestStatus.FINISHED
    return Served.of(r)


@pytest.fixture
def requests():
    a = RequestMetrics(0.0, 0.0, 3.0, [1.0, 2.0, 3.0])
    # waits from 0.5 to 1 and, preempted, from 2 to 4
    b = RequestMetrics(0.5, 1.0, 6.0, [2.0, 6.0], num_preemptions=1, num_cached_tokens=4, max_wait=2.0)
    return [request("A", 4, [11, 12, 13], a), request("B", 6, [21, 22], b)]


def step(start, end, tokens, padded, decodes, running, waiting, preempted, blocks, kv, moves=(0, 0, 0, 0)):
    """`moves`: blocks swapped out, swapped in, copied, evicted; `kv`: token states, internal fragmentation, cached,
    free, and perhaps reserved and external fragmentation."""
    usage = KVUsage(*kv)
    return StepStats(start, end, tokens, padded, decodes, running, waiting, preempted, *moves, blocks, blocks, usage)


STEPS = StepTable(
    [
        step(0, 1, 4, 0, 0, 1, 0, 0, 1, (4, 0, 0, 12)),
        step(1, 2, 7, 1, 1, 2, 0, 0, 4, (11, 5, 0, 0)),
        step(2, 3, 1, 3, 1, 1, 1, 1, 2, (6, 2, 4, 4)),
        step(4, 6, 7, 1, 0, 1, 0, 0, 2, (7, 1, 4, 4)),
    ]
)

MOVING_STEPS = StepTable(
    [
        step(0, 1, 8, 0, 4, 2, 3, 0, 0, (1, 0, 0, 0), (0, 0, 3, 0)),
        step(1, 3, 2, 0, 2, 2, 0, 2, 0, (1, 0, 0, 0), (5, 0, 0, 1)),
        step(3, 4, 5, 0, 0, 1, 1, 1, 0, (1, 0, 0, 0), (2, 4, 1, 1)),
        step(5, 6, 5, 0, 1, 1, 2, 0, 0, (1, 0, 0, 0), (0, 2, 0, 6)),
    ]
)

RESERVING_STEPS = StepTable(
    [
        # of 32 slots 20 are in use, of which 6 will be filled and 4 never; of the other 12 none is of use
        step(0, 1, 1, 0, 0, 1, 1, 0, 5, (10, 4, 0, 0, 6, 12)),
        step(1, 4, 1, 0, 0, 1, 0, 0, 5, (16, 2, 1, 9, 4, 0)),
    ]
)


def test_metrics_of_the_schedule(requests):
    m = trial_metrics(requests, STEPS, 0.0, **CAPACITY, compilations=0, warmup_compilations=3, compile_s=1.5)
    assert set(m) == set(METRICS)
    expected = {
        "wall_s": 6,
        "requests_per_s": 2 / 6,
        "output_tokens_per_s": 5 / 6,
        "total_tokens_per_s": 15 / 6,
        "finished_requests": 2,
        "truncated_requests": 0,
        "prompt_tokens": 10,
        "output_tokens": 5,
        # A: 1.0, B: 1.5
        "ttft_s_mean": 1.25,
        "ttft_s_p50": 1.25,
        "ttft_s_p95": 1.475,
        "ttft_s_p99": 1.495,
        # gaps 1, 1 and 4
        "inter_token_latency_s_mean": 2,
        "inter_token_latency_s_p50": 1,
        "inter_token_latency_s_p95": 3.7,
        "inter_token_latency_s_p99": 3.94,
        # 3.0 and 5.5, over 3 and 2 tokens
        "e2e_latency_s_mean": 4.25,
        "normalized_latency_s_per_token_mean": (1 + 2.75) / 2,
        "queue_time_s_mean": 0.25,
        # durations 1, 1, 1, 2 of a pool of 16 slots: 80 slot seconds, of which the idle second is none
        "kv_token_states": (4 + 11 + 6 + 2 * 7) / 80,
        "kv_internal_fragmentation": (0 + 5 + 2 + 2 * 1) / 80,
        "kv_cached": (0 + 0 + 4 + 2 * 4) / 80,
        "kv_free": (12 + 0 + 4 + 2 * 4) / 80,
        "internal_fragmentation": 9 / (35 + 9),
        "peak_blocks": 4,
        "peak_kv_tokens": 11,
        "block_table_bytes_peak": 16,
        "prefix_hit_tokens": 4,
        "prefix_hit_rate": 0.4,
        "preemptions": 1,
        "preempted_step_rate": 1 / 4,
        "max_wait_s": 2,
        "mean_running_requests": (1 + 2 + 1 + 2 * 1) / 5,
        "mean_waiting_requests": 1 / 5,
        "decode_token_share": 2 / 19,
        "steps": 4,
        "computed_tokens": 19,
        "padded_tokens": 5,
        "padding_fraction": 5 / 24,
        "compilations": 0,
        "warmup_compilations": 3,
        "compile_s": 1.5,
    }
    assert {name: m[name] for name in expected} == pytest.approx(expected)
    assert sum(m[name] for name in KV_SHARES) == pytest.approx(1)


def test_moves_of_blocks_and_steps_with_preemption():
    m = step_counts(MOVING_STEPS)
    assert (m["swapped_out_blocks"], m["swapped_in_blocks"]) == (7, 6)
    assert (m["copied_blocks"], m["evicted_blocks"]) == (4, 8)
    assert m["preempted_step_rate"] == 2 / 4  # one of the two steps preempted two requests
    assert m["decode_token_share"] == 7 / 20
    # 1, 2, 1 and 1 seconds; the second without a step does not count
    assert m["mean_waiting_requests"] == pytest.approx((3 + 0 + 1 + 2) / 5)
    assert m["mean_running_requests"] == pytest.approx((2 + 4 + 1 + 1) / 5)


def test_what_a_reservation_holds_is_told_apart():
    m = kv_usage(RESERVING_STEPS)
    expected = {
        # 1 and 3 seconds of 32 slots
        "kv_token_states": (10 + 3 * 16) / 128,
        "kv_reserved": (6 + 3 * 4) / 128,
        "kv_internal_fragmentation": (4 + 3 * 2) / 128,
        "kv_external_fragmentation": 12 / 128,
        "kv_cached": 3 / 128,
        "kv_free": 27 / 128,
        # of blocks in use only
        "internal_fragmentation": (4 + 3 * 2) / (20 + 3 * 22),
        "peak_kv_tokens": 16,
    }
    assert {name: m[name] for name in expected} == pytest.approx(expected)
    assert sum(m[name] for name in KV_SHARES) == pytest.approx(1)


@pytest.fixture
def samples():
    """A (prompt 5, 3 samples, arrived at 1) and B (prompt 2, 1 sample, arrived at 0)."""
    a0 = RequestMetrics(1.0, 2.0, 6.0, [3.0, 4.0, 6.0], num_cached_tokens=4, max_wait=1.0)
    a1 = RequestMetrics(1.0, 2.0, 9.0, [3.0, 9.0], num_preemptions=2, num_cached_tokens=4, max_wait=5.0)
    a2 = RequestMetrics(1.0, 2.0, 7.0, [4.0, 5.0, 7.0], num_preemptions=1, num_cached_tokens=4)
    b = RequestMetrics(0.0, 0.0, 2.0, [1.0, 2.0])
    return [
        request("B", 2, [4, 4], b),
        request("A", 5, [1, 2, 3], a0, 3),
        request("A", 5, [1, 2, 4], a2, 3, sample_index=2),
        request("A", 5, [1, 2], a1, 3, sample_index=1),  # one token short
    ]


def test_a_prompt_with_its_samples_is_one_request(samples):
    m = trial_metrics(samples, STEPS, 0.0, **CAPACITY, compilations=0)
    expected = {
        "requests_per_s": 2 / 6,
        "finished_requests": 1,
        "truncated_requests": 1,
        "prompt_tokens": 7,
        "output_tokens": 3 + 2 + 3 + 2,
        "output_tokens_per_s": 10 / 6,
        "total_tokens_per_s": 17 / 6,
        "prefix_hit_tokens": 4,
        "prefix_hit_rate": 4 / 7,
        "preemptions": 3,
        "max_wait_s": 5,
        # A from 1 to 3 and to 9, B from 0 to 1 and to 2
        "ttft_s_mean": 1.5,
        "e2e_latency_s_mean": (8 + 2) / 2,
        "normalized_latency_s_per_token_mean": (8 / 3 + 2 / 2) / 2,
        "queue_time_s_mean": 0.5,
        # gaps of B: 1; of A: 1, 2; 6; 1, 2
        "inter_token_latency_s_mean": 13 / 6,
    }
    assert {name: m[name] for name in expected} == pytest.approx(expected)


def test_a_request_cut_short_is_counted_and_one_without_tokens_has_no_latency(requests):
    cut = request("C", 3, [], RequestMetrics(0.0, None, 2.0), max_tokens=5)
    m = trial_metrics([*requests, cut], STEPS, 0.0, **CAPACITY, compilations=0)
    assert (m["finished_requests"], m["truncated_requests"]) == (2, 1)
    assert m["requests_per_s"] == pytest.approx((m["finished_requests"] + m["truncated_requests"]) / m["wall_s"])
    assert METRICS["requests_per_s"].definition == "(finished_requests + truncated_requests) / wall_s"
    assert m["ttft_s_mean"] == 1.25


def test_no_gap_between_tokens_is_not_zero():
    only = request("A", 4, [1], RequestMetrics(0.0, 0.0, 1.0, [1.0]))
    assert math.isnan(latencies([only])["inter_token_latency_s_p50"])
    with pytest.raises(ValueError, match="without finished requests"):
        trial_metrics([], STEPS, 0.0, **CAPACITY, compilations=0)


def test_the_fingerprint_depends_on_tokens_and_not_on_the_order_of_finishing(requests):
    a, b = requests
    assert tokens_sha256([a, b]) == tokens_sha256([b, a])
    before = tokens_sha256([a, b])
    changed = request("B", 6, [21, 23], b.metrics)
    assert tokens_sha256([a, changed]) != before


def test_the_fingerprint_tells_samples_apart(samples):
    before = tokens_sha256(samples)
    assert tokens_sha256(samples[::-1]) == before
    first, second = samples[1], samples[2]
    swapped = [
        first._replace(output_sha256=second.output_sha256),
        second._replace(output_sha256=first.output_sha256),
    ]
    assert tokens_sha256([samples[0], *swapped, *samples[3:]]) != before


def test_units_for_people():
    assert Metric("", "ratio", "").display([0.5]) == (100, "%")
    assert Metric("", "s", "").display([0.5, 0.9, math.nan]) == (1000, "ms")
    assert Metric("", "s/token", "").display([0.5]) == (1000, "ms/token")
    assert Metric("", "s", "").display([0.5, 2.0]) == (1, "s")
    assert Metric("", "tokens/s", "").display([0.5]) == (1, "tokens/s")
