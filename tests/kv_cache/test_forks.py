"""Forked requests share all blocks, and copy a shared one before they write to it."""

from collections.abc import Sequence
from itertools import permutations

import pytest
from cache_users import FULL, User, book, compute, grow, lacking, make, parts, windowed

from paged_jax.kv_cache.manager import KVCacheManager
from paged_jax.kv_cache.prefix_cache.none import NoPrefixCache


def fork(manager: KVCacheManager, parent: User) -> User:
    child = User(list(parent.token_ids))
    assert manager.fork(parent, child)
    return child


def family(manager: KVCacheManager, length: int, num_children: int) -> list[User]:
    """A computed request and its children, all with one token more to compute: each its own."""
    parent = User(list(range(length)))
    assert compute(manager, parent)
    users = [parent, *(fork(manager, parent) for _ in range(num_children))]
    for number, user in enumerate(users):
        user.token_ids.append(100 + number)
    return users


def check(manager: KVCacheManager, holders: Sequence[User], waiting: Sequence[User] = ()) -> None:
    manager.check_integrity(holders, waiting)
    parts(manager)


def test_by_hand() -> None:
    manager = make(8, prefix_cache=NoPrefixCache)
    parent = User(list(range(6)))
    compute(manager, parent)
    assert parent.num_writable_tokens == 8
    child = fork(manager, parent)
    assert parent.blocks == child.blocks == [1, 2]
    assert parent.block_tables[0].block_ids is not child.block_tables[0].block_ids
    assert child.num_computed_tokens == 6
    assert parent.num_writable_tokens == child.num_writable_tokens == 6  # they must ask
    assert manager.num_table_entries == 4
    assert parts(manager) == (6, 2, 0, 24)
    check(manager, [parent, child])

    parent.token_ids.append(50)
    child.token_ids.append(60)
    assert manager.extend(parent, 1)  # the first to write gets the copy
    assert parent.blocks == [1, 3]
    assert parent.num_writable_tokens == 8
    assert parts(manager) == (6 + 2, 2 + 2, 0, 20)
    assert manager.extend(child, 1)  # the last one does not need any
    assert child.blocks == [1, 2]
    assert child.num_writable_tokens == 8
    assert manager.take_copies() == ([(2, 3)],)
    assert manager.take_copies() == ([],)
    for user in (parent, child):
        book(manager, user, 1)
    assert parts(manager) == (4 + 3 + 3, 1 + 1, 0, 20)
    check(manager, [parent, child])
    for user in (parent, child):
        assert grow(manager, user, 70, 71)
    assert (parent.blocks, child.blocks) == ([1, 3, 4], [1, 2, 5])
    assert manager.take_copies() == ([],)
    assert parts(manager) == (4 + 5 + 5, 3 + 3, 0, 12)
    manager.free(parent)
    assert sorted(manager.take_emptied()[0]) == [3, 4]
    assert parts(manager) == (9, 3, 0, 20)
    manager.free(child)
    assert sorted(manager.take_emptied()[0]) == [1, 2, 5]
    check(manager, [])


def test_whole_blocks_are_shared_for_good() -> None:
    manager = make(8)
    parent, child = family(manager, 8, 1)
    assert manager.extend(child, 1)
    assert manager.extend(parent, 1)
    assert (parent.blocks, child.blocks) == ([1, 2, 4], [1, 2, 3])
    assert manager.take_copies() == ([],)
    for user in (parent, child):
        book(manager, user, 1)
    assert parts(manager) == (8 + 1 + 1, 6, 0, 16)
    check(manager, [parent, child])


def test_a_copy_needs_a_block() -> None:
    manager = make(2)
    parent, child = family(manager, 6, 1)
    before = parts(manager)
    assert not manager.extend(child, 1)
    assert (child.blocks, child.num_writable_tokens) == ([1, 2], 6)
    assert parts(manager) == before
    assert manager.take_copies() == ([],)
    check(manager, [parent, child])
    manager.free(parent)
    assert manager.extend(child, 1)  # nobody else's any more
    assert child.blocks == [1, 2]
    assert manager.take_copies() == ([],)


def test_a_copy_and_what_comes_after_are_had_together_or_not_at_all() -> None:
    manager = make(4)
    parent, child = family(manager, 6, 1)
    child.token_ids += range(200, 206)  # 13 tokens: the copy, and two more blocks
    before = parts(manager)
    assert not manager.extend(child, 7)
    assert parts(manager) == before
    check(manager, [parent, child])
    assert manager.extend(child, 6)
    assert (child.blocks, child.num_writable_tokens) == ([1, 3, 4], 12)
    assert manager.take_copies() == ([(2, 3)],)
    # 2 computed tokens of the child in a copy; 2 + 2 + 4 slots to write to
    assert parts(manager) == (8, 8, 0, 0)


@pytest.mark.parametrize("length", [4, 5, 7])
@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_a_shared_tail_is_counted_once_whoever_leaves_or_writes_first(length: int, order: tuple[int, ...]) -> None:
    """Two write, one leaves and one does both, in any order."""
    manager = make(30, prefix_cache=NoPrefixCache)
    users = family(manager, length, 3)
    holders = set(users)

    def counted() -> None:
        check(manager, list(holders))
        held = {(u.blocks[p // 4], p % 4) for u in holders for p in range(u.num_computed_tokens)}
        assert parts(manager)[0] == len(held)

    counted()
    for number in order:
        user = users[number]
        if number != 0:
            assert manager.extend(user, 1)
            counted()
            manager.take_copies()
            book(manager, user, 1)
            counted()
        if number in (0, 3):
            holders.remove(user)
            manager.free(user)
            counted()
    assert len(holders) == 2


def test_grandchildren_share_the_same_tail() -> None:
    manager = make(8, prefix_cache=NoPrefixCache)
    parent = User(list(range(6)))
    compute(manager, parent)
    child = fork(manager, parent)
    grandchild = fork(manager, child)
    assert parts(manager) == (6, 2, 0, 24)
    manager.free(child)
    assert parts(manager) == (6, 2, 0, 24)
    grandchild.token_ids.append(50)
    assert manager.extend(grandchild, 1)
    assert manager.take_copies() == ([(2, 3)],)
    book(manager, grandchild, 1)
    again = fork(manager, grandchild)
    assert again.blocks == [1, 3]
    assert parts(manager) == (6 + 3, 2 + 1, 0, 20)
    manager.free(parent)
    assert parts(manager) == (7, 1, 0, 24)
    check(manager, [grandchild, again])


def test_a_copy_is_not_made_for_who_leaves_in_the_same_plan() -> None:
    manager = make(8, prefix_cache=NoPrefixCache)
    users = family(manager, 6, 2)
    for user in users:
        assert manager.extend(user, 1)
    assert [user.blocks for user in users] == [[1, 3], [1, 4], [1, 2]]
    manager.free(users[0])
    assert manager.take_emptied() == ([3],)
    assert manager.take_copies() == ([(2, 4)],)
    check(manager, users[1:])


def test_the_copied_block_may_lose_its_last_user_in_the_same_plan() -> None:
    """And be handed out again: the copy is made before anything is written."""
    manager = make(8, prefix_cache=NoPrefixCache)
    parent, child = family(manager, 6, 1)
    assert manager.extend(child, 1)
    manager.free(parent)
    assert manager.take_emptied() == ([2],)
    other = User([9])
    assert manager.admit(other, 1)
    assert other.blocks == [2]
    assert manager.take_copies() == ([(2, 3)],)
    assert child.blocks == [1, 3]
    check(manager, [child, other])


def test_a_target_that_was_given_up_is_free_for_anybody() -> None:
    manager = make(3, prefix_cache=NoPrefixCache)
    parent, child = family(manager, 6, 1)
    assert manager.extend(child, 1)
    manager.free(child)
    other = User([9])
    assert manager.admit(other, 1)
    assert other.blocks == [3]
    assert manager.take_copies() == ([],)
    check(manager, [parent, other])


def test_a_swap_reads_the_source_of_a_copy_that_is_not_made() -> None:
    manager = make(8, prefix_cache=NoPrefixCache, num_swap_blocks=4)
    parent, child = family(manager, 6, 1)
    assert manager.extend(child, 1)
    assert child.blocks == [1, 3]
    out = manager.swap_out(child)
    assert out == (((1, 2),), ((0, 1),))
    assert manager.take_copies() == ([],)
    assert manager.take_emptied() == ([3],)
    assert parts(manager) == (6, 2, 0, 24)
    check(manager, [parent], [child])


def test_a_refused_swap_leaves_the_copy_planned() -> None:
    manager = make(8, num_swap_blocks=1)
    parent, child = family(manager, 6, 1)
    assert manager.extend(child, 1)
    assert manager.swap_out(child) is None
    assert manager.take_copies() == ([(2, 3)],)
    check(manager, [parent, child])


def test_every_group_has_copies_of_its_own() -> None:
    manager = make(12, groups=[windowed(3, 2), FULL], num_swap_blocks=8, prefix_cache=NoPrefixCache)
    parent = User(list(range(10)))
    compute(manager, parent)
    other = User([9])
    assert manager.admit(other, 1)
    child = fork(manager, parent)
    child.token_ids.append(50)
    assert parts(manager) == (3 * 10, 3 * (2 + 4), 0, 3 * 32)
    assert manager.extend(child, 1)  # the query at 10 sees 8 to 10: the others are the parent's alone now
    assert child.tables == [[0, 0, 5], [1, 2, 5]]
    assert parent.tables == [[1, 2, 3], [1, 2, 3]]
    check(manager, [parent, child, other])
    assert parts(manager) == (3 * 12, 3 * (2 + 4 + 2), 0, 3 * 28)
    out = manager.swap_out(child)
    assert out == (((3,), (1, 2, 3)), ((0,), (0, 1, 2)))
    check(manager, [parent, other], [child])
    assert manager.take_copies() == ([], [])
    parent.token_ids.append(60)
    assert manager.extend(parent, 1)
    assert parent.tables == [[0, 0, 3], [1, 2, 3]]
    assert manager.take_copies() == ([], [])
    check(manager, [parent, other], [child])


def test_a_child_of_a_windowed_parent_starts_where_the_window_is() -> None:
    manager = make(8, groups=[windowed(5)])
    parent = User(list(range(14)))
    assert manager.admit(parent, 8)
    book(manager, parent, 8)
    assert grow(manager, parent)
    assert parent.blocks == [0, 2, 3, 4]
    child = fork(manager, parent)
    assert child.blocks == [0, 2, 3, 4]
    assert child.block_tables[0].num_dropped == 1
    check(manager, [parent, child])
    assert grow(manager, child, 50)
    assert child.blocks == [0, 0, 3, 5]
    assert manager.take_copies() == ([(4, 5)],)
    assert grow(manager, child, 51, 52)
    assert child.blocks == [0, 0, 3, 5, 6]
    check(manager, [parent, child])
    manager.free(parent)
    check(manager, [child])


def test_both_publish_what_they_go_on_to_compute() -> None:
    manager = make(12)
    parent, child = family(manager, 6, 1)
    assert child.block_contents == parent.block_contents
    assert child.block_contents is not parent.block_contents
    assert child.next_publish == parent.next_publish == 8
    for user in (parent, child):
        assert grow(manager, user, 7)
    assert manager.num_cached_tokens(User([*parent.token_ids, 0])) == 8
    assert manager.num_cached_tokens(User([*child.token_ids, 0])) == 8
    assert len(manager.caches[0]) == 3
    for user in (parent, child):
        assert lacking(user) == 0
        manager.free(user)
    assert parts(manager) == (0, 0, 12, 36)
    check(manager, [])


def test_a_child_may_go_on_otherwise_from_where_its_parent_has_computed() -> None:
    """The parent's contents beyond that, which its admission looked up, are not the child's."""
    manager = make(12)
    parent = User(list(range(12)))
    assert manager.num_cached_tokens(parent) == 0
    assert manager.admit(parent, 5)
    book(manager, parent, 5)
    child = User([*range(5), 50, 51, 52])
    assert manager.fork(parent, child)
    assert grow(manager, child)
    assert manager.num_cached_tokens(User([*range(9)])) == 4
    assert manager.num_cached_tokens(User([*range(5), 50, 51, 52, 0])) == 8
    check(manager, [parent, child])
