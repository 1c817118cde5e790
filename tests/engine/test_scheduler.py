"""Schedules worked out by hand: which request computes which tokens in which step."""

import pytest
from host_executor import Step, check_accounting, drain, host_engine

from paged_jax.engine.engine import Engine
from paged_jax.engine.request import Request
from paged_jax.sampling.params import SamplingParams


def add(engine: Engine, request_id: str, length: int, max_tokens: int, first: int = 0) -> Request:
    """A prompt of `length` tokens that count up from `first`; the token after any text is 50."""
    prompt = range(first, first + length)
    return engine.add_request(request_id, list(prompt), SamplingParams(max_tokens=max_tokens))


def make(**fields: object) -> Engine:
    return host_engine(token=lambda tokens: 50, **{"prefix_cache": "none", **fields})


def steps(engine: Engine) -> list[Step]:
    drain(engine)
    return engine.executor.steps


def test_chunks_of_a_prompt_share_steps_with_decodes() -> None:
    engine = make(max_num_batched_tokens=6)
    add(engine, "A", 4, 4)
    add(engine, "B", 9, 2)
    assert steps(engine) == [
        [("A", 0, 4), ("B", 0, 2)],
        [("A", 4, 1), ("B", 2, 5)],
        [("A", 5, 1), ("B", 7, 2)],
        [("A", 6, 1), ("B", 9, 1)],
    ]


def test_budget_of_a_step_goes_to_those_who_run_first() -> None:
    engine = make(max_num_batched_tokens=4, max_num_seqs=3)
    add(engine, "A", 6, 2)
    add(engine, "B", 2, 2)
    add(engine, "C", 3, 1)
    assert steps(engine) == [
        [("A", 0, 4)],
        [("A", 4, 2), ("B", 0, 2)],
        [("A", 6, 1), ("B", 2, 1), ("C", 0, 2)],
        [("C", 2, 1)],
    ]


def test_no_more_run_than_there_are_slots_and_a_freed_slot_is_used_in_the_next_step() -> None:
    engine = make(max_num_seqs=2)
    a, b = add(engine, "A", 3, 1), add(engine, "B", 3, 3)
    c, d = add(engine, "C", 3, 2), add(engine, "D", 3, 1)
    engine.step()
    assert (a.is_finished, b.slot) == (True, 1)
    engine.step()
    assert (c.slot, d.slot) == (0, None)
    assert steps(engine) == [
        [("A", 0, 3), ("B", 0, 3)],
        [("B", 3, 1), ("C", 0, 3)],
        [("B", 4, 1), ("C", 3, 1)],
        [("D", 0, 3)],
    ]


def test_first_come_first_served_even_when_a_later_one_would_fit() -> None:
    engine = make(num_blocks=4)
    add(engine, "A", 8, 2)  # two blocks, then a third
    add(engine, "long", 12, 1)  # three blocks
    add(engine, "short", 2, 1)  # one block
    assert steps(engine) == [
        [("A", 0, 8)],
        [("A", 8, 1)],
        [("long", 0, 12), ("short", 0, 2)],
    ]


def test_last_arrived_is_preempted_and_its_tokens_are_computed_again() -> None:
    engine = make(num_blocks=4, max_num_batched_tokens=8)
    a, b = add(engine, "A", 4, 6), add(engine, "B", 4, 5)
    assert steps(engine) == [
        [("A", 0, 4), ("B", 0, 4)],
        [("A", 4, 1), ("B", 4, 1)],
        [("A", 5, 1), ("B", 5, 1)],
        [("A", 6, 1), ("B", 6, 1)],
        [("A", 7, 1), ("B", 7, 1)],  # B is done, and gives its blocks back before A wants a third
        [("A", 8, 1)],
    ]
    assert (a.metrics.num_preemptions, b.metrics.num_preemptions) == (0, 0)

    engine = make(num_blocks=4, max_num_batched_tokens=8)
    a, b = add(engine, "A", 4, 6), add(engine, "B", 4, 7)
    c = add(engine, "C", 1, 1)
    assert steps(engine) == [
        [("A", 0, 4), ("B", 0, 4)],  # the budget is spent: C waits
        [("A", 4, 1), ("B", 4, 1)],  # four blocks are in use: C waits
        [("A", 5, 1), ("B", 5, 1)],
        [("A", 6, 1), ("B", 6, 1)],
        [("A", 7, 1), ("B", 7, 1)],
        [("A", 8, 1)],  # wants a third block, so B gives up its two; nobody is admitted in such a step
        [("B", 0, 8)],  # of four prompt tokens and five of its own, as many as the budget allows; before C
        [("B", 8, 1), ("C", 0, 1)],
        [("B", 9, 1)],
    ]
    assert [r.metrics.num_preemptions for r in (a, b, c)] == [0, 1, 0]
    assert b.output_token_ids == [50] * 7


def test_preempted_requests_keep_their_order() -> None:
    engine = make(num_blocks=5, max_num_batched_tokens=16, max_num_seqs=3)
    for name in "ABC":
        add(engine, name, 4, 9)
    add(engine, "D", 4, 1)
    order = [request.request_id for request in _waiting_after(engine, preemptions=2)]
    assert order == ["B", "C", "D"]
    drain(engine)


def _waiting_after(engine: Engine, preemptions: int) -> list[Request]:
    while sum(len(plan.preempted) for plan in engine.executor.plans) < preemptions:
        engine.step()
        check_accounting(engine)
    return list(engine.scheduler.waiting)


def test_g07_victim_that_had_its_turn_in_this_step_does_not_run() -> None:
    # X comes first in the step and takes no new block; Y then needs one, and the policy gives it X's
    engine = make(num_blocks=3, victim_policy="victim_policies:FirstArrivedVictim")
    x, y = add(engine, "X", 5, 3), add(engine, "Y", 4, 2)
    engine.step()
    assert x.num_output_tokens == 1
    engine.step()
    assert engine.executor.steps[-1] == [("Y", 4, 1)]
    assert (x.num_output_tokens, x.slot, y.is_finished) == (1, None, True)
    assert steps(engine)[2:] == [[("X", 0, 6)], [("X", 6, 1)]]


def test_a_prompt_that_does_not_fit_whole_waits_instead_of_being_begun_over_and_over() -> None:
    engine = make(num_blocks=5, max_num_batched_tokens=5)
    add(engine, "A", 8, 8)
    long = add(engine, "B", 16, 1)  # four blocks: free only when A, which has two and more, has ended
    plans = steps(engine)
    assert all(len(plan) == 1 for plan in plans)
    assert plans[-4:] == [[("B", 0, 5)], [("B", 5, 5)], [("B", 10, 5)], [("B", 15, 1)]]
    assert long.metrics.num_preemptions == 0


def test_g07_budget_of_such_a_victim_is_free_again() -> None:
    engine = make(num_blocks=9, max_num_batched_tokens=5, victim_policy="victim_policies:FirstArrivedVictim")
    add(engine, "X", 8, 8)
    add(engine, "Y", 5, 5)
    add(engine, "Z", 16, 1)
    assert steps(engine)[:7] == [
        [("X", 0, 5)],
        [("X", 5, 3), ("Y", 0, 2)],
        [("X", 8, 1), ("Y", 2, 3), ("Z", 0, 1)],
        [("X", 9, 1), ("Y", 5, 1), ("Z", 1, 3)],
        [("X", 10, 1), ("Y", 6, 1), ("Z", 4, 3)],
        [("X", 11, 1), ("Y", 7, 1), ("Z", 7, 3)],
        # X takes the last block, then Y wants one and X gives up its four: its token goes to Z
        [("Y", 8, 1), ("Z", 10, 4)],
    ]


def test_two_victims_in_one_step() -> None:
    engine = make(num_blocks=4, block_size=2, victim_policy="victim_policies:FirstArrivedVictim")
    requests = [add(engine, name, length, 3) for name, length in (("X", 1), ("Y", 1), ("Z", 4))]
    engine.step()
    assert engine.executor.steps == [[("X", 0, 1), ("Y", 0, 1), ("Z", 0, 4)]]
    engine.step()  # X and Y still have room; Z needs a third block: X gives up one
    assert engine.executor.steps[1] == [("Y", 1, 1), ("Z", 4, 1)]
    drain(engine)
    assert [r.output_token_ids for r in requests] == [[50] * 3] * 3


def test_requests_that_run_share_the_blocks_of_a_common_prefix() -> None:
    engine = make(prefix_cache="hash")
    a = add(engine, "A", 10, 6)
    engine.step()
    b, c = add(engine, "B", 10, 2), add(engine, "C", 8, 2)
    engine.step()
    assert engine.executor.steps[1] == [("A", 10, 1), ("B", 8, 2), ("C", 4, 4)]
    tables = [request.block_tables[0].block_ids for request in (a, b, c)]
    assert tables[0][:2] == tables[1][:2]
    assert tables[0][:1] == tables[2][:1]
    assert tables[0][1] != tables[2][1]
    pool = engine.scheduler.kv_cache.pools[0]
    assert [pool.ref_count(block) for block in tables[0]] == [3, 2, 1]
    assert pool.num_in_use == 5
    usage = engine.last_step.kv
    assert usage.token_states == 4 + 4 + 3 + 2 + 4  # a shared block counts once
    assert usage.internal_fragmentation == 1 + 2
    assert [r.metrics.num_cached_tokens for r in (a, b, c)] == [0, 8, 4]
    drain(engine)


def test_least_recently_used_block_is_evicted_first_and_tails_before_heads() -> None:
    engine = make(prefix_cache="hash", num_blocks=5)
    for name, first in (("A", 0), ("B", 20)):
        add(engine, name, 8, 1, first)
        drain(engine)
    pool = engine.scheduler.kv_cache.pools[0]
    assert (pool.num_cached, pool.num_free) == (4, 1)
    add(engine, "A again", 9, 1)  # hits both of A's blocks, which are then the most recent, and takes the free one
    drain(engine)
    assert engine.executor.steps[-1] == [("A again", 8, 1)]
    add(engine, "C", 5, 1, 40)  # takes the block that is free again, and evicts the tail of B
    drain(engine)
    again = [add(engine, "B again", 8, 1, 20)]
    drain(engine)
    again.append(add(engine, "A at last", 9, 1))
    drain(engine)
    assert [r.metrics.num_cached_tokens for r in again] == [4, 8]


def test_without_the_prefix_cache_nothing_is_kept() -> None:
    engine = make()
    for name in ("A", "B"):
        request = add(engine, name, 8, 1)
        drain(engine)
        assert request.metrics.num_cached_tokens == 0
    assert engine.scheduler.kv_cache.pools[0].num_free == engine.num_blocks


def test_preempted_request_resumes_from_its_cached_blocks() -> None:
    engine = make(prefix_cache="hash", num_blocks=5, max_num_batched_tokens=8)
    add(engine, "A", 4, 6)
    b = add(engine, "B", 9, 3, 20)
    assert steps(engine) == [
        [("A", 0, 4), ("B", 0, 4)],
        [("A", 4, 1), ("B", 4, 5)],
        [("A", 5, 1), ("B", 9, 1)],
        [("A", 6, 1), ("B", 10, 1)],
        [("A", 7, 1)],
        [("A", 8, 1)],
    ]
    assert b.metrics.num_preemptions == 0

    engine = make(prefix_cache="hash", num_blocks=5, max_num_batched_tokens=8)
    add(engine, "A", 4, 6)
    b = add(engine, "B", 9, 6, 20)
    assert steps(engine)[4:] == [
        [("A", 7, 1), ("B", 11, 1)],
        [("A", 8, 1)],  # B gives up its three blocks, which stay cached, and A takes the last of them
        [("B", 8, 5)],
        [("B", 13, 1)],
    ]
    assert (b.metrics.num_preemptions, b.metrics.num_cached_tokens) == (1, 0)


def test_without_chunks_a_prompt_waits_until_it_fits_the_step() -> None:
    engine = make(enable_chunked_prefill=False, max_num_batched_tokens=12, max_model_len=12)
    add(engine, "A", 8, 3)
    add(engine, "B", 5, 2)
    add(engine, "C", 2, 1)  # would fit beside A, but came after B
    assert steps(engine) == [
        [("A", 0, 8)],
        [("A", 8, 1), ("B", 0, 5), ("C", 0, 2)],
        [("A", 9, 1), ("B", 5, 1)],
    ]


def test_statistics_of_a_step() -> None:
    engine = make(num_blocks=10, max_num_seqs=2, seconds_per_step=0.5)
    add(engine, "A", 5, 3)
    add(engine, "B", 1, 2)
    add(engine, "C", 3, 1)
    engine.step()
    stats = engine.last_step
    assert (stats.start_time, stats.end_time) == (0.0, 0.5)
    assert (stats.num_tokens, stats.num_decode_tokens) == (6, 1)
    assert (stats.num_running, stats.num_waiting, stats.num_preempted) == (2, 1, 0)
    assert (stats.blocks_in_use, stats.block_table_entries) == (3, 3)
    assert stats.kv.token_states == 6
    assert stats.kv.internal_fragmentation == 6
    assert (stats.kv.cached, stats.kv.free) == (0, 28)


def test_a_pool_of_one_token_is_refused() -> None:
    with pytest.raises(ValueError, match="the KV cache holds one token: give it more memory"):
        host_engine(num_blocks=1, block_size=1)


def test_step_without_requests_does_nothing() -> None:
    engine = make()
    assert engine.step() == []
    assert engine.last_step is None
    assert engine.executor.steps == []
