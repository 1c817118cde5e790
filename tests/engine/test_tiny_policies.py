"""Tokens do not depend on policies: every row of the covering array on a tiny model, against its dense reference."""

from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest
from dense_reference import MIN_GAP, DenseReference
from host_executor import VOCAB_SIZE, check_accounting
from policy_grid import Row, covering_array, engine_fields, row_name
from tiny_engines import NUM_SLOTS, MakeEngine, Windows, check_logprobs, greedy, log_softmax, make_reference, sampled

from paged_jax.engine.engine import Engine
from paged_jax.engine.request import Request
from paged_jax.sampling.params import BeamSearchParams, SamplingParams

NEW_TOKENS = 10
POOLS = {1: (44, 36), 3: (16, 36), 4: (12, 36), 16: (4, 36), 64: (4, 80)}
"""Block size -> blocks and longest request: too few blocks for all, enough for anybody alone."""


@dataclass(frozen=True)
class Case:
    """A request, and what it must answer."""

    prompt: tuple[int, ...]
    params: SamplingParams
    expected: list[list[int]]
    """Tokens of each sample."""
    logprobs: np.ndarray | None
    """Log-probabilities of the whole vocabulary at each output token of the first sample, where they are asked for."""
    fields: dict[str, object] = field(default_factory=dict)


def _rows() -> list[tuple[Row, int]]:
    """Those of the covering array, in which every value meets every block size, and the largest blocks once more with
    64 tokens; those of the same executor side by side."""
    rows = [(row, row["block_size"]) for row in covering_array()]
    rows += [(row, 64) for row, size in rows if size == 16]
    return sorted(rows, key=lambda pair: (pair[0]["windows"], pair[1]))


@cache
def _cases(windows: Windows, long: bool) -> list[Case]:
    """Greedy and seeded requests, some of which share a beginning. Long ones outgrow a block of 64 tokens."""
    reference = make_reference(windows)
    rng = np.random.default_rng(8)
    grow = 50 * long

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.integers(0, VOCAB_SIZE, count).tolist())

    def decided(count: int, start: tuple[int, ...] = ()) -> tuple[int, ...]:
        """A prompt whose greedy tokens are no near ties."""
        while True:
            prompt = start + tokens(count - len(start))
            if reference._greedy(prompt, NEW_TOKENS)[1] > MIN_GAP:
                return prompt

    shared = decided(17 + grow)
    requests = [
        (decided(5), greedy(NEW_TOKENS), {"priority": 2, "user": "a"}),
        (shared, SamplingParams(temperature=0, max_tokens=NEW_TOKENS, logprobs=2), {"priority": 1, "user": "b"}),
        (tokens(13 + grow), SamplingParams(seed=3, n=3, top_p=0.9, min_p=0.01, max_tokens=NEW_TOKENS), {"priority": 1}),
        (decided(20 + grow, shared), greedy(NEW_TOKENS), {"user": "a"}),
        (tokens(11 + grow), SamplingParams(temperature=0.8, seed=11, max_tokens=NEW_TOKENS), {"priority": 3}),
        (decided(22 + grow // 7), greedy(NEW_TOKENS), {"user": "b"}),
        (shared[:16] + tokens(3), SamplingParams(temperature=1.3, seed=2**63, top_k=20, max_tokens=NEW_TOKENS), {}),
        (shared, SamplingParams(seed=5, logprobs=0, max_tokens=NEW_TOKENS), {"cache_salt": "x", "priority": -1}),
    ]
    return [_case(reference, *request) for request in requests]


def _case(
    reference: DenseReference, prompt: tuple[int, ...], params: SamplingParams, fields: dict[str, object]
) -> Case:
    if params.is_greedy:
        expected = [reference.greedy(prompt, params.max_tokens)]
    else:
        expected = [sampled(reference, prompt, params, index) for index in range(params.n)]
    logprobs = None
    if params.logprobs is not None:
        logprobs = log_softmax(reference.logits([*prompt, *expected[0][:-1]])[len(prompt) - 1 :])
    return Case(prompt, params, expected, logprobs, {"expected_output_len": params.max_tokens, **fields})


@dataclass
class Counts:
    """What has really happened."""

    preempted: int = 0
    swapped_out: int = 0
    swapped_in: int = 0
    copied: int = 0
    evicted: int = 0
    cached: int = 0


class Drive:
    """Steps an engine over a tight pool and keeps count."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.counts = Counts()
        self._number = 0

    def add(self, case: Case) -> tuple[Case, Request]:
        self._number += 1
        return case, self.engine.add_request(str(self._number), case.prompt, case.params, **case.fields)

    def step(self) -> None:
        engine = self.engine
        engine.clock.advance(1.0)  # so that requests age
        engine.step()
        check_accounting(engine)

    def drain(self) -> None:
        for _ in range(600):
            if not self.engine.has_unfinished_requests():
                return
            self.step()
        raise AssertionError("requests are unfinished after 600 steps")

    def check(self, served: list[tuple[Case, Request]]) -> None:
        for case, request in served:
            assert [sample.output_token_ids for sample in request.samples] == case.expected, case
            assert {sample.finish_reason for sample in request.samples} == {"length"}
            if case.logprobs is not None:
                check_logprobs(request, case.logprobs)
            self.counts.preempted += sum(sample.metrics.num_preemptions for sample in request.samples)
            self.counts.cached += request.metrics.num_cached_tokens

    def finish(self) -> Counts:
        plans = self.engine.executor.plans
        self.counts.swapped_out = sum(len(plan.swap_outs) for plan in plans)
        self.counts.swapped_in = sum(len(plan.swap_ins) for plan in plans)
        self.counts.copied = sum(len(pairs) for plan in plans for pairs in plan.copies)
        kv_cache = self.engine.scheduler.kv_cache
        self.counts.evicted = kv_cache.num_evicted
        assert all(pool.num_in_use == 0 for pool in kv_cache.pools)
        assert all(pool.num_free == pool.num_blocks for pool in kv_cache.host_pools)
        return self.counts


@pytest.mark.parametrize(
    ("row", "block_size"),
    [pytest.param(row, size, id=f"{size}-{row['windows']}-{row_name(row)}") for row, size in _rows()],
)
def test_rows_of_the_covering_array(tiny_engine: MakeEngine, row: Row, block_size: int) -> None:
    """All at once, then one after the other amid requests that are aborted."""
    num_blocks, max_model_len = POOLS[block_size]
    reserves = row["allocator"] != "paged"
    engine = tiny_engine(
        **{**engine_fields(row), "block_size": block_size},
        windows=row["windows"],
        max_num_seqs=NUM_SLOTS if row["windows"] == "windowed" else 4,  # a window's blocks are soon given up
        num_blocks=None if reserves else num_blocks,
        max_model_len=max_model_len,
    )
    cases = _cases(row["windows"], block_size == 64)
    drive = Drive(engine)
    served = [drive.add(case) for case in cases]
    drive.drain()
    drive.check(served)
    served = []
    for i, case in enumerate(cases):
        served.append(drive.add(case))
        doomed = SamplingParams(n=1 + i % 3, max_tokens=9) if i % 4 else BeamSearchParams(beam_width=2, max_tokens=9)
        engine.add_request("doomed", (*case.prompt[: 4 + i], i), doomed, priority=i - 2, expected_output_len=9)
        for _ in range(1 + i % 5):
            drive.step()
        engine.abort("doomed")
        check_accounting(engine)
    drive.drain()
    drive.check(served)
    for case in (cases[2], cases[3], cases[3]):  # alone: samples share, and what is cached stays
        served = [drive.add(case)]
        drive.drain()
        drive.check(served)
    counts = drive.finish()
    if row["prefix_cache"] != "none":
        assert served[0][1].metrics.num_cached_tokens
        assert counts.evicted
    assert counts.copied or (block_size == 1 and not reserves), "whole shared blocks are not written"
    roomy = row["batching"] == "static" and row["windows"] == "windowed"  # nobody joins, and pages are given back
    assert counts.preempted or reserves or roomy
    if row["preemption_mode"] == "swap" and row["num_swap_blocks"] == 200 and not (reserves or roomy):
        assert counts.swapped_in
