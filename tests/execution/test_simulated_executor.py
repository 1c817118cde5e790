"""The simulated executor: made-up tokens, modelled times, and a schedule whose every number is computed by hand."""

import math
from typing import NamedTuple

import pytest

from paged_jax.config import EngineConfig, parse
from paged_jax.engine.clock import VirtualClock
from paged_jax.engine.engine import Arrival, Engine, drive
from paged_jax.execution.buckets import make_buckets
from paged_jax.execution.plan import SchedulerOutput
from paged_jax.execution.simulated_executor import SimulatedExecutor, answer_token
from paged_jax.experiments.measurements import run_workload
from paged_jax.experiments.metrics import trial_metrics
from paged_jax.kv_cache.group import CacheGroup
from paged_jax.sampling.params import BeamSearchParams, SamplingParams

VOCAB_SIZE = 97


class OneSecond(NamedTuple):
    """Half of it computing, half of it waiting."""

    compute: float = 0.5
    wait: float = 0.5


class Constant:
    """A cost model of a step that always takes a second; it remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, int]] = []

    def step(self, plan: SchedulerOutput, padded_tokens: int, padded_rows: int) -> OneSecond:
        self.asked.append((plan.num_tokens, padded_tokens, padded_rows))
        return OneSecond()


def simulated(padded: bool = False, **settings: object) -> tuple[Engine, Constant]:
    values = {"block_size": 4, "max_num_seqs": 2, "max_num_batched_tokens": 16, "prefix_cache": "none", "debug": True}
    config = parse(EngineConfig, {**values, **settings})
    cost = Constant()
    executor = SimulatedExecutor(
        cost,
        num_blocks=4,
        cache_groups=(CacheGroup(1, 1, 1),),
        vocab_size=VOCAB_SIZE,
        max_num_seqs=config.max_num_seqs,
        buckets=make_buckets(config) if padded else None,
        kv_bytes_per_token=10.0,
        num_swap_blocks=config.num_swap_blocks or 0,
    )
    engine = Engine(
        config,
        executor,
        clock=VirtualClock(),
        tokenizer=None,
        max_model_len=64,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(),
    )
    return engine, cost


def asks(max_tokens: int, **params: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **params})


def test_every_metric_of_a_schedule_with_a_preemption_is_the_hand_computed_one() -> None:
    """Blocks of 4 tokens, 4 of them. A: 4 prompt, 6 output tokens, at 0. B: 6 and 5, at 0.5. Steps of 1 s:

    0  A prefills 4 (1 block)                                   holds 4
    1  A 5 (2 blocks); B prefills 6 (2 blocks)                  holds 11
    2  A 6; B 7                                                 holds 13
    3  A 7; B 8                                                 holds 15
    4  A 8; B wants a fifth block and gives way                 holds 8
    5  A 9 (3 blocks), ends; B, of 9 tokens, finds 1 block free holds 9
    6  B recomputes 9 (3 blocks)                                holds 9
    7  B 10, ends                                               holds 10
    """
    engine, _ = simulated()
    arrivals = [Arrival(0.0, "A", (1,) * 4, asks(6)), Arrival(0.5, "B", (2,) * 6, asks(5))]
    requests, steps, start = run_workload(engine, arrivals)
    times = {r.request_id: r.metrics.token_times for r in requests}
    assert times == {"A": [1, 2, 3, 4, 5, 6], "B": [2, 3, 4, 7, 8]}
    metrics = trial_metrics(requests, steps, start, num_blocks=4, block_size=4, kv_bytes_per_token=10.0, compilations=0)
    expected = {
        "wall_s": 8,
        "requests_per_s": 2 / 8,
        "output_tokens_per_s": 11 / 8,
        "total_tokens_per_s": 21 / 8,
        "finished_requests": 2,
        "truncated_requests": 0,
        "ttft_s_mean": (1 + 1.5) / 2,
        "inter_token_latency_s_mean": (5 * 1 + 1 + 1 + 3 + 1) / 9,
        "inter_token_latency_s_p50": 1,
        "e2e_latency_s_mean": (6 + 7.5) / 2,
        "normalized_latency_s_per_token_mean": (6 / 6 + 7.5 / 5) / 2,
        "queue_time_s_mean": 0.25,
        "max_wait_s": 2,
        "preemptions": 1,
        "preempted_step_rate": 1 / 8,
        "mean_running_requests": (1 + 2 + 2 + 2 + 1 + 1 + 1 + 1) / 8,
        "mean_waiting_requests": 2 / 8,
        "steps": 8,
        "computed_tokens": 4 + 7 + 2 + 2 + 1 + 1 + 9 + 1,
        "decode_token_share": (1 + 2 + 2 + 1 + 1 + 1) / 27,
        "padded_tokens": 0,
        "kv_token_states": (4 + 11 + 13 + 15 + 8 + 9 + 9 + 10) / (8 * 16),
        "kv_internal_fragmentation": (0 + 5 + 3 + 1 + 0 + 3 + 3 + 2) / (8 * 16),
        "kv_free": (12 + 0 + 0 + 0 + 8 + 4 + 4 + 4) / (8 * 16),
        "peak_blocks": 4,
        "peak_kv_tokens": 15,
        "sharing_saving": 0,
        "num_blocks": 4,
        "kv_block_bytes": 40,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_a_sample_answers_with_one_token_of_its_own() -> None:
    engine, _ = simulated(max_num_seqs=3)
    request = engine.add_request("x", (5, 6), asks(3, n=3, seed=95, temperature=1.0))
    while engine.has_unfinished_requests():
        engine.step()
    answers = [sample.output_token_ids for sample in request.samples]
    assert answers == [[95] * 3, [96] * 3, [0] * 3]
    assert answers[1][0] == answer_token(95, 1, VOCAB_SIZE)


def test_a_bucket_pads_and_counts_as_a_program_once() -> None:
    engine, cost = simulated(padded=True, token_buckets=(2, 8, 16))
    run_workload(engine, [Arrival(0.0, "a", (1,) * 5, asks(3)), Arrival(0.0, "b", (1,) * 2, asks(2))])
    assert cost.asked == [(7, 8, 2), (2, 2, 2), (1, 2, 2)]
    assert engine.executor.num_compilations == 2
    assert engine.executor.modelled_seconds == (1.5, 1.5)


def test_without_buckets_nothing_is_padded() -> None:
    engine, cost = simulated()
    run_workload(engine, [Arrival(0.0, "a", (1,) * 5, asks(2))])
    assert cost.asked == [(5, 5, 1), (1, 1, 1)]
    assert engine.executor.num_compilations == 0


def test_beams_diverge_and_are_the_same_again() -> None:
    def texts() -> list[tuple[int, ...]]:
        engine, _ = simulated(max_num_seqs=2, max_logprobs=8)
        request = engine.add_request("x", (5, 6), BeamSearchParams(beam_width=2, max_tokens=6))
        while engine.has_unfinished_requests():
            engine.step()
        return [hypothesis.token_ids for hypothesis in request.beam_search.best()]

    first, second = texts(), texts()
    assert first == second
    assert len(set(first)) == 2


def test_logprobs_are_of_a_distribution_and_name_the_answer() -> None:
    engine, _ = simulated(max_logprobs=8)
    request = engine.add_request("x", (5, 6), asks(8, logprobs=4, seed=7))
    while engine.has_unfinished_requests():
        engine.step()
    for entry in request.logprobs:
        tokens, logprobs = zip(*entry.top, strict=True)
        assert list(logprobs) == sorted(logprobs, reverse=True)
        assert len(set(tokens)) == 4
        assert 0.5 < sum(map(math.exp, logprobs)) < 1
        if entry.rank <= 4:
            assert entry.top[entry.rank - 1] == (7, entry.logprob)


def test_requests_that_follow_come_after_the_end_of_the_other() -> None:
    engine, _ = simulated()
    arrivals = [
        Arrival(0.25, "second turn", (1,) * 3, asks(2), after="first turn"),
        Arrival(0.5, "first turn", (1,) * 2, asks(3, n=2, temperature=1.0)),
        Arrival(0.0, "third turn", (1,) * 4, asks(1), after="second turn"),
    ]
    requests, _, _ = run_workload(engine, arrivals)
    arrived = {r.request_id: r.metrics.arrival_time for r in requests}
    # the first begins at 0.5 and ends after three steps; the next comes when nothing runs, and starts at once
    assert arrived == {"first turn": 0.5, "second turn": 3.75, "third turn": 5.75}
    assert {r.request_id: r.metrics.finished_time for r in requests} == {
        "first turn": 3.5,
        "second turn": 5.75,
        "third turn": 6.75,
    }


def test_a_request_that_follows_nobody_is_refused() -> None:
    engine, _ = simulated()
    with pytest.raises(ValueError, match="is to follow 'b', which is not in the workload"):
        next(drive(engine, [Arrival(0.0, "a", (1,), asks(1), after="b")], engine.clock))


def test_requests_that_wait_for_each_other_are_refused() -> None:
    engine, _ = simulated()
    arrivals = [Arrival(0.0, "a", (1,), asks(1), after="b"), Arrival(0.0, "b", (1,), asks(1), after="a")]
    with pytest.raises(ValueError, match="request 'a' is to follow requests that follow it"):
        next(drive(engine, [*arrivals, Arrival(0.0, "c", (1,), asks(1))], engine.clock))


def test_who_follows_an_aborted_request_is_not_lost_in_silence() -> None:
    engine, _ = simulated()
    arrivals = [Arrival(0.0, "a", (1,), asks(5)), Arrival(0.0, "b", (1,), asks(1), after="a")]
    with pytest.raises(RuntimeError, match="request 'a' was aborted"):
        [engine.abort("a") for _ in drive(engine, arrivals, engine.clock)]
