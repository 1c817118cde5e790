"""Samples of one prompt share its blocks: which blocks, when they part, and what happens to the others."""

import pytest
from host_executor import host_engine
from requests_alone import Expectation
from watcher import Watcher

from paged_jax.engine.engine import Engine
from paged_jax.engine.request import Request, RequestStatus
from paged_jax.kv_cache.group import CacheGroup
from paged_jax.sampling.params import SamplingParams

type Copies = list[tuple[int, int]]


def make(**fields: object) -> tuple[Engine, Watcher]:
    engine = host_engine(**{"prefix_cache": "none", **fields})
    return engine, Watcher(engine)


def samples(watcher: Watcher, length: int, n: int, max_tokens: int, first: int = 0, **fields: object) -> Expectation:
    """n samples of a prompt of `length` tokens that count up from `first`."""
    params = SamplingParams(n=n, seed=7, max_tokens=max_tokens)
    return watcher.add(range(first, first + length), params, **fields)


def tables(x: Expectation, group: int = 0) -> list[list[int]]:
    return [list(request.block_tables[group].block_ids) for request in x.leader.samples if request.block_tables]


def copies(engine: Engine, group: int = 0) -> Copies:
    return list(engine.executor.plans[-1].copies[group])


def test_the_partial_block_is_copied_by_all_but_the_last_who_write_to_it() -> None:
    engine, watcher = make()
    x = samples(watcher, 6, n=3, max_tokens=4)
    pool = engine.scheduler.kv_cache.pools[0]
    watcher.step()
    assert tables(x) == [[1, 2]] * 3
    assert [pool.ref_count(block) for block in (1, 2)] == [3, 3]
    assert [r.num_output_tokens for r in x.leader.samples] == [1, 1, 1]
    assert copies(engine) == []
    watcher.step()
    assert copies(engine) == [(2, 3), (2, 4)]
    assert tables(x) == [[1, 3], [1, 4], [1, 2]]
    assert [pool.ref_count(block) for block in (1, 2, 3, 4)] == [3, 1, 1, 1]
    assert engine.last_step.num_copied == 2
    watcher.step()
    assert copies(engine) == []
    watcher.step()  # the last: each takes a third block, and has ended
    assert sum(plan.num_tokens for plan in engine.executor.plans) == 6 + 3 * 3
    watcher.drain()


@pytest.mark.parametrize("n", [2, 3, 4])
def test_full_blocks_are_shared_and_nothing_is_copied(n: int) -> None:
    engine, watcher = make()
    x = samples(watcher, 8, n=n, max_tokens=5)
    watcher.step()
    assert tables(x) == [[1, 2]] * n
    watcher.step()
    assert tables(x) == [[1, 2, 3 + i] for i in range(n)]
    assert engine.scheduler.kv_cache.pools[0].num_in_use == 2 + n
    watcher.drain()
    assert not any(pairs for plan in engine.executor.plans for pairs in plan.copies)


def test_blocks_of_one_token_are_never_copied() -> None:
    engine, watcher = make(block_size=1)
    x = samples(watcher, 3, n=2, max_tokens=3)
    watcher.step()
    watcher.step()
    assert tables(x) == [[1, 2, 3, 4], [1, 2, 3, 5]]
    watcher.drain()
    assert not any(pairs for plan in engine.executor.plans for pairs in plan.copies)


def test_each_group_of_layers_has_its_own_copies() -> None:
    groups = (CacheGroup(1, 1, 1), CacheGroup(3, 1, 1, sliding_window=3))
    engine, watcher = make(groups=groups)
    x = samples(watcher, 10, n=2, max_tokens=4)
    watcher.step()
    assert [tables(x, group) for group in (0, 1)] == [[[1, 2, 3]] * 2] * 2
    watcher.step()  # the query at position 10 sees 8 to 10: blocks 1 and 2 have left the window
    assert tables(x, 0) == [[1, 2, 4], [1, 2, 3]]
    assert tables(x, 1) == [[0, 0, 4], [0, 0, 3]]
    assert [copies(engine, group) for group in (0, 1)] == [[(3, 4)]] * 2
    watcher.drain()


def test_blocks_are_free_when_the_last_sample_leaves_them() -> None:
    engine, watcher = make()
    first = samples(watcher, 8, n=3, max_tokens=12)
    alone = [tokens for tokens, _ in first.outputs]
    watcher.drain()
    # what sample 1 says third ends it, and sample 0's fifth token ends that
    stops = [alone[1][2], alone[0][4]]
    params = SamplingParams(n=3, seed=7, max_tokens=12, stop_token_ids=stops)
    x = watcher.add(range(8), params)
    lengths = [len(tokens) for tokens, _ in x.outputs]
    assert lengths == [5, 3, 12]
    pool = engine.scheduler.kv_cache.pools[0]
    seen = []
    while watcher.live:
        watcher.step()
        running = [r for r in x.leader.samples if r.status is RequestStatus.RUNNING]
        seen.append((len(running), pool.ref_count(tables(x)[0][0]) if running else 0, pool.num_in_use))
    # (running, users of the first block, blocks in use): the prompt fills two blocks, outputs one and then two each
    assert seen == [(3, 3, 2), (3, 3, 5), (2, 2, 4), (2, 2, 4), (1, 1, 3), (1, 1, 4)] + [(1, 1, 4)] * 3 + [
        (1, 1, 5)
    ] * 2 + [(0, 0, 0)]


def test_a_group_waits_for_as_many_slots_as_it_has_samples() -> None:
    engine, watcher = make(max_num_seqs=4)
    short, long = samples(watcher, 3, 1, 2), samples(watcher, 3, 1, 4, first=20)
    group = samples(watcher, 3, 3, 2, first=40)
    behind = samples(watcher, 3, 1, 1, first=60)
    watcher.step()
    assert group.leader.slot is None  # two slots are free
    assert behind.leader.slot is None
    watcher.step()
    assert short in watcher.ended
    watcher.step()
    assert sorted(r.slot for r in (*group.leader.samples, long.leader)) == [0, 1, 2, 3]
    assert engine.executor.steps[-1] == [("1", 4, 1), ("2", 0, 3)]
    watcher.drain()


def test_samples_have_their_slots_while_the_prompt_is_computed() -> None:
    engine, watcher = make(max_num_batched_tokens=4, max_num_seqs=4)
    group = samples(watcher, 10, 3, 2)
    mates = [samples(watcher, 2, 1, 3, first=20 * i) for i in (1, 2)]
    watcher.step()
    assert sorted(r.slot for r in group.leader.samples) == [0, 1, 2]
    assert group.leader.pending_samples == group.leader.samples[1:]
    watcher.step()
    watcher.step()
    assert [r.num_output_tokens for r in group.leader.samples] == [1, 1, 1]
    assert not group.leader.pending_samples
    assert mates[1].leader.slot is None
    watcher.drain()
    assert [len(plan.forks) for plan in engine.executor.plans].count(2) == 1


def test_who_finds_no_block_for_a_copy_writes_alone_when_the_others_have_given_way() -> None:
    # two blocks hold the prompt, and there are no more
    engine, watcher = make(num_blocks=2)
    x = samples(watcher, 6, n=2, max_tokens=2)
    leader, child = x.leader.samples
    watcher.step()
    assert tables(x) == [[1, 2]] * 2
    watcher.step()
    assert copies(engine) == []
    assert engine.executor.plans[-1].preempted == [child]
    assert (leader.num_output_tokens, leader.is_finished) == (2, True)
    watcher.drain()
    assert child.metrics.num_preemptions == 1
    assert engine.executor.steps[-1] == [("0", 0, 7)]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_copy_that_is_planned_for_a_victim_is_not_made(mode: str) -> None:
    # the leader takes the last block for its copy; then the mate wants one, and the leader gives way after all
    swap = {"num_swap_blocks": 8} if mode == "swap" else {}
    engine, watcher = make(
        num_blocks=4, preemption_mode=mode, victim_policy="victim_policies:FirstArrivedVictim", **swap
    )
    x = samples(watcher, 6, n=2, max_tokens=3)
    mate = samples(watcher, 4, n=1, max_tokens=3, first=50)
    watcher.step()
    assert tables(x) == [[1, 2]] * 2
    watcher.step()
    plan = engine.executor.plans[-1]
    assert plan.preempted == [x.leader]
    assert copies(engine) == []
    assert tables(x) == [[1, 2]]
    assert engine.executor.steps[-1] == [("1", 4, 1), ("0", 6, 1)]
    if mode == "swap":
        (swapped,) = plan.swap_outs
        assert swapped.device_blocks == ((1, 2),)  # from where its tokens still are
    watcher.drain()
    assert mate in watcher.ended


def test_a_leader_that_is_preempted_before_the_fork_takes_its_samples_with_it() -> None:
    engine, watcher = make(num_blocks=5, max_num_batched_tokens=6, max_num_seqs=4, victim_policy="lowest_priority")
    urgent = samples(watcher, 4, 1, 14)
    group = samples(watcher, 16, 3, 3, first=30, priority=1)
    watcher.step()
    assert all(r.slot is not None for r in group.leader.samples)
    while not group.leader.metrics.num_preemptions:
        watcher.step()
        assert group.leader.num_output_tokens == 0, "it was to be preempted before the fork"
    assert [r.slot for r in group.leader.samples] == [None] * 3
    assert group.leader.pending_samples == group.leader.samples[1:]
    watcher.drain()
    assert urgent in watcher.ended
    forks = [fork for plan in engine.executor.plans for fork in plan.forks]
    assert [fork.child for fork in forks] == list(group.leader.samples[1:])


def test_a_leader_that_is_preempted_after_the_fork_comes_back_to_the_shared_blocks() -> None:
    engine, watcher = make(num_blocks=6, prefix_cache="hash", victim_policy="victim_policies:FirstArrivedVictim")
    x = samples(watcher, 8, n=2, max_tokens=9)
    mate = samples(watcher, 7, n=1, max_tokens=4, first=50)
    leader, child = x.leader.samples
    watcher.step()
    watcher.step()  # two shared blocks, one for each of the samples, and two for the mate
    assert tables(x) == [[1, 2, 5], [1, 2, 6]]
    watcher.step()
    assert tables(mate) != []
    while not leader.metrics.num_preemptions:
        watcher.step()
    assert child.status is RequestStatus.RUNNING
    assert engine.scheduler.kv_cache.num_cached_tokens(leader) >= 8
    while leader.slot is None:
        watcher.step()
    first, second = tables(x)
    assert first[:2] == second[:2] == [1, 2]
    watcher.drain()


def test_rows_of_samples_that_have_ended_stay_in_a_static_batch() -> None:
    engine, watcher = make(batching="static", max_num_seqs=3)
    alone = [tokens for tokens, _ in samples(watcher, 6, 3, 9).outputs]
    watcher.drain()
    count = len(engine.executor.plans)
    x = watcher.add(range(6), SamplingParams(n=3, seed=7, max_tokens=9, stop_token_ids=[alone[2][1]]))
    late = samples(watcher, 3, 1, 1, first=40)
    assert [len(tokens) for tokens, _ in x.outputs] == [9, 9, 2]
    for _ in range(9):
        assert late.leader.slot is None
        watcher.step()
        assert x in watcher.live or engine.executor.plans[-1].idle
    plans = engine.executor.plans[count:]
    assert [len(plan.idle) for plan in plans] == [0, 0] + [1] * 7
    assert [len(plan.copies[0]) for plan in plans] == [0, 2] + [0] * 7
    watcher.drain()
    assert late in watcher.ended


def test_samples_have_runs_of_their_own_when_memory_is_reserved() -> None:
    engine, watcher = make(allocator="reserve_max", num_blocks=16, max_model_len=16)
    x = samples(watcher, 6, n=3, max_tokens=3)
    watcher.step()
    assert tables(x) == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    watcher.step()
    assert copies(engine) == [(1, 5), (2, 6), (1, 9), (2, 10)]
    assert tables(x) == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    watcher.drain()


def test_a_sample_without_a_run_computes_the_prompt_again_when_there_is_one() -> None:
    engine, watcher = make(allocator="reserve_max", num_blocks=8, max_model_len=16)
    x = samples(watcher, 6, n=3, max_tokens=3)
    watcher.step()
    assert tables(x) == [[1, 2, 3, 4], [5, 6, 7, 8]]
    third = x.leader.samples[2]
    assert (third.status, third.slot, third.num_output_tokens) == (RequestStatus.PREEMPTED, None, 1)
    watcher.step()
    watcher.step()
    watcher.step()
    assert engine.executor.steps[-1] == [("0", 0, 7)]
    assert tables(x) == [[1, 2, 3, 4]]
    watcher.drain()


def test_one_sample_after_the_other_where_the_pool_holds_only_one() -> None:
    engine, watcher = make(num_blocks=5, block_size=2, max_num_seqs=4)
    x = samples(watcher, 5, n=4, max_tokens=6)
    watcher.drain()
    assert [r.finish_reason for r in x.leader.samples] == ["length"] * 4
    preempted: list[Request] = [r for plan in engine.executor.plans for r in plan.preempted]
    assert len(preempted) >= 3
    assert x.leader not in preempted  # the first to arrive is the last to give way
