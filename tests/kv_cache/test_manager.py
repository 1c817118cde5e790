"""Blocks of requests: what admission takes, what hits are worth, what is given back."""

from dataclasses import dataclass, field

import pytest

from paged_jax.kv_cache.block_table import BlockTable
from paged_jax.kv_cache.eviction.lru import LRUEviction
from paged_jax.kv_cache.manager import KVCacheManager
from paged_jax.kv_cache.prefix_cache.hash import HashPrefixCache
from paged_jax.kv_cache.prefix_cache.none import NoPrefixCache


@dataclass
class User:
    """The part of a request that the manager sees."""

    token_ids: list[int]
    num_computed_tokens: int = 0
    block_tables: tuple[BlockTable, ...] = field(default=())

    @property
    def blocks(self) -> list[int]:
        return self.block_tables[0].block_ids


def make(num_blocks: int, block_size: int = 4) -> KVCacheManager:
    return KVCacheManager(num_blocks, block_size, HashPrefixCache(block_size), LRUEviction())


def compute(manager: KVCacheManager, user: User) -> bool:
    """Admit the request and compute all its tokens."""
    match = manager.match(user)
    if not manager.admit(user, match, len(user.token_ids) - len(match[0]) * manager.block_size):
        return False
    user.num_computed_tokens = len(user.token_ids)
    manager.publish(user)
    return True


@pytest.mark.parametrize(("length", "hits"), [(1, 0), (4, 0), (5, 1), (7, 1), (8, 1), (9, 2)])
def test_the_last_token_is_never_taken_from_the_cache(length: int, hits: int) -> None:
    manager = make(8)
    for _ in range(2):
        user = User(list(range(length)))
        blocks, hashes = manager.match(user)
        compute(manager, user)
        manager.free(user)
    assert (len(blocks), len(hashes)) == (hits, hits)


def test_hit_blocks_are_not_counted_as_available_too() -> None:
    manager = make(4)
    first = User(list(range(8)))
    compute(manager, first)
    manager.free(first)
    other = User(list(range(50, 57)))
    compute(manager, other)
    assert (manager.pool.num_cached, manager.pool.num_free) == (2, 0)
    longer = User([*range(8), 90, 91])  # two hits and a new block, but the hits are all that is left
    before = manager.usage([other])
    assert not compute(manager, longer)
    assert longer.block_tables == ()
    assert manager.usage([other]) == before
    manager.check_integrity([other])
    manager.free(other)
    assert compute(manager, longer)
    assert longer.num_computed_tokens == 10
    manager.check_integrity([longer])


def test_extending_takes_blocks_at_block_edges_only() -> None:
    manager = make(3)
    user = User(list(range(4)))
    compute(manager, user)
    assert user.blocks == [1]
    assert manager.extend(user, 1)
    assert user.blocks == [1, 2]
    user.num_computed_tokens = 5
    assert manager.extend(user, 3)
    assert user.blocks == [1, 2]
    assert not manager.extend(user, 8)
    assert user.blocks == [1, 2]
    assert manager.extend(user, 7)
    assert user.blocks == [1, 2, 3]


def test_equal_content_is_cached_once() -> None:
    manager = make(6)
    twins = [User(list(range(9))), User(list(range(9)))]
    matches = [manager.match(user) for user in twins]  # both before either is computed
    for user, match in zip(twins, matches, strict=True):
        manager.admit(user, match, 9)
        user.num_computed_tokens = 9
        manager.publish(user)
    assert len(manager.prefix_cache) == 2
    for user in twins:
        manager.free(user)
    assert (manager.pool.num_cached, manager.pool.num_free) == (2, 4)
    manager.check_integrity([])


def test_a_block_is_found_only_behind_the_same_beginning() -> None:
    manager = make(8)
    user = User([1, 2, 3, 4, 5, 6, 7, 8, 9])
    compute(manager, user)
    assert manager.match(User([1, 2, 3, 4, 5, 6, 7, 8, 0]))[0] == user.blocks[:2]
    assert manager.match(User([0, 2, 3, 4, 5, 6, 7, 8, 0]))[0] == []
    assert manager.match(User([5, 6, 7, 8, 0]))[0] == []
    assert manager.match(User([1, 2, 3, 4, 5, 6, 7, 0, 0]))[0] == user.blocks[:1]


def test_colliding_hashes_do_not_share_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HashPrefixCache, "_hash", staticmethod(lambda content: b"same"))
    manager = make(8)
    compute(manager, User([1, 2, 3, 4, 5]))
    assert manager.match(User([1, 2, 3, 4, 5]))[0] == [1]
    assert manager.match(User([6, 7, 8, 9, 5]))[0] == []


def test_evicted_block_is_forgotten_and_its_successors_are_not_found() -> None:
    manager = make(4)
    user = User(list(range(12)))
    compute(manager, user)
    manager.free(user)
    other = User(list(range(50, 58)))
    compute(manager, other)  # the free block, and the tail of the chain
    assert len(manager.match(User(list(range(13))))[0]) == 2
    manager.check_integrity([other])


def test_emptied_blocks_are_told_once() -> None:
    manager = make(4)
    user = User(list(range(6)))
    compute(manager, user)
    assert manager.take_emptied() == []
    manager.free(user)
    assert manager.take_emptied() == [2]  # the first block is full, and cached
    assert manager.take_emptied() == []
    compute(manager, User(list(range(50, 66))))
    assert manager.take_emptied() == [1]  # evicted


def test_reset_keeps_the_blocks_of_those_who_run() -> None:
    manager = make(6)
    ended, running = User(list(range(8))), User(list(range(50, 58)))
    compute(manager, ended)
    compute(manager, running)
    manager.free(ended)
    manager.reset_prefix_cache()
    assert (manager.pool.num_cached, manager.pool.num_free, manager.pool.num_in_use) == (0, 4, 2)
    assert manager.match(User([*range(50, 58), 0]))[0] == []
    manager.check_integrity([running])
    # what comes after the forgotten blocks may be offered, and is found again once they are
    running.token_ids += range(58, 62)
    manager.extend(running, 4)
    running.num_computed_tokens = 12
    manager.publish(running)
    manager.check_integrity([running])
    again = User(list(range(50, 59)))
    compute(manager, again)
    assert manager.match(User(list(range(50, 63))))[0] == [*again.blocks[:2], running.blocks[2]]
    manager.free(running)
    manager.free(again)
    manager.check_integrity([])
    assert manager.pool.num_cached == 3


def test_without_a_cache_nothing_is_found_or_kept() -> None:
    manager = KVCacheManager(4, 4, NoPrefixCache(4), LRUEviction())
    user = User(list(range(9)))
    compute(manager, user)
    assert manager.match(user) == ([], [])
    manager.free(user)
    assert manager.pool.num_free == 4
    with pytest.raises(RuntimeError, match="block 1 was never cached"):
        manager.prefix_cache.remove(1)


def test_usage_counts_slots() -> None:
    manager = make(6)
    first, second = User(list(range(10))), User([*range(8), 90])
    compute(manager, first)
    compute(manager, second)
    usage = manager.usage([first, second])
    assert second.blocks[:2] == first.blocks[:2]
    assert (usage.token_states, usage.internal_fragmentation) == (8 + 2 + 1, 2 + 3)
    assert (usage.cached, usage.free) == (0, 8)
    manager.free(first)
    usage = manager.usage([second])
    assert (usage.token_states, usage.internal_fragmentation, usage.cached, usage.free) == (9, 3, 0, 12)
