"""Swapping: what is moved where, who owns host memory, and what a plan may not overwrite."""

import pytest
from cache_users import FULL, User, book, compute, grow, lacking, make, parts, windowed

from paged_jax.kv_cache.manager import KVCacheManager
from paged_jax.kv_cache.prefix_cache import PrefixCache
from paged_jax.kv_cache.prefix_cache.hash import HashPrefixCache
from paged_jax.kv_cache.prefix_cache.none import NoPrefixCache
from paged_jax.kv_cache.prefix_cache.radix import RadixPrefixCache


def running(manager: KVCacheManager, count: int, first: int = 0) -> User:
    """A request that has computed all of so many tokens, and then gained one."""
    user = User(list(range(first, first + count)))
    assert compute(manager, user)
    user.token_ids.append(-1)
    return user


def host_free(manager: KVCacheManager) -> list[int]:
    return [pool.num_free for pool in manager.host_pools]


def test_out_and_in_by_hand() -> None:
    manager = make(6, num_swap_blocks=4, prefix_cache=NoPrefixCache)
    user = running(manager, 10)
    out = manager.swap_out(user)
    assert out == (((1, 2, 3),), ((0, 1, 2),))
    assert user.host_blocks == ([0, 1, 2],)
    assert (user.block_tables, user.num_computed_tokens, user.num_writable_tokens) == ((), 10, 0)
    assert host_free(manager) == [1]
    assert parts(manager) == (0, 0, 0, 24)
    assert [sorted(blocks) for blocks in manager.take_emptied()] == [[1, 2, 3]]
    manager.check_integrity([], [user])
    manager.take_copies()
    other = running(manager, 5, first=50)
    assert other.blocks == [1, 2]
    back = manager.swap_in(user, 3)
    assert back == (((3, 4, 5),), ((0, 1, 2),))
    assert user.host_blocks == ()
    assert (user.blocks, user.num_computed_tokens, user.num_writable_tokens) == ([3, 4, 5, 6], 10, 16)
    assert parts(manager) == (15, 9, 0, 0)
    manager.check_integrity([other, user], [])
    manager.take_copies()
    assert host_free(manager) == [4]
    manager.check_integrity([other, user], [])


def test_host_blocks_that_this_plan_reads_are_not_handed_out_in_it() -> None:
    manager = make(6, num_swap_blocks=4)
    first, second = running(manager, 8), running(manager, 5, first=50)
    manager.swap_out(first)
    manager.take_copies()
    moved = manager.swap_in(first, 1)
    assert moved is not None
    assert host_free(manager) == [2]
    manager.check_integrity([first, second], [])
    out = manager.swap_out(second)
    assert out is not None
    assert set(out.host_blocks[0]).isdisjoint(moved.host_blocks[0])
    assert host_free(manager) == [0]
    assert manager.swap_out(first) is None  # all that is free is still being read
    manager.check_integrity([first], [second])
    manager.take_copies()
    assert host_free(manager) == [2]
    manager.check_integrity([first], [second])
    assert manager.swap_in(second, 1) is not None
    manager.take_copies()
    assert host_free(manager) == [4]


def test_full_host_memory_changes_nothing() -> None:
    manager = make(6, num_swap_blocks=2)
    user = running(manager, 10)
    before, blocks = parts(manager), list(user.blocks)
    assert manager.swap_out(user) is None
    assert parts(manager) == before
    assert (user.blocks, user.host_blocks, user.num_computed_tokens) == (blocks, (), 10)
    assert manager.take_emptied() == ([],)
    manager.check_integrity([user], [])
    assert grow(manager, user)


def test_if_one_groups_host_memory_is_full_nothing_is_taken_of_the_other() -> None:
    manager = make(12, groups=[windowed(5), FULL], num_swap_blocks=3)
    user = User(list(range(40)))
    assert manager.admit(user, 8)
    book(manager, user, 8)
    assert manager.extend(user, 8)
    book(manager, user, 8)
    assert manager.extend(user, 1)  # the window is blocks 4 and 5, the other group has five
    assert manager.swap_out(user) is None
    assert host_free(manager) == [3, 3]
    assert [len(table) for table in user.tables] == [5, 5]
    manager.check_integrity([user], [])


def test_without_host_memory_nothing_is_swapped() -> None:
    manager = make(6)
    assert manager.swap_out(running(manager, 3)) is None


def test_no_room_to_come_back_changes_nothing() -> None:
    manager = make(4, num_swap_blocks=4, prefix_cache=NoPrefixCache)
    user = running(manager, 8)
    manager.swap_out(user)
    manager.take_copies()
    other = running(manager, 8, first=50)
    before = parts(manager)
    assert manager.swap_in(user, 1) is None  # two blocks are free, and its next token needs a third
    assert parts(manager) == before
    assert (user.host_blocks, user.block_tables, user.num_computed_tokens) == (([0, 1],), (), 8)
    manager.check_integrity([other], [user])
    manager.free(other)
    assert manager.swap_in(user, 1) is not None


def test_coming_back_leaves_the_watermark_free_if_others_run() -> None:
    manager = make(10, watermark=0.2, num_swap_blocks=10, prefix_cache=NoPrefixCache)
    user = running(manager, 19)
    manager.swap_out(user)
    manager.take_copies()
    other = running(manager, 13, first=50)
    assert manager.swap_in(user, 1) is None  # 5 of 6 blocks
    manager.free(other)
    other = running(manager, 12, first=50)
    assert manager.swap_in(user, 1) is not None
    assert manager.pools[0].num_free == 2
    manager.swap_out(user)
    manager.take_copies()
    manager.free(other)
    hungry = running(manager, 4)
    manager.free(hungry)
    assert manager.swap_in(user, 1) is not None


def test_a_swapped_request_that_lacks_much_waits_for_room_for_all() -> None:
    """As admission does: it would be preempted half-way and moved again."""
    manager = make(4, num_swap_blocks=4, prefix_cache=NoPrefixCache)
    user = User(list(range(16)))
    assert manager.admit(user, 4)
    book(manager, user, 4)
    manager.swap_out(user)
    manager.take_copies()
    other = running(manager, 1, first=50)
    assert manager.swap_in(user, 1) is None
    manager.free(other)
    assert manager.swap_in(user, 1) is not None


def test_discarding_gives_host_memory_back_at_once() -> None:
    manager = make(6, num_swap_blocks=3)
    user = running(manager, 10)
    manager.swap_out(user)
    assert host_free(manager) == [0]
    manager.discard_swapped(user)
    assert host_free(manager) == [3]
    assert (user.host_blocks, user.num_computed_tokens) == ((), 0)
    manager.check_integrity([], [user])
    assert compute(manager, user)


@pytest.mark.parametrize("cache", [HashPrefixCache, RadixPrefixCache])
def test_what_came_back_is_offered_again(cache: type[PrefixCache]) -> None:
    manager = make(6, num_swap_blocks=4, prefix_cache=cache)
    user = running(manager, 10)
    manager.swap_out(user)
    assert parts(manager) == (0, 0, 8, 16)  # the cache keeps the full blocks
    manager.take_copies()
    other = User(list(range(50, 74)))
    compute(manager, other)  # until somebody needs them all
    assert manager.num_evicted == 2
    manager.free(other)
    assert manager.swap_in(user, 1) is not None
    assert manager.num_cached_tokens(User(list(range(10)))) == 0  # not yet: its content arrives with the step
    assert user.next_publish <= 11
    book(manager, user, 1)
    assert manager.num_cached_tokens(User(list(range(10)))) == 8
    again = User(list(range(9)))
    compute(manager, again)
    assert again.blocks[:2] == user.blocks[:2]
    manager.check_integrity([user, again], [])


def test_what_is_cached_still_is_not_cached_twice() -> None:
    manager = make(8, num_swap_blocks=4)
    user = running(manager, 8)
    manager.swap_out(user)
    manager.take_copies()
    assert manager.swap_in(user, 1) is not None
    book(manager, user, 1)
    assert len(manager.caches[0]) == 2
    assert parts(manager) == (9, 3, 8, 12)
    manager.free(user)
    assert parts(manager) == (0, 0, 8, 24)
    manager.check_integrity([], [])


def test_windowed_groups_move_only_what_is_seen() -> None:
    """Window of 5, blocks of 4: after 17 tokens the next query, at 17, sees 13 to 17."""
    manager = make(9, groups=[windowed(5), FULL], num_swap_blocks=8, prefix_cache=NoPrefixCache)
    user = User(list(range(28)))
    assert manager.admit(user, 16)
    book(manager, user, 16)
    assert manager.extend(user, 1)
    book(manager, user, 1)
    assert user.tables == [[0, 0, 0, 4, 1], [1, 2, 3, 4, 5]]
    out = manager.swap_out(user)
    assert out == (((4, 1), (1, 2, 3, 4, 5)), ((0, 1), (0, 1, 2, 3, 4)))
    assert host_free(manager) == [6, 3]
    manager.check_integrity([], [user])
    manager.take_copies()
    back = manager.swap_in(user, 8)
    assert back is not None
    assert [len(blocks) for blocks in back.device_blocks] == [2, 5]
    assert user.blocks[:3] == [0, 0, 0]
    assert [len(table) for table in user.tables] == [7, 7]
    assert back.device_blocks == (tuple(user.tables[0][3:5]), tuple(user.tables[1][:5]))
    assert [table.num_dropped for table in user.block_tables] == [3, 0]
    manager.check_integrity([user], [])
    book(manager, user, 8)
    assert manager.extend(user, 1)
    assert user.blocks[:6] == [0, 0, 0, 0, 0, user.blocks[5]]
    manager.free(user)
    manager.check_integrity([], [])


@pytest.mark.parametrize("computed", [8, 11, 12, 16, 17, 29, 32])
def test_a_long_chunk_leaves_behind_what_its_last_token_does_not_see(computed: int) -> None:
    """A prefill in one chunk holds more than its window until it is extended; a swap does not move that."""
    manager = make(8, groups=[windowed(5)], num_swap_blocks=8)
    user = running(manager, computed)
    held = list(user.blocks)
    first = max(0, computed - 4) // 4
    out = manager.swap_out(user)
    assert out is not None
    assert out.device_blocks == (tuple(held[first:]),)
    assert parts(manager)[:2] == (0, 0)
    manager.check_integrity([], [user])
    manager.take_copies()
    others = [running(manager, 4, first=start) for start in range(50, 70, 4)]  # three blocks are left
    assert manager.swap_in(user, 1) is not None
    assert user.block_tables[0].num_dropped == first
    manager.check_integrity([*others, user], [])


def test_what_a_window_gave_up_is_in_nobodys_way_when_it_comes_back() -> None:
    """The whole pool was one chunk: coming back as it went would need one block more than there are."""
    manager = make(8, groups=[windowed(5)], num_swap_blocks=8)
    user = running(manager, 32)
    assert manager.swap_out(user) is not None
    manager.take_copies()
    assert manager.swap_in(user, 1) is not None


def test_a_shared_block_is_moved_with_each_of_its_users() -> None:
    manager = make(8, num_swap_blocks=8, prefix_cache=NoPrefixCache)
    parent, child = running(manager, 6), User([])
    child.token_ids = [*parent.token_ids]
    manager.fork(parent, child)
    out = manager.swap_out(child)
    assert out is not None
    assert out.device_blocks == ((1, 2),)
    assert parent.blocks == [1, 2]
    assert parts(manager) == (6, 2, 0, 24)
    assert manager.take_emptied() == ([],)
    manager.check_integrity([parent], [child])
    manager.take_copies()
    assert grow(manager, parent)  # alone: it writes in place
    assert manager.take_copies() == ([],)
    assert manager.swap_in(child, 1) is not None
    assert child.blocks == [3, 4]
    assert lacking(child) == 1
    book(manager, child, 1)
    assert parts(manager) == (7 + 7, 1 + 1, 0, 16)
    manager.check_integrity([parent, child], [])


def test_swapping_out_frees_in_the_order_of_freeing() -> None:
    """Of what stays cached the tail is evicted first."""
    manager = make(4, num_swap_blocks=4)
    user = running(manager, 12)
    manager.swap_out(user)
    compute(manager, User(list(range(50, 58))))
    assert manager.num_cached_tokens(User(list(range(13)))) == 8
