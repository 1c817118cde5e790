"""Runs of blocks: aligned, disjoint, joined again; compared with a bitmap that knows nothing of halves."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paged_jax.kv_cache.buddy import BuddyPool


def test_the_rest_of_a_run_is_halved_and_the_shortest_that_fits_is_cut_first() -> None:
    pool = BuddyPool(16)
    assert pool.allocate(3) == [1, 2, 3, 4]  # 16 = 4 + 4 + 8
    assert pool.allocate(1) == [5]  # of the four at 5, not of the eight at 9
    assert pool.allocate(8) == list(range(9, 17))
    assert pool.allocate(2) == [7, 8]
    assert (pool.num_free, pool.num_in_use, pool.num_available, pool.num_cached) == (1, 15, 1, 0)
    assert [pool.ref_count(b) for b in range(1, 17)] == [1] * 5 + [0] + [1] * 10
    pool.check([[1, 2, 3, 4], [5], list(range(9, 17)), [7, 8]])


def test_of_runs_of_one_length_the_lowest_is_cut() -> None:
    pool = BuddyPool(8)
    runs = [pool.allocate(2) for _ in range(4)]
    pool.free(runs[2])
    pool.free(runs[1])
    assert pool.allocate(2) == [3, 4]
    assert pool.allocate(1) == [5]


def test_many_free_runs_of_one_length_go_in_order_of_their_ids() -> None:
    pool = BuddyPool(16)
    runs = [pool.allocate(1) for _ in range(16)]
    for run in (runs[i] for i in (9, 3, 13, 1, 11, 5)):
        pool.free(run)
    assert [pool.allocate(1)[0] for _ in range(3)] == [2, 4, 6]
    pool.free(runs[4])
    assert [pool.allocate(1)[0] for _ in range(4)] == [5, 10, 12, 14]


def test_a_pool_of_any_size_begins_as_a_run_for_each_bit() -> None:
    pool = BuddyPool(13)
    assert pool.longest_run == 8
    assert pool.allocate(1) == [13]
    assert pool.allocate(4) == [9, 10, 11, 12]
    assert pool.allocate(8) == list(range(1, 9))
    assert not pool.has_run(1)


def test_free_neighbours_that_are_not_halves_of_one_run_are_not_joined() -> None:
    pool = BuddyPool(8)
    runs = [pool.allocate(2) for _ in range(4)]
    assert pool.free(runs[1]) == [3, 4]
    pool.free(runs[2])
    assert (pool.num_free, pool.has_run(2), pool.has_run(3)) == (4, True, False)
    with pytest.raises(RuntimeError, match="a run of 3 blocks wanted"):
        pool.allocate(3)
    pool.free(runs[0])
    assert pool.has_run(4)
    pool.free(runs[3])
    assert pool.has_run(8)


@pytest.mark.parametrize("blocks", [[1, 2], [2, 3, 4, 5], [1, 2, 3, 4, 5], [5], [3, 4]])
def test_only_a_whole_run_in_use_is_taken_back(blocks: list[int]) -> None:
    pool = BuddyPool(8)
    run = pool.allocate(4)
    with pytest.raises(RuntimeError, match=rf"blocks {blocks[0]} to {blocks[-1]} are no run in use"):
        pool.free(blocks)
    pool.check([run])
    pool.free(run)
    with pytest.raises(RuntimeError, match="blocks 1 to 4 are no run in use"):
        pool.free(run)


def test_a_run_has_one_owner() -> None:
    pool = BuddyPool(4)
    run = pool.allocate(2)
    pool.share([])
    with pytest.raises(RuntimeError, match="block 1 is part of a run"):
        pool.share(run)
    with pytest.raises(AssertionError, match="block tables are not the runs in use"):
        pool.check([run, run])
    with pytest.raises(AssertionError, match="block tables are not the runs in use"):
        pool.check([])
    with pytest.raises(AssertionError, match="not contiguous"):
        pool.check([[2, 1]])


class BuddyMachine(RuleBasedStateMachine):
    """Against a bitmap: a run of 2^k blocks can be had if and only if 2^k aligned ones in a row are free."""

    @initialize(num_blocks=st.one_of(st.integers(1, 70), st.sampled_from([64, 127, 128, 129])))
    def start(self, num_blocks: int) -> None:
        self.pool = BuddyPool(num_blocks)
        self.used = [False] * num_blocks
        self.runs: list[list[int]] = []

    @rule(count=st.one_of(st.integers(1, 3), st.integers(1, 40)))
    def allocate(self, count: int) -> None:
        length = 1
        while length < count:
            length *= 2
        free = [
            start
            for start in range(0, len(self.used) - length + 1, length)
            if not any(self.used[start : start + length])
        ]
        assert self.pool.has_run(count) == bool(free)
        assert self.pool.run_length(count) == length
        if not free:
            with pytest.raises(RuntimeError, match="the caller must check first"):
                self.pool.allocate(count)
            return
        run = self.pool.allocate(count)
        start = run[0] - 1
        assert run == list(range(start + 1, start + 1 + length))
        assert start in free

        def enclosing(begin: int) -> int:
            """Length of the longest free aligned run around the one that begins here."""
            size = length
            while True:
                first = begin // (2 * size) * (2 * size)
                if first + 2 * size > len(self.used) or any(self.used[first : first + 2 * size]):
                    return size
                size *= 2

        assert start == min(free, key=lambda begin: (enclosing(begin), begin))
        self.used[start : start + length] = [True] * length
        self.runs.append(run)

    @precondition(lambda self: self.runs)
    @rule(which=st.integers(0, 10**6))
    def free(self, which: int) -> None:
        run = self.runs.pop(which % len(self.runs))
        assert self.pool.free(run) == run
        self.used[run[0] - 1 : run[-1]] = [False] * len(run)

    @precondition(lambda self: self.runs)
    @rule(order=st.randoms(use_true_random=False))
    def free_all(self, order: object) -> None:
        order.shuffle(self.runs)
        for run in self.runs:
            self.pool.free(run)
        self.runs = []
        self.used = [False] * len(self.used)
        # the runs that the pool began with, and nothing else
        fresh, left = BuddyPool(len(self.used)), len(self.used)
        while left:
            longest = max(k for k in range(1, left + 1) if self.pool.has_run(k))
            assert fresh.has_run(longest)
            self.runs.append(self.pool.allocate(longest))
            assert self.runs[-1] == fresh.allocate(longest)
            left -= longest
        for run in self.runs:
            self.pool.free(run)
        self.runs = []

    @invariant()
    def agrees(self) -> None:
        self.pool.check(self.runs)
        assert self.pool.num_in_use == sum(self.used)
        assert [self.pool.ref_count(b + 1) for b in range(len(self.used))] == self.used


BuddyMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBuddyMachine = BuddyMachine.TestCase
