"""Prefixes that are cached: who finds them, what a hit is worth, and that no block is counted twice."""

from itertools import product

import hypothesis.strategies as st
import pytest
from cache_users import User, book, compute, grow, in_pool, lacking, make, parts
from hypothesis import given, settings

from paged_jax.kv_cache.manager import KVCacheManager
from paged_jax.kv_cache.prefix_cache import PrefixCache
from paged_jax.kv_cache.prefix_cache.hash import HashPrefixCache
from paged_jax.kv_cache.prefix_cache.none import NoPrefixCache
from paged_jax.kv_cache.prefix_cache.radix import RadixPrefixCache

both_caches = pytest.mark.parametrize("cache", [HashPrefixCache, RadixPrefixCache])


def found(manager: KVCacheManager, token_ids: list[int], salt: str = "") -> list[int]:
    """The cached blocks that a request with these tokens would take."""
    user = User(token_ids, salt)
    count = manager.num_cached_tokens(user)
    assert user.match is not None
    (blocks,) = user.match.block_ids
    assert len(blocks) * manager.block_size == count
    return blocks


@both_caches
@pytest.mark.parametrize(("length", "hits"), [(1, 0), (4, 0), (5, 1), (7, 1), (8, 1), (9, 2)])
def test_the_last_token_is_never_taken_from_the_cache(length: int, hits: int, cache: type[PrefixCache]) -> None:
    manager = make(8, prefix_cache=cache)
    first = User(list(range(length)))
    compute(manager, first)
    manager.free(first)
    again = User(list(range(length)))
    assert manager.num_cached_tokens(again) == 4 * hits
    assert manager.admit(again, 1)
    assert again.num_computed_tokens == 4 * hits
    assert again.blocks[:hits] == list(range(1, hits + 1))


@both_caches
def test_hit_blocks_are_not_counted_as_available_too(cache: type[PrefixCache]) -> None:
    manager = make(4, prefix_cache=cache)
    first = User(list(range(8)))
    compute(manager, first)
    manager.free(first)
    other = User(list(range(50, 57)))
    compute(manager, other)
    assert in_pool(manager) == (2, 2, 0)
    longer = User([*range(8), 90, 91])  # two hits and a new block, but the hits are all that is left
    before = parts(manager)
    assert not compute(manager, longer)
    assert (longer.block_tables, longer.num_computed_tokens) == ((), 0)
    assert parts(manager) == before
    manager.check_integrity([other], [longer])
    manager.free(other)
    assert compute(manager, longer)
    assert longer.num_computed_tokens == 10
    manager.check_integrity([longer], [])


def test_g02_a_hit_that_does_not_fit_waits_and_nothing_drifts() -> None:
    """vllm #11562 as it was reported: pool of 8, A 16 tokens, B 13 that grow to 16, C A's and 8 more."""
    manager = make(8)
    a, b, c = User(list(range(16))), User(list(range(50, 63))), User([*range(16), *range(80, 88)])
    compute(manager, a)
    manager.free(a)
    compute(manager, b)
    before = parts(manager)
    for _ in range(50):
        assert manager.num_cached_tokens(c) == 16
        assert not manager.admit(c, 8)
        assert parts(manager) == before
        manager.check_integrity([b], [c])
    assert grow(manager, b, 63, 64, 65)
    manager.free(b)
    assert manager.admit(c, 8)
    assert c.num_computed_tokens == 16
    assert c.blocks[:4] == [1, 2, 3, 4]
    manager.check_integrity([c], [])


@both_caches
def test_g02_whatever_the_lengths_a_request_is_admitted_exactly_if_it_fits(cache: type[PrefixCache]) -> None:
    """Blocks that nobody uses are free, or hits, or can be evicted: only those of others are in the way."""
    for ended, running, more, chunk in product(range(1, 17, 3), range(1, 15), range(1, 14, 3), (1, 99)):
        manager = make(5, block_size=3, prefix_cache=cache)
        a, b = User(list(range(ended))), User(list(range(50, 50 + running)))
        if not compute(manager, a):
            assert ended > 15
            continue
        manager.free(a)
        assert compute(manager, b)
        c = User([*a.token_ids, *range(100, 100 + more)])
        before = parts(manager)
        fits = -(-running // 3) + -(-(ended + more) // 3) <= 5
        cached = manager.num_cached_tokens(c)
        assert manager.admit(c, min(chunk, len(c.token_ids) - cached)) == fits
        if not fits:
            assert parts(manager) == before
        else:
            assert c.num_computed_tokens == cached
            assert manager.extend(c, lacking(c))
            book(manager, c, lacking(c))
            assert parts(manager)[0] == running + ended + more
        manager.check_integrity([b, c] if fits else [b], [])


@both_caches
def test_g03_shared_pages_are_counted_once_and_all_can_be_evicted(cache: type[PrefixCache]) -> None:
    """sglang #35270 as it was reported: pages of 4, prompts of 10 and 13 that share 6, one that shares 8, the first."""
    manager = make(6, prefix_cache=cache)
    first = list(range(10))
    prompts = [first, [*range(6), *range(50, 57)], [*range(8), *range(80, 83)], first]
    cached = [2, 4, 4, 4]  # 0-3 4-7, then 50-51.. twice, then nothing new
    for prompt, count in zip(prompts, cached, strict=True):
        user = User(prompt)
        assert compute(manager, user)
        manager.check_integrity([user], [])
        parts(manager)
        manager.free(user)
        manager.check_integrity([], [])
        assert in_pool(manager) == (0, count, 6 - count)
    whole = User(list(range(200, 224)))
    assert compute(manager, whole)
    assert in_pool(manager) == (6, 0, 0)
    assert manager.num_evicted == 4
    manager.check_integrity([whole], [])


@both_caches
@settings(max_examples=150)
@given(data=st.data())
def test_g03_whatever_prompts_share_no_block_is_counted_twice(cache: type[PrefixCache], data: st.DataObject) -> None:
    """Each cached content lies in one block; those that nobody uses are all that the running ones do not use."""
    size = data.draw(st.integers(1, 4))
    manager = make(10, size, prefix_cache=cache)
    running: list[User] = []
    ended: list[list[int]] = []
    for number in range(data.draw(st.integers(1, 12))):
        stem = data.draw(st.sampled_from([[], *ended]))
        prompt = [*stem[: data.draw(st.integers(0, len(stem)))], *range(100 * number, 100 * number + size + 1)]
        user = User(prompt[: 10 * size])
        if compute(manager, user):
            running.append(user)
            ended.append(user.token_ids)
        while running and data.draw(st.booleans()):
            manager.free(running.pop(data.draw(st.integers(0, len(running) - 1))))
        manager.check_integrity(running, [])
        used = {block for user in running for block in user.blocks}
        assert manager.pools[0].num_available == 10 - len(used)
        assert parts(manager)[0] == len(
            {(user.blocks[i // size], i % size) for user in running for i in range(user.num_computed_tokens)}
        )
    for user in running:
        manager.free(user)
    whole = User(list(range(-10 * size, 0)))
    assert compute(manager, whole)
    assert in_pool(manager) == (10, 0, 0)
    manager.check_integrity([whole], [])


@both_caches
def test_equal_content_is_cached_once(cache: type[PrefixCache]) -> None:
    manager = make(6, prefix_cache=cache)
    twins = [User(list(range(9))), User(list(range(9)))]
    for user in twins:  # both before either is computed
        assert manager.admit(user, 9)
    for user in twins:
        book(manager, user, 9)
    assert len(manager.caches[0]) == 2
    for user in twins:
        manager.free(user)
    assert in_pool(manager) == (0, 2, 4)
    manager.check_integrity([], [])


@both_caches
def test_a_block_is_found_only_behind_the_same_beginning(cache: type[PrefixCache]) -> None:
    manager = make(8, prefix_cache=cache)
    user = User([1, 2, 3, 4, 5, 6, 7, 8, 9])
    compute(manager, user)
    assert found(manager, [1, 2, 3, 4, 5, 6, 7, 8, 0]) == user.blocks[:2]
    assert found(manager, [0, 2, 3, 4, 5, 6, 7, 8, 0]) == []
    assert found(manager, [5, 6, 7, 8, 0]) == []
    assert found(manager, [1, 2, 3, 4, 5, 6, 7, 0, 0]) == user.blocks[:1]
    assert found(manager, user.token_ids, salt="x") == []


@both_caches
def test_blocks_are_found_as_soon_as_they_are_computed_and_not_before(cache: type[PrefixCache]) -> None:
    manager = make(8, prefix_cache=cache)
    user = User(list(range(12)))
    assert manager.admit(user, 12)
    assert user.next_publish == 4
    for computed, hits in [(3, 0), (4, 1), (7, 1), (11, 2), (12, 3)]:
        book(manager, user, computed - user.num_computed_tokens)
        assert found(manager, [*range(12), 0]) == user.blocks[:hits]
        assert user.next_publish == 4 * (hits + 1)


def test_what_was_found_is_asked_again_only_when_the_answer_may_be_another(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make(4)
    asked = []
    monkeypatch.setattr(
        manager.caches[0],
        "match",
        lambda user, count: asked.append(user) or HashPrefixCache.match(manager.caches[0], user, count),
    )
    waiting = User(list(range(9)))
    assert [manager.num_cached_tokens(waiting) for _ in range(3)] == [0, 0, 0]
    assert len(asked) == 1
    first = User(list(range(8)))
    compute(manager, first)  # something is cached now
    asked.clear()
    assert [manager.num_cached_tokens(waiting) for _ in range(3)] == [8, 8, 8]
    assert len(asked) == 1
    manager.free(first)
    assert manager.num_cached_tokens(waiting) == 8
    compute(manager, User(list(range(50, 61))))  # evicts the second
    asked.clear()
    assert [manager.num_cached_tokens(waiting) for _ in range(3)] == [4, 4, 4]
    manager.reset_prefix_cache()
    assert manager.num_cached_tokens(waiting) == 0
    assert len(asked) == 2


def test_a_request_that_comes_back_with_more_tokens_is_looked_up_again() -> None:
    manager = make(8)
    user = User(list(range(8)))
    assert manager.num_cached_tokens(user) == 0
    compute(manager, user)
    assert grow(manager, user, 8)
    manager.free(user)
    assert user.num_computed_tokens == 0
    assert manager.num_cached_tokens(user) == 8
    assert compute(manager, user)


def test_evicted_block_is_forgotten_and_its_successors_are_not_found() -> None:
    manager = make(4)
    user = User(list(range(12)))
    compute(manager, user)
    manager.free(user)
    other = User(list(range(50, 58)))
    compute(manager, other)  # the free block, and the tail of the chain
    assert found(manager, list(range(13))) == [1, 2]
    assert manager.num_evicted == 1
    manager.check_integrity([other], [])


@both_caches
def test_reset_keeps_the_blocks_of_those_who_run(cache: type[PrefixCache]) -> None:
    manager = make(6, prefix_cache=cache)
    ended, running = User(list(range(8))), User(list(range(50, 58)))
    compute(manager, ended)
    compute(manager, running)
    manager.free(ended)
    manager.reset_prefix_cache()
    assert in_pool(manager) == (2, 0, 4)
    assert [sorted(blocks) for blocks in manager.take_emptied()] == [[1, 2]]
    assert found(manager, [*range(50, 58), 0]) == []
    manager.check_integrity([running], [])


def test_what_follows_forgotten_blocks_is_found_once_they_are_back() -> None:
    manager = make(6)
    running = User(list(range(50, 58)))
    compute(manager, running)
    manager.reset_prefix_cache()
    assert grow(manager, running, *range(58, 62))
    manager.check_integrity([running], [])
    again = User(list(range(50, 59)))
    compute(manager, again)
    assert found(manager, list(range(50, 63))) == [*again.blocks[:2], running.blocks[2]]
    manager.free(running)
    manager.free(again)
    manager.check_integrity([], [])
    assert in_pool(manager)[1] == 3


def test_without_a_cache_nothing_is_found_or_kept() -> None:
    manager = make(4, prefix_cache=NoPrefixCache)
    user = User(list(range(9)))
    compute(manager, user)
    assert found(manager, list(range(9))) == []
    manager.free(user)
    assert in_pool(manager) == (0, 0, 4)
    with pytest.raises(RuntimeError, match="block 1 was never cached"):
        manager.caches[0].lock(1)
