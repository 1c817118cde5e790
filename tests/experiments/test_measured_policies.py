"""Workloads that exercise policies, served by a real engine over a made-up device, and what is measured of them."""

from collections import Counter

import pytest
from host_executor import VOCAB_SIZE, host_engine

from paged_jax.experiments.lengths import Lengths
from paged_jax.experiments.measurements import run_workload
from paged_jax.experiments.metrics import KV_SHARES, tokens_sha256, trial_metrics
from paged_jax.experiments.workloads import SyntheticWorkload, make_workload

WORKLOAD = SyntheticWorkload(
    kind="lognormal",
    num_requests=12,
    prompt=Lengths(mean=9, sigma=0.5, max=20),
    output=Lengths(mean=8, sigma=0.5, min=2, max=16),
    request_rate=0.5,
    n=3,
    users=3,
    priorities=3,
    cache_salts=True,
)

POLICIES = {
    "fcfs": {},
    "alone": {"num_blocks": 256, "max_num_seqs": 3},
    "swap": {"preemption_mode": "swap", "num_swap_blocks": 40},
    "auto": {"preemption_mode": "auto", "num_swap_blocks": 9, "swap_block_cost": 2.0},
    "srpt": {"scheduling_policy": "srpt", "length_predictor": "oracle"},
    "priority": {"scheduling_policy": "priority", "victim_policy": "lowest_priority"},
    "fair": {"scheduling_policy": "fair", "length_predictor": "oracle"},
    "static": {"batching": "static", "max_num_seqs": 6},
    "reserve_max": {"allocator": "reserve_max", "num_blocks": 64, "max_model_len": 40},
    "reserve_oracle": {"allocator": "reserve_oracle", "num_blocks": 20},
    "radix": {"prefix_cache": "radix", "eviction": "lfu"},
}


class Events:
    """Counts what the engine tells a recorder."""

    def __init__(self):
        self.counts = Counter()
        self._since_last_step = 0

    def write(self, event):
        kind = event["event"]
        self.counts[kind] += 1
        self._since_last_step += kind == "preempt"
        if kind == "result":  # preemptions of plans that schedule nothing belong to the next step
            self.counts["steps with preemption"] += self._since_last_step > 0
            self._since_last_step = 0

    def flush(self, *, idle):
        pass


def serve(workload, policies):
    engine = host_engine(**{"num_blocks": 16, "max_num_seqs": 8, "seconds_per_step": 1.0, **policies})
    events = Events()
    engine.record(events)
    requests, steps, start = run_workload(engine, make_workload(workload, 0, None, VOCAB_SIZE))
    metrics = trial_metrics(
        requests, steps, start, num_blocks=engine.num_blocks, block_size=4, kv_bytes_per_token=1.0, compilations=0
    )
    return engine, requests, metrics, events.counts


@pytest.fixture(scope="module")
def undisturbed():
    return tokens_sha256(serve(WORKLOAD, POLICIES["alone"])[1])


@pytest.mark.parametrize("policies", POLICIES.values(), ids=POLICIES)
def test_policies_change_what_is_measured_and_no_token(policies, undisturbed):
    engine, requests, m, events = serve(WORKLOAD, policies)
    assert len(requests) == len({(r.request_id, r.sample_index) for r in requests}) == 12 * 3
    assert tokens_sha256(requests) == undisturbed
    assert (m["finished_requests"], m["truncated_requests"]) == (12, 0)
    assert m["output_tokens"] == sum(r.max_tokens for r in requests)
    assert sum(m[name] for name in KV_SHARES) == pytest.approx(1)
    plans = engine.executor.plans
    assert m["steps"] == len(plans)
    assert m["preempted_step_rate"] == pytest.approx(events["steps with preemption"] / len(plans))
    assert m["swapped_out_blocks"] == sum(len(b) for plan in plans for s in plan.swap_outs for b in s.device_blocks)
    assert m["swapped_in_blocks"] == sum(len(b) for plan in plans for s in plan.swap_ins for b in s.device_blocks)
    assert m["copied_blocks"] == sum(len(pairs) for plan in plans for pairs in plan.copies)
    assert m["decode_token_share"] == sum(len(p.decodes) for p in plans) / sum(p.num_tokens for p in plans)
    assert (m["preemptions"], m["evicted_blocks"]) == (events["preempt"], events["evict"])


def test_each_policy_shows_in_its_metrics():
    m = {name: serve(WORKLOAD, policies)[2] for name, policies in POLICIES.items()}
    assert m["alone"]["preemptions"] == m["alone"]["preempted_step_rate"] == m["alone"]["evicted_blocks"] == 0
    assert m["fcfs"]["preemptions"] > 0
    assert m["fcfs"]["swapped_out_blocks"] == m["fcfs"]["swapped_in_blocks"] == 0
    assert m["swap"]["swapped_out_blocks"] >= m["swap"]["swapped_in_blocks"] > 0
    assert m["fcfs"]["copied_blocks"] > 0
    assert m["radix"]["evicted_blocks"] > 0
    assert m["reserve_max"]["kv_internal_fragmentation"] > m["reserve_max"]["kv_token_states"]
    assert m["reserve_oracle"]["kv_reserved"] > 0
    assert m["reserve_oracle"]["kv_external_fragmentation"] > 0
    assert m["fcfs"]["kv_reserved"] == m["fcfs"]["kv_external_fragmentation"] == 0
    assert m["static"]["normalized_latency_s_per_token_p50"] > m["fcfs"]["normalized_latency_s_per_token_p50"]
    assert m["fcfs"]["max_wait_s"] > m["fcfs"]["queue_time_s_p50"]


def test_samples_are_told_apart_and_counted_once():
    _, requests, m, _ = serve(WORKLOAD.model_copy(update={"n": 1}), POLICIES["alone"])
    _, sampled, more, _ = serve(WORKLOAD, POLICIES["alone"])
    assert len(requests) == 12
    assert more["prompt_tokens"] == m["prompt_tokens"]
    assert more["output_tokens"] == 3 * m["output_tokens"]
    assert len({r.output_sha256 for r in sampled}) == 36
    assert tokens_sha256(requests) != tokens_sha256(sampled)


def test_a_step_without_a_plan_repeats_no_statistics():
    engine = host_engine(seconds_per_step=1.0)
    arrivals = make_workload(WORKLOAD.model_copy(update={"n": 1}), 0, None, VOCAB_SIZE)
    step = engine.step
    calls = []

    def every_other_step():
        calls.append(None)
        return step() if len(calls) % 2 == 0 else []

    engine.step = every_other_step
    _, first, _ = run_workload(engine, arrivals)
    _, second, _ = run_workload(engine, arrivals)
    assert 2 * (len(first) + len(second)) == len(calls)
    assert not set(first["start_time"]) & set(second["start_time"])
