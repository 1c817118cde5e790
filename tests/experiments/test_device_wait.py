"""The host's share of real steps, and unused slots of a request, by hand."""

import time
from types import SimpleNamespace

import pytest

from paged_jax.engine.stats import StepStats
from paged_jax.experiments.device_wait import timed_waits
from paged_jax.experiments.measurements import StepTable
from paged_jax.experiments.metrics import kv_usage
from paged_jax.experiments.model_sizes import model_sizes
from paged_jax.kv_cache.usage import KVUsage
from paged_jax.simulation.shapes import find_shape

WAIT_S = 0.02


class SlowDevice:
    def submit(self, plan):
        return self

    def result(self):
        time.sleep(WAIT_S)
        return "tokens"


def test_only_waiting_for_results_counts():
    engine = SimpleNamespace(executor=SlowDevice())
    with timed_waits(engine) as wait:
        for _ in range(3):
            handle = engine.executor.submit("plan")
            time.sleep(5 * WAIT_S)  # the host, at work
            assert handle.result() == "tokens"
    assert 3 * WAIT_S <= wait.seconds < 10 * WAIT_S
    engine.executor.submit("plan").result()
    assert wait.seconds < 10 * WAIT_S, "the executor is itself again"
    assert isinstance(engine.executor.submit("plan"), SlowDevice)


def test_unused_slots_of_a_request():
    """1 s with 6 unused slots of 2 requests, 3 s with 10 of 4: (6 + 30) / (2 + 12)."""
    zeros = dict.fromkeys(StepStats._fields, 0)
    steps = StepTable(
        StepStats(
            **{**zeros, "start_time": start, "end_time": end, "num_running": running, "kv": KVUsage(40, unused, 0, 9)}
        )
        for start, end, running, unused in ((0, 1, 2, 6), (1, 4, 4, 10))
    )
    assert kv_usage(steps)["tail_waste_tokens"] == pytest.approx(36 / 14)


def test_sizes_of_latent_attention_and_experts():
    """DeepSeek-V2: a latent of 576 is projected from 5120 in each of 60 layers; 21 billion weights are active."""
    shape = find_shape("deepseek-v2")
    sizes = model_sizes(shape, dtype="bfloat16", kv_dtype="int8", block_size=16)
    assert sizes["kv_page_bytes"] == 16 * 576
    assert sizes["hidden_bytes_per_token"] == 60 * 5120 * 2
    embeddings = 2 * 102400 * 5120  # not among the layers' products
    assert 60 * 5120 * 576 / sizes["kv_projection_share"] == pytest.approx(21.4e9 - embeddings, rel=0.02)
