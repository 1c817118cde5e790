"""Belady's policy by hand, and against the best that any choice of victims could do."""

from collections.abc import Callable, Hashable, Sequence
from functools import cache

import pytest
from eviction_calls import insert, pop_all, release
from hypothesis import given, settings
from hypothesis import strategies as st
from prefix_users import BLOCK_SIZE, User

from paged_jax.kv_cache.block_table import BlockTable
from paged_jax.kv_cache.eviction import Eviction
from paged_jax.kv_cache.eviction.belady import BeladyEviction
from paged_jax.kv_cache.eviction.cost import CostEviction
from paged_jax.kv_cache.eviction.fifo import FIFOEviction
from paged_jax.kv_cache.eviction.lfu import LFUEviction
from paged_jax.kv_cache.eviction.lru import LRUEviction
from paged_jax.kv_cache.prefix_cache import PrefixCache
from paged_jax.kv_cache.prefix_cache.hash import HashPrefixCache, content_keys
from paged_jax.kv_cache.prefix_cache.radix import RadixPrefixCache

ONLINE = [LRUEviction, LFUEviction, FIFOEviction, CostEviction]


def test_belady_gives_up_what_is_needed_last() -> None:
    eviction = BeladyEviction()
    insert(eviction, 1, 2, 3, 4)
    eviction.set_future([["content 2"], ["content 1", "content 4"], ["content 2"]])
    release(eviction, 1, 2, 3, 4)
    assert eviction.pop() == 3  # never
    eviction.advance()
    assert eviction.pop() == 2  # once more, after the others
    assert eviction.pop() in (1, 4)


def test_belady_gives_up_the_end_of_a_prompt_before_its_beginning() -> None:
    eviction = BeladyEviction()
    for index, block in enumerate((3, 1, 2)):
        insert(eviction, block, index=index)
    release(eviction, 3, 1, 2)
    eviction.set_future([["content 3", "content 1"]])
    assert pop_all(eviction) == [2, 1, 3]


def test_belady_may_learn_the_future_late() -> None:
    eviction = BeladyEviction()
    insert(eviction, 1, 2, 3)
    release(eviction, 1, 2, 3)
    eviction.set_future([["content 1"], ["content 2"]])
    assert pop_all(eviction) == [3, 2, 1]


def test_belady_keeps_no_notes_of_contents_that_are_gone() -> None:
    eviction = BeladyEviction()
    eviction.set_future([])
    for content in range(100):
        eviction.insert(1, 0, lambda content=content: content)
        release(eviction, 1)
        assert eviction.pop() == 1
    assert not eviction._blocks


def test_belady_refuses_to_choose_without_a_future() -> None:
    eviction = BeladyEviction()
    insert(eviction, 1)
    release(eviction, 1)
    with pytest.raises(RuntimeError, match="set_future"):
        eviction.pop()
    with pytest.raises(RuntimeError, match="future"):
        eviction.advance()
    eviction.set_future([])
    assert eviction.pop() == 1
    with pytest.raises(RuntimeError, match="future"):
        eviction.advance()


def misses(
    make_cache: Callable[[int, Eviction], PrefixCache],
    make: Callable[[], Eviction],
    prompts: Sequence[Sequence[int]],
    capacity: int,
) -> int:
    """Blocks that had to be computed, with prompts one after another, each of which needs all its blocks at once."""
    eviction = make()
    cache = make_cache(BLOCK_SIZE, eviction)
    if isinstance(eviction, BeladyEviction):
        eviction.set_future([content_keys(prompt, BLOCK_SIZE) for prompt in prompts])
    free, missed = list(range(1, capacity + 1)), 0
    for prompt in prompts:
        user, count = User(list(prompt)), len(prompt) // BLOCK_SIZE
        table = BlockTable(cache.match(user, count))
        if isinstance(eviction, BeladyEviction):
            eviction.advance()
        cache.hit(table.block_ids)
        for block in table.block_ids:
            cache.lock(block)
        for index in range(len(table), count):
            table.block_ids.append(free.pop() if free else cache.evict())
            # a block beyond a gap may be cached already: the new one then holds the same and is free in the end
            cache.insert(user, table, index)
            missed += 1
        for block in reversed(table.block_ids):
            if block in cache:
                cache.unlock(block)
            else:
                free.append(block)
        cache.check()
    return missed


def fewest_misses(references: Sequence[Hashable], capacity: int) -> int:
    """The least that any choice of victims gets, by trying all."""

    @cache
    def best(position: int, held: frozenset[Hashable]) -> int:
        if position == len(references):
            return 0
        now = references[position]
        if now in held:
            return best(position + 1, held)
        if len(held) < capacity:
            return 1 + best(position + 1, held | {now})
        return 1 + min(best(position + 1, held - {victim} | {now}) for victim in held)

    return best(0, frozenset())


def test_belady_on_a_reference_string_computed_by_hand() -> None:
    # 1 2 3 enter; 4 replaces 3 (needed last); 1 2 hit; 5 replaces 4 (never again); 1 2 hit; 3 replaces 1 or 2 (never);
    # 4 replaces another; 5 hits: 7 misses, where LRU has 10 and FIFO 9 (Belady, Nelson and Shedler's string)
    prompts = [[x, x] for x in (1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 5)]
    counts = [misses(HashPrefixCache, make, prompts, 3) for make in (BeladyEviction, LRUEviction, FIFOEviction)]
    assert counts == [7, 10, 9]


@settings(max_examples=150)
@given(st.lists(st.integers(0, 4), max_size=12), st.integers(1, 3))
def test_belady_misses_no_more_than_the_best_choice(references: list[int], capacity: int) -> None:
    prompts = [[x, x] for x in references]
    best = fewest_misses(references, capacity)
    for make_cache in (HashPrefixCache, RadixPrefixCache):
        assert misses(make_cache, BeladyEviction, prompts, capacity) == best
        for make in ONLINE:
            assert misses(make_cache, make, prompts, capacity) >= best


@settings(max_examples=150)
@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), max_size=14),
    st.integers(3, 6),
    st.sampled_from([HashPrefixCache, RadixPrefixCache]),
)
def test_no_policy_misses_less_than_belady_on_longer_prompts(
    prompts: list[list[int]], capacity: int, make_cache: Callable[[int, Eviction], PrefixCache]
) -> None:
    doubled = [[x for block in prompt for x in (block, block)] for prompt in prompts]
    best = misses(make_cache, BeladyEviction, doubled, capacity)
    assert best >= len({tuple(prompt[:length]) for prompt in prompts for length in range(1, len(prompt) + 1)})
    for make in ONLINE:
        assert misses(make_cache, make, doubled, capacity) >= best
