"""Each eviction policy on hand-computed cases; Belady's has its own file."""

from collections.abc import Callable

import pytest
from eviction_calls import insert, pop_all, release

from paged_jax.kv_cache.eviction import Eviction
from paged_jax.kv_cache.eviction.belady import BeladyEviction
from paged_jax.kv_cache.eviction.cost import EQUAL_CONTEXT, CostEviction
from paged_jax.kv_cache.eviction.fifo import FIFOEviction
from paged_jax.kv_cache.eviction.lfu import LFUEviction
from paged_jax.kv_cache.eviction.lru import LRUEviction

ONLINE = [LRUEviction, LFUEviction, FIFOEviction, CostEviction]


def test_lru_gives_up_what_was_released_first() -> None:
    eviction = LRUEviction()
    insert(eviction, 1, 2, 3)
    release(eviction, 3, 1, 2)
    eviction.remove(3)
    release(eviction, 3)
    assert pop_all(eviction) == [1, 2, 3]


def test_lru_remembers_the_last_use_of_what_becomes_a_candidate_later() -> None:
    eviction = LRUEviction()
    insert(eviction, 1, 2, 3)
    eviction.use(1)  # something still depends on it
    release(eviction, 2, 3)
    eviction.add(1)
    assert pop_all(eviction) == [1, 2, 3]


def test_lfu_gives_up_what_was_found_least_then_what_was_released_first() -> None:
    eviction = LFUEviction()
    insert(eviction, 1, 2, 3, 4)
    for block in (1, 1, 4, 2):
        eviction.hit([block])
    release(eviction, 4, 3, 2, 1)
    assert eviction.pop() == 3
    eviction.hit([4])  # found while nobody used it: 2 is now found least
    assert pop_all(eviction) == [2, 4, 1]


def test_lfu_counts_anew_when_a_block_holds_something_else() -> None:
    eviction = LFUEviction()
    insert(eviction, 1, 2)
    for block in (1, 1, 2):
        eviction.hit([block])
    release(eviction, 1)
    assert eviction.pop() == 1
    insert(eviction, 1)
    release(eviction, 2, 1)
    assert pop_all(eviction) == [1, 2]


def test_fifo_gives_up_what_was_cached_first_whatever_happened_since() -> None:
    eviction = FIFOEviction()
    insert(eviction, 2, 1, 3)
    eviction.hit([2])
    release(eviction, 3, 1, 2)
    eviction.remove(2)
    release(eviction, 2)
    assert pop_all(eviction) == [2, 1, 3]


def test_cost_gives_up_what_is_cheapest_to_recompute() -> None:
    eviction = CostEviction()
    insert(eviction, 1, index=EQUAL_CONTEXT)  # 2
    insert(eviction, 2, index=0)  # 1
    insert(eviction, 3, index=EQUAL_CONTEXT // 2)  # 1.5
    release(eviction, 1, 2, 3)
    assert pop_all(eviction) == [2, 3, 1]


def test_cost_ages_what_is_not_used() -> None:
    eviction = CostEviction()
    insert(eviction, 1, index=EQUAL_CONTEXT)  # costs 2
    insert(eviction, 2, 3, 4, 5)  # cost 1
    release(eviction, 1, 2)  # 1 at 0 + 2, 2 at 0 + 1
    assert eviction.pop() == 2  # the clock is 1
    release(eviction, 3)  # at 1 + 1, as 1 is, which was used before
    assert eviction.pop() == 1  # the clock is 2
    release(eviction, 4)  # at 2 + 1
    assert eviction.pop() == 3
    release(eviction, 5)
    assert pop_all(eviction) == [4, 5]


def test_cost_never_sets_the_clock_back() -> None:
    eviction = CostEviction()
    insert(eviction, 1, 3)  # cost 1
    insert(eviction, 2, index=3 * EQUAL_CONTEXT)  # costs 4
    insert(eviction, 4, index=2 * EQUAL_CONTEXT)  # costs 3
    eviction.use(1)  # at 1, a candidate only when 2 is gone, which depends on it
    release(eviction, 2)  # at 4
    assert eviction.pop() == 2  # the clock is 4
    eviction.add(1)
    release(eviction, 3)  # at 4 + 1
    assert eviction.pop() == 1  # the clock is 4 still
    release(eviction, 4)  # at 4 + 3
    assert pop_all(eviction) == [3, 4]


@pytest.mark.parametrize("make", [*ONLINE, BeladyEviction])
def test_candidates_are_those_added_and_not_removed(make: Callable[[], Eviction]) -> None:
    eviction = make()
    if isinstance(eviction, BeladyEviction):
        eviction.set_future([])
    insert(eviction, 1, 2, 3, 4)
    release(eviction, 4, 2, 1)
    eviction.remove(2)
    eviction.forget(4)
    eviction.forget(3)
    assert (list(eviction), len(eviction)) == ([1], 1)
    assert eviction.pop() == 1
    assert not len(eviction)
    with pytest.raises(RuntimeError, match="no block"):
        eviction.pop()


@pytest.mark.parametrize("make", ONLINE)
def test_stale_entries_are_bounded(make: Callable[[], Eviction]) -> None:
    eviction = make()
    insert(eviction, 1, 2)
    release(eviction, 1)
    for _ in range(10_000):
        release(eviction, 2)
        eviction.remove(2)
    assert len(eviction._heap) < 200  # type: ignore[attr-defined]
    assert pop_all(eviction) == [1]


@pytest.mark.parametrize("make", ONLINE)
def test_dropping_stale_entries_keeps_the_order(make: Callable[[], Eviction]) -> None:
    eviction = make()
    insert(eviction, *range(1, 21))
    for block in range(1, 21):
        eviction.use(block)
    for block in range(19, 0, -1):  # unlike the order in which they go
        eviction.add(block)
    for _ in range(200):
        eviction.add(20)
        eviction.remove(20)
    assert pop_all(eviction) == list(range(1, 20))
