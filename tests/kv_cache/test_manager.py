"""Blocks of requests: what admission takes and leaves, what is given back, what is counted."""

from collections.abc import Callable

import pytest
from cache_users import FULL, User, book, compute, grow, in_pool, make, parts

from paged_jax.kv_cache.manager import KVCacheManager


def test_room_for_the_whole_prompt_is_asked_but_only_the_chunks_is_taken() -> None:
    manager = make(4)
    user = User(list(range(16)))
    assert manager.admit(user, 5)
    assert (user.blocks, user.num_writable_tokens) == ([1, 2], 8)
    other = User(list(range(50, 59)))  # 3 blocks, of which 2 are there
    assert not manager.admit(other, 1)
    assert manager.admit(User(list(range(50, 58))), 1)


def test_too_long_a_request_is_not_admitted_to_an_empty_pool() -> None:
    manager = make(4)
    assert manager.max_request_len == 16
    assert make(4, max_request_len=9).max_request_len == 9
    assert not manager.admit(User(list(range(17))), 1)
    assert compute(manager, User(list(range(16))))


def test_admission_leaves_the_watermark_free_if_others_run() -> None:
    manager = make(10, watermark=0.15)  # 1.5: 2 blocks
    first = User(list(range(40)))
    assert compute(manager, first)  # alone, it may have all
    manager.free(first)
    manager.reset_prefix_cache()
    first = User(list(range(12)))
    assert compute(manager, first)
    assert not compute(manager, User(list(range(50, 74))))  # 6 of 7 blocks
    second = User(list(range(50, 70)))
    assert compute(manager, second)
    assert in_pool(manager) == (8, 0, 2)
    assert grow(manager, first, *range(12, 17))  # who runs may go below it
    assert in_pool(manager) == (10, 0, 0)


def test_cached_blocks_count_for_the_watermark_but_hits_do_not() -> None:
    manager = make(8, watermark=0.25)  # 2 blocks
    ended, running = User(list(range(16))), User(list(range(50, 54)))
    compute(manager, ended)
    manager.free(ended)
    compute(manager, running)
    assert in_pool(manager) == (1, 4, 3)
    assert not compute(manager, User([*range(16), *range(60, 68)]))  # 4 hits, 2 new: 1 is left
    assert in_pool(manager) == (1, 4, 3)
    longest = User([*range(16), 60])  # 4 hits, 1 new: 2 are left
    assert compute(manager, longest)
    assert in_pool(manager) == (6, 0, 2)
    # blocks that others use are no matter
    manager.free(running)
    assert not manager.admit(User([*range(16), *range(80, 85)]), 1)
    assert manager.admit(User([*range(16), 80]), 1)


def test_extending_takes_blocks_at_block_edges_only() -> None:
    manager = make(3)
    user = User(list(range(4)))
    compute(manager, user)
    assert user.blocks == [1]
    assert manager.extend(user, 1)
    assert (user.blocks, user.num_writable_tokens) == ([1, 2], 8)
    book(manager, user, 1)
    assert manager.extend(user, 3)
    assert user.blocks == [1, 2]
    assert not manager.extend(user, 8)
    assert (user.blocks, user.num_writable_tokens) == ([1, 2], 8)
    assert manager.extend(user, 7)
    assert (user.blocks, user.num_writable_tokens) == ([1, 2, 3], 12)


def test_emptied_blocks_are_told_once() -> None:
    manager = make(4)
    user = User(list(range(6)))
    compute(manager, user)
    assert manager.take_emptied() == ([],)
    manager.free(user)
    assert manager.take_emptied() == ([2],)  # the first block is full, and cached
    assert manager.take_emptied() == ([],)
    compute(manager, User(list(range(50, 66))))
    assert manager.take_emptied() == ([1],)  # evicted


def test_usage_counts_slots() -> None:
    manager = make(6)
    first, second = User(list(range(10))), User([*range(8), 90])
    compute(manager, first)
    compute(manager, second)
    assert second.blocks[:2] == first.blocks[:2]
    assert parts(manager) == (8 + 2 + 1, 2 + 3, 0, 8)
    manager.free(first)
    assert parts(manager) == (9, 3, 0, 12)
    manager.free(second)
    assert parts(manager) == (0, 0, 8, 16)


def test_blocks_that_are_not_written_yet_count_as_unfilled() -> None:
    manager = make(6)
    user = User(list(range(10)))
    assert manager.admit(user, 10)
    assert parts(manager) == (0, 12, 0, 12)
    book(manager, user, 10)
    assert parts(manager) == (10, 2, 0, 12)


def test_groups_of_equal_layers_have_tables_of_their_own() -> None:
    manager = make(4, groups=[FULL, FULL])
    user = User(list(range(6)))
    compute(manager, user)
    assert user.tables == [[1, 2], [1, 2]]
    assert parts(manager) == (2 * 6, 2 * 2, 0, 2 * 8)
    manager.free(user)
    assert manager.take_emptied() == ([2], [2])
    assert manager.num_cached_tokens(User(list(range(6)))) == 4
    manager.check_integrity([], [])


def test_allocations_and_evictions_are_recorded() -> None:
    manager = make(4)
    events: list[tuple[object, ...]] = []
    manager.record = lambda name, **fields: events.append((name, *fields.values()))
    user = User(list(range(6)))
    assert manager.admit(user, 5)
    assert events.pop() == ("allocate", user, 0, 0, [[1, 2]])  # first, cached, blocks
    book(manager, user, 5)
    assert manager.extend(user, 1)
    assert events == []  # its block is there
    book(manager, user, 1)
    assert grow(manager, user, 6, 7, 8)
    assert events.pop() == ("allocate", user, 2, 0, [[3]])
    child = User(list(user.token_ids))
    assert manager.fork(user, child)
    assert grow(manager, child, 9)
    assert events.pop() == ("allocate", child, 2, 0, [[4]])  # a copy of the third
    manager.free(child)
    manager.free(user)
    assert events == []
    again = User([*range(8), *range(50, 55)])
    compute(manager, again)
    assert events == [("allocate", again, 0, 8, [[1, 2, 3, 4]])]
    events.clear()
    manager.free(again)
    compute(manager, User(list(range(80, 92))))
    assert [event[0] for event in events] == ["evict", "evict", "allocate"]
    assert events[:2] == [("evict", 0, 3), ("evict", 0, 2)]


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda m, u: m.advance(1), "computed tokens are miscounted"),
        (lambda m, u: setattr(m, "num_table_entries", 3), "table entries are miscounted"),
        (lambda m, u: setattr(u, "num_computed_tokens", 9), "computed tokens without a block"),
        (lambda m, u: setattr(u.block_tables[0], "num_dropped", 1), "a block that left the window is held"),
        (lambda m, u: m.host_pools[0].allocate(1), "a host block is lost or has two owners"),
        (lambda m, u: u.block_tables[1].block_ids.append(m.pools[1].allocate(1)[0]), "differ in length"),
        (lambda m, u: (u.block_tables[0].block_ids.remove(1), m.pools[0].free([1])), "differ in length"),
    ],
)
def test_check_integrity_finds_what_is_wrong(spoil: Callable[[KVCacheManager, User], object], sentence: str) -> None:
    manager = make(4, groups=[FULL, FULL], num_swap_blocks=2)
    user = User(list(range(6)))
    compute(manager, user)
    manager.check_integrity([user], [])
    spoil(manager, user)
    with pytest.raises(AssertionError, match=sentence):
        manager.check_integrity([user], [])


def test_a_request_that_comes_back_is_looked_up_again_even_if_the_cache_is_the_same() -> None:
    manager = make(8)
    assert compute(manager, User(list(range(12))))
    user = User(list(range(5)))
    assert compute(manager, user)
    assert grow(manager, user, 5, 6, 7, 8)  # all cached already
    manager.free(user)
    assert manager.num_cached_tokens(user) == 8
