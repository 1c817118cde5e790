"""Sliding windows: which blocks are held, when they are given up, and what a hit needs of them."""

from itertools import cycle
from math import gcd

import hypothesis.strategies as st
import pytest
from cache_users import FULL, User, book, compute, lacking, make, parts, step, windowed
from hypothesis import given, settings

from paged_jax.kv_cache.group import CacheGroup
from paged_jax.kv_cache.manager import KVCacheManager
from paged_jax.kv_cache.prefix_cache.none import NoPrefixCache


def num_common(one: User, other: User) -> int:
    """Length of their common beginning."""
    pairs = enumerate(zip(one.token_ids, other.token_ids, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one.token_ids), len(other.token_ids)))


def test_block_table_by_hand() -> None:
    """Window of 5, blocks of 4: the query at position p sees keys from p - 4 on."""
    manager = make(5, groups=[windowed(5)], prefix_cache=NoPrefixCache)
    user = User(list(range(40)))
    assert manager.max_chunk == 12
    assert manager.admit(user, 6)
    book(manager, user, 6)
    assert user.blocks == [1, 2]
    for count, table in [
        (2, [1, 2]),  # position 6 sees 2 to 6
        (1, [0, 2, 1]),  # position 8 sees 4 to 8
        (3, [0, 2, 1]),
        (12, [0, 0, 1, 2, 3, 4]),  # position 12 sees 8 to 12, and the chunk is three blocks
        (4, [0, 0, 0, 0, 0, 4, 1]),  # position 24 sees 20 to 24
        (7, [0, 0, 0, 0, 0, 0, 1, 4, 2]),
    ]:
        assert step(manager, user, count)
        assert user.blocks == table
        manager.check_integrity([user], [])
    assert user.num_computed_tokens == 35
    # 3 blocks of 5 hold 4 + 4 + 3 tokens
    assert parts(manager) == (11, 1, 0, 8)
    manager.free(user)
    assert parts(manager) == (0, 0, 0, 20)


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 9, 16])
def test_a_block_is_held_exactly_while_a_later_query_sees_it(window: int, size: int) -> None:
    manager = make(60, size, groups=[windowed(window)])
    user = User(list(range(100)))
    assert manager.admit(user, 1)
    book(manager, user, 1)
    for count in [1, 2, 3, 1, 7, 1, 1, 1, 5, 16, *[1] * 20]:
        first_query = user.num_computed_tokens
        assert manager.extend(user, count)
        seen = {key // size for key in range(max(0, first_query - window + 1), first_query + count)}
        held = {index for index, block in enumerate(user.blocks) if block}
        assert held == seen
        assert len(set(user.blocks) - {0}) == len(held)
        book(manager, user, count)
        manager.check_integrity([user], [])
        assert parts(manager)[0] == user.num_computed_tokens - size * (len(user.blocks) - len(held))


def test_what_left_the_window_stays_cached_if_it_was_published() -> None:
    manager = make(6, groups=[windowed(5)])
    user = User(list(range(20)))
    assert manager.admit(user, 8)
    book(manager, user, 8)
    assert step(manager, user, 4)
    assert user.blocks == [0, 2, 3]
    assert parts(manager) == (8, 0, 4, 12)  # the first block is cached
    assert manager.take_emptied() == ([],)
    assert manager.num_cached_tokens(User(list(range(5)))) == 4
    manager.reset_prefix_cache()
    assert manager.take_emptied() == ([1],)
    assert step(manager, user, 4)
    assert user.blocks[:2] == [0, 0]
    assert manager.take_emptied() == ([2],)  # no longer known, so it is empty
    manager.check_integrity([user], [])


def test_a_hit_needs_only_what_the_window_sees() -> None:
    manager = make(6, groups=[windowed(5)])
    first = User(list(range(17)))
    assert manager.admit(first, 8)
    book(manager, first, 8)
    for count in (4, 4, 1):
        assert step(manager, first, count)
    assert first.blocks == [0, 0, 0, 4, 5]
    manager.free(first)
    assert parts(manager) == (0, 0, 16, 8)
    other = User(list(range(50, 66)))
    compute(manager, other)  # the free ones, and the first two blocks, which were given up first
    assert manager.num_evicted == 2
    manager.free(other)
    # the query at 12 sees 8 to 12; that at 4 sees the first block, which is gone
    assert manager.num_cached_tokens(User(list(range(16)))) == 12
    assert manager.num_cached_tokens(User(list(range(8)))) == 0
    again = User(list(range(17)))
    assert manager.num_cached_tokens(again) == 16
    assert manager.admit(again, 1)
    # the query at 16 sees 12 to 16
    assert again.blocks[:4] == [0, 0, 0, 4]
    assert again.num_computed_tokens == 16
    manager.check_integrity([again], [])
    book(manager, again, 1)
    manager.free(again)
    manager.check_integrity([], [])


def test_only_the_hits_that_are_taken_count_as_not_available() -> None:
    manager = make(4, groups=[windowed(5)])
    first = User(list(range(16)))
    compute(manager, first)
    manager.free(first)
    assert parts(manager) == (0, 0, 16, 0)
    longer = User(list(range(24)))
    assert manager.admit(longer, 8)  # block 4 is taken; of the others two are evicted
    assert longer.blocks[:4] == [0, 0, 0, 4]
    assert all(longer.blocks[3:])
    manager.check_integrity([longer], [])


# 10 layers with a window of 5, 2 without; blocks of 4, 8 of each kind; weights 5 and 1
def hybrid(**settings: object) -> KVCacheManager:
    return make(8, groups=[windowed(5, 10), CacheGroup(2, 1, 8)], **settings)


def test_two_groups_are_weighted_by_their_layers() -> None:
    manager = hybrid()
    user = User(list(range(30)))
    assert manager.admit(user, 8)
    book(manager, user, 8)
    assert parts(manager) == (6 * 8, 0, 0, 6 * 24)
    assert step(manager, user, 6)
    assert user.tables == [[0, 2, 3, 4], [1, 2, 3, 4]]
    # the windowed layers keep 10 tokens in 3 blocks, the others 14 in 4; the block given up is cached
    assert parts(manager) == (5 * 10 + 14, 6 * 2, 5 * 4, 5 * 16 + 16)
    # in bytes: 12 layers with 32 slots of a size each
    usage = manager.usage()
    memory = 12 * 32
    assert usage.token_states / (6 * 32) == pytest.approx((10 * 10 + 2 * 14) / memory)
    assert usage.internal_fragmentation / (6 * 32) == pytest.approx(12 * 2 / memory)
    assert usage.cached / (6 * 32) == pytest.approx(10 * 4 / memory)
    assert usage.free / (6 * 32) == pytest.approx((10 * 16 + 2 * 16) / memory)
    manager.free(user)
    # full ones: blocks 1, 2, 3 of either group
    assert parts(manager) == (0, 0, 6 * 12, 6 * 20)
    manager.check_integrity([], [])


@pytest.mark.parametrize("layers", [(1, 1), (2, 4), (10, 2), (9, 6), (5, 3), (6, 4, 10)])
def test_shares_are_shares_of_memory(layers: tuple[int, ...]) -> None:
    windows = [None, 3, 9]
    manager = make(12, groups=[CacheGroup(n, 1, 8, w) for n, w in zip(layers, windows, strict=False)])
    users = [User(list(range(start, start + 30))) for start in (0, 100)]
    for user in users:
        assert manager.admit(user, 2)
        book(manager, user, 2)
    for count in (3, 5, 1, 4):
        assert step(manager, users[0], count)
    assert step(manager, users[1], 9)
    memory = tokens = cached = 0
    for group, n in enumerate(layers):
        memory += n * 12 * 4
        held = [(i, u) for u in users for i, block in enumerate(u.tables[group]) if block]
        tokens += n * sum(min(4, u.num_computed_tokens - 4 * i) for i, u in held)
        full = {u: u.num_computed_tokens // 4 for u in users}
        cached += n * 4 * sum(full[u] - sum(map(bool, u.tables[group][: full[u]])) for u in users)
    usage = manager.usage()
    assert sum(parts(manager)) * gcd(*layers) == memory
    assert usage.token_states * gcd(*layers) == tokens
    assert usage.cached * gcd(*layers) == cached


def test_a_hit_is_as_long_as_every_group_has_it() -> None:
    manager = hybrid()
    user = User(list(range(17)))
    compute(manager, user)
    manager.free(user)
    assert manager.num_cached_tokens(User(list(range(17)))) == 16
    for _ in range(2):  # the windowed layers lose the end of it
        manager.caches[0].evict()
    manager.pools[0]._free += [3, 4]
    again = User(list(range(17)))
    assert manager.num_cached_tokens(again) == 8
    assert manager.admit(again, 9)
    assert again.tables[1][:2] == [1, 2]
    assert again.tables[0][:2] == [0, 2]
    assert [table.num_dropped for table in again.block_tables] == [1, 0]
    manager.check_integrity([again], [])


def test_if_one_group_has_no_room_nothing_is_taken_from_the_other() -> None:
    manager = hybrid()
    user = User(list(range(28)))
    assert manager.admit(user, 8)
    book(manager, user, 8)
    while user.num_computed_tokens < 28:
        assert step(manager, user, 4)
    before = parts(manager)
    assert [pool.num_available for pool in manager.pools] == [6, 1]
    waiting = User(list(range(50, 55)))
    assert not manager.admit(waiting, 5)
    assert waiting.block_tables == ()
    assert parts(manager) == before
    user.token_ids += range(28, 40)
    assert not manager.extend(user, 5)
    assert [len(table) for table in user.tables] == [7, 7]
    manager.check_integrity([user], [waiting])
    assert manager.extend(user, 4)


@settings(max_examples=100)
@given(
    window=st.integers(1, 12),
    size=st.integers(1, 4),
    lengths=st.lists(st.integers(1, 60), min_size=2, max_size=5),
    chunks=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    cut=st.integers(0, 40),
)
def test_hits_equal_what_was_computed(window: int, size: int, lengths: list[int], chunks: list[int], cut: int) -> None:
    """With all blocks cached, whatever was given up: a longer request finds all whole blocks of a computed one."""
    manager = make(200, size, groups=[windowed(window), FULL])
    ended: list[User] = []
    for number, length in enumerate(lengths):
        stem = list(range(min(cut, length)))
        user = User([*stem, *range(100 * number + 100, 100 * number + 100 + length - len(stem))])
        computed = manager.num_cached_tokens(user)
        shared = max([num_common(user, other) for other in ended], default=0)
        assert computed == min(shared, length - 1) // size * size
        assert manager.admit(user, min(chunks[0], length - computed))
        book(manager, user, min(chunks[0], length - computed))
        for chunk in cycle(chunks):
            if not lacking(user):
                break
            assert step(manager, user, min(chunk, lacking(user)))
        manager.check_integrity([user], [])
        manager.free(user)
        ended.append(user)
        assert manager.num_cached_tokens(User([*user.token_ids, -1])) == length // size * size
