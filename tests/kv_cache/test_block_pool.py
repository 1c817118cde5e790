"""Every block has one owner class, and counts equal table entries."""

from collections.abc import Callable

import pytest

from paged_jax.kv_cache.block_pool import BlockPool
from paged_jax.kv_cache.eviction.lru import LRUEviction


@pytest.fixture
def evicted() -> list[int]:
    return []


@pytest.fixture
def pool(evicted: list[int]) -> BlockPool:
    return BlockPool(4, LRUEviction(), evicted.append)


def test_blocks_are_handed_out_from_one_up(pool: BlockPool) -> None:
    assert pool.allocate(2) == [1, 2]
    assert (pool.num_free, pool.num_cached, pool.num_in_use, pool.num_available) == (2, 0, 2, 2)
    assert pool.allocate(2) == [3, 4]
    pool.check([[1, 2], [3, 4]])


def test_taking_more_than_there_are_is_an_error_and_takes_nothing(pool: BlockPool) -> None:
    pool.allocate(3)
    with pytest.raises(RuntimeError, match="2 blocks wanted, 1 available"):
        pool.allocate(2)
    assert pool.num_free == 1


def test_freed_block_is_free_or_cached(pool: BlockPool, evicted: list[int]) -> None:
    pool.allocate(3)
    pool.mark_cached(2)
    assert pool.free([1, 2, 3]) == [3, 1]
    assert (pool.num_free, pool.num_cached) == (3, 1)
    pool.check([])
    pool.allocate(3)
    assert evicted == []
    assert pool.allocate(1) == [2]
    assert evicted == [2]
    pool.check([[1, 2, 3, 4]])


def test_shared_block_stays_in_use_until_its_last_user_leaves(pool: BlockPool) -> None:
    (block,) = pool.allocate(1)
    pool.mark_cached(block)
    pool.share([block])
    assert pool.ref_count(block) == 2
    assert pool.free([block]) == []
    assert (pool.num_in_use, pool.num_cached) == (1, 0)
    assert pool.free([block]) == []
    assert (pool.num_in_use, pool.num_cached) == (0, 1)
    pool.share([block])
    assert (pool.num_in_use, pool.num_cached) == (1, 0)
    pool.check([[block]])


def test_freeing_twice_is_an_error(pool: BlockPool) -> None:
    pool.allocate(1)
    pool.free([1])
    with pytest.raises(RuntimeError, match="block 1 was freed more often than"):
        pool.free([1])


def test_forgetting_frees_cached_blocks_and_leaves_those_in_use(pool: BlockPool) -> None:
    pool.allocate(3)
    for block in (1, 2, 3):
        pool.mark_cached(block)
    pool.free([1, 2])
    assert sorted(pool.forget_cached()) == [1, 2]
    assert (pool.num_free, pool.num_cached, pool.num_in_use) == (3, 0, 1)
    assert pool.free([3]) == [3]
    pool.check([])


@pytest.mark.parametrize(
    ("spoil", "tables", "sentence"),
    [
        (lambda pool: None, [[1, 2], [2]], "reference counts differ"),
        (lambda pool: None, [[1]], "reference counts differ"),
        (lambda pool: None, [[1, 1, 2]], "names a block twice"),
        (lambda pool: None, [[0, 1, 2]], "null block"),
        (lambda pool: pool._free.append(1), [[1, 2]], "do not partition"),
        (lambda pool: pool._free.pop(), [[1, 2]], "do not partition"),
        (lambda pool: pool.mark_cached(3), [[1, 2]], "a free block is known to the prefix cache"),
        (lambda pool: pool._eviction.add(pool._free.pop()), [[1, 2]], "an evictable block is not known"),
    ],
)
def test_check_finds_what_is_wrong(
    pool: BlockPool, spoil: Callable[[BlockPool], object], tables: list[list[int]], sentence: str
) -> None:
    pool.allocate(2)
    pool.check([[1, 2]])
    spoil(pool)
    with pytest.raises(AssertionError, match=sentence):
        pool.check(tables)


def test_lru_order() -> None:
    lru = LRUEviction()
    for block in (3, 1, 2):
        lru.add(block)
    lru.remove(3)
    lru.add(3)
    assert list(lru) == [1, 2, 3]
    assert [lru.pop() for _ in range(len(lru))] == [1, 2, 3]
