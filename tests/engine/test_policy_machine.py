"""Arrivals, steps, aborts, interrupts and resets in any order, under all policies by pairs.

Whatever happens around a request, it answers what it answers alone; whatever happened, nothing is left behind.
"""

from dataclasses import dataclass
from typing import Self

import hypothesis.strategies as st
import pytest
from host_executor import check_accounting, host_engine
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from policy_grid import Row, cache_groups, covering_array, engine_fields, row_name
from watcher import Watcher

from paged_jax.engine.engine import Engine
from paged_jax.execution.plan import SchedulerOutput
from paged_jax.sampling.params import BeamSearchParams, SamplingParams

ROWS = covering_array()
MAX_MODEL_LEN = 40
EOS = (5, 6, 7, 8)
"""Four of 97 tokens, so that about one request in four ends by itself."""

# Beginnings that requests share; two of them part only at token 6
STEMS = [
    tuple(range(10, 30)),
    tuple(range(10, 16)) + tuple(range(40, 52)),
    (9,) * 20,
]


def make_engine(row: Row, pool_tokens: int, max_num_seqs: int, budget: int, **fields: object) -> Engine:
    """The smallest pool from `pool_tokens` on that the engine takes with these policies."""
    chunked = row["enable_chunked_prefill"]
    num_blocks = max(1, pool_tokens // row["block_size"])
    while True:
        try:
            return host_engine(
                num_blocks=num_blocks,
                max_model_len=MAX_MODEL_LEN,
                eos_token_ids=EOS,
                seconds_per_step=1.0,
                groups=cache_groups(row),
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=budget if chunked else max(budget, MAX_MODEL_LEN),
                **engine_fields(row),
                **fields,
            )
        except ValueError as error:
            if "num_blocks" not in str(error) and "more memory" not in str(error):
                raise
            num_blocks += 1


class PolicyMachine(RuleBasedStateMachine):
    """Requests that share prefixes over a small pool, under one row of policies."""

    @initialize(
        row=st.sampled_from(ROWS),
        pool_tokens=st.integers(12, 90),
        max_num_seqs=st.integers(3, 6),
        spare_budget=st.integers(0, 30),
        max_preemptions=st.sampled_from([0, 2, 8]),
    )
    def start(self, row: Row, pool_tokens: int, max_num_seqs: int, spare_budget: int, max_preemptions: int) -> None:
        # who has a reservation is never preempted, but by srpt: the bound has no effect, and is refused
        bounded = row["allocator"] == "paged" or row["scheduling_policy"] == "srpt"
        fields = {"max_preemptions": max_preemptions} if bounded else {}
        self.engine = make_engine(row, pool_tokens, max_num_seqs, max_num_seqs + spare_budget, **fields)
        self.watcher = Watcher(self.engine)

    @rule(
        stem=st.sampled_from(STEMS),
        stem_length=st.integers(0, 20),
        tail=st.lists(st.integers(0, 2), max_size=6),
        max_tokens=st.one_of(st.integers(1, 12), st.none()),
        min_tokens=st.integers(0, 4),
        stop_token_ids=st.lists(st.integers(0, 96), max_size=3),
        ignore_eos=st.booleans(),
        n=st.sampled_from([1, 1, 2, 3]),
        seed=st.integers(0, 3),
        logprobs=st.sampled_from([None, None, 0, 2]),
        priority=st.integers(-1, 2),
        user=st.sampled_from(["", "a", "b"]),
        cache_salt=st.sampled_from(["", "", "salt"]),
    )
    def add(
        self,
        stem: tuple[int, ...],
        stem_length: int,
        tail: list[int],
        max_tokens: int | None,
        min_tokens: int,
        stop_token_ids: list[int],
        ignore_eos: bool,
        n: int,
        seed: int,
        logprobs: int | None,
        **fields: object,
    ) -> None:
        prompt = (*stem[:stem_length], *tail)[: self.engine.max_request_len - 1] or (1,)
        params = SamplingParams(
            n=n,
            seed=seed,
            logprobs=logprobs,
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens or min_tokens),
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
        )
        self.watcher.add(prompt, params, **fields)

    @rule(
        stem=st.sampled_from(STEMS),
        stem_length=st.integers(1, 20),
        beam_width=st.integers(1, 3),
        max_tokens=st.integers(1, 6),
        length_penalty=st.sampled_from([0.0, 1.0, 2.0]),
    )
    def add_beams(
        self, stem: tuple[int, ...], stem_length: int, beam_width: int, max_tokens: int, length_penalty: float
    ) -> None:
        prompt = stem[: min(stem_length, self.engine.max_request_len - 1)]
        params = BeamSearchParams(beam_width=beam_width, max_tokens=max_tokens, length_penalty=length_penalty)
        self.watcher.add(prompt, params)

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.watcher.step()

    @rule(seconds=st.floats(0.5, 10))
    def time_passes(self, seconds: float) -> None:
        self.engine.clock.advance(seconds)

    @precondition(lambda self: self.watcher.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.watcher.abort(data.draw(st.sampled_from(self.watcher.live), label="which"))

    @precondition(lambda self: self.watcher.live)
    @rule(data=st.data())
    def abort_before_the_result(self, data: st.DataObject) -> None:
        expectation = data.draw(st.sampled_from(self.watcher.live), label="which")
        self.watcher.step(lambda plan: self.watcher.abort(expectation))

    @precondition(lambda self: self.watcher.live)
    @rule(launched=st.booleans())
    def interrupt(self, launched: bool) -> None:
        self.engine.executor.loses_plan = not launched
        self.watcher.step(_interrupt)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.engine.reset_prefix_cache()
        assert all(pool.num_cached == 0 for pool in self.engine.scheduler.kv_cache.pools)

    @invariant()
    def accounting(self) -> None:
        if hasattr(self, "watcher"):
            check_accounting(self.engine)

    def teardown(self) -> None:
        if hasattr(self, "watcher"):
            self.watcher.drain()


def _interrupt(plan: SchedulerOutput) -> None:
    raise KeyboardInterrupt


TestPolicyMachine = PolicyMachine.TestCase
TestPolicyMachine.settings = settings(max_examples=800, stateful_step_count=30, deadline=None)


@dataclass
class Counts:
    """How often what only happens under pressure has happened."""

    preempted: int
    swapped_out: int
    swapped_in: int
    copied: int
    evicted: int
    idle: int

    @classmethod
    def of(cls, engine: Engine) -> Self:
        plans = engine.executor.plans
        return cls(
            preempted=sum(len(plan.preempted) for plan in plans),
            swapped_out=sum(len(plan.swap_outs) for plan in plans),
            swapped_in=sum(len(plan.swap_ins) for plan in plans),
            copied=sum(len(pairs) for plan in plans for pairs in plan.copies),
            evicted=engine.scheduler.kv_cache.num_evicted,
            idle=sum(len(plan.idle) for plan in plans),
        )


def busy_run(row: Row, pool_tokens: int) -> Counts:
    """More requests than fit, of all kinds, some of them aborted or interrupted; checked at every step."""
    engine = make_engine(row, pool_tokens, max_num_seqs=8, budget=24, **busy_fields(row))
    watcher = Watcher(engine)
    longest = engine.max_request_len
    for wave, stem in enumerate(STEMS):
        for n, length in ((2, 13), (3, 7)):
            params = SamplingParams(n=n, seed=wave, max_tokens=8, ignore_eos=True, logprobs=1)
            watcher.add(stem[: min(length, longest - 1)], params, priority=1)
        watcher.add(stem[: min(10, longest - 1)], BeamSearchParams(beam_width=2, max_tokens=5))
        for index, length in enumerate((9, 14, 17, 6, 17)):
            params = SamplingParams(max_tokens=(12, 3, 9, 14, 6)[index], ignore_eos=True, min_tokens=2)
            prompt = (*stem[:length], wave)[: longest - 1]
            watcher.add(prompt, params, priority=index % 3, user="ab"[index % 2], cache_salt="s" * (wave == 2))
        for step in range(8):
            watcher.step(_interrupt if step == 5 else None)
        watcher.abort(watcher.live[wave])
    watcher.drain()
    return Counts.of(engine)


def busy_fields(row: Row) -> dict[str, object]:
    """Swapping is cheap, so that "auto" swaps with blocks of any size."""
    return {"swap_block_cost": 0.25} if row["preemption_mode"] == "auto" else {}


@pytest.mark.parametrize("row", ROWS, ids=row_name)
def test_a_busy_engine_does_all_that_its_policies_can_do(row: Row) -> None:
    paged, static = row["allocator"] == "paged", row["batching"] == "static"
    counts = busy_run(row, max(40, 4 * row["block_size"]) if paged else 200)
    assert (counts.idle > 0) == static
    # reservations never run out: only srpt takes the place of one that runs; nor do windows whose batch nobody joins
    assert counts.preempted > 0 or not paged or (static and row["windows"] == "windowed")
    assert counts.preempted == 0 or paged or row["scheduling_policy"] == "srpt"
    # a block of one token is never shared in part; reservations copy whatever they fork
    assert (counts.copied > 0) == (not paged or row["block_size"] > 1)
    assert (counts.evicted > 0) == (row["prefix_cache"] != "none")
    if row["num_swap_blocks"] is None or not (paged or row["scheduling_policy"] == "srpt"):
        assert counts.swapped_out == 0
    elif (
        paged and row["num_swap_blocks"] * row["block_size"] >= 12 and counts.preempted
    ):  # else hardly a request fits the host
        assert counts.swapped_out >= counts.swapped_in > 0


@pytest.mark.parametrize("row", ROWS, ids=row_name)
def test_the_longest_request_that_the_pool_holds_is_served(row: Row) -> None:
    engine = make_engine(row, 5 * row["block_size"], max_num_seqs=4, budget=6)
    watcher = Watcher(engine)
    longest = engine.max_request_len
    stem = tuple(range(40, 40 + longest))
    watcher.add(stem[: longest - 1], SamplingParams(max_tokens=None, ignore_eos=True))
    watcher.add(stem[: longest // 2], SamplingParams(max_tokens=None, ignore_eos=True))
    watcher.add(stem[: longest // 2], SamplingParams(n=2, seed=0, max_tokens=None, ignore_eos=True))
    watcher.drain()
    assert {len(r.token_ids) for e in watcher.ended for r in e.leader.samples} == {longest}
