"""Every block has one owner class, and counts equal table entries."""

from collections.abc import Callable

import pytest
from cache_users import User

from paged_jax.kv_cache.block_pool import BlockPool
from paged_jax.kv_cache.block_table import BlockTable
from paged_jax.kv_cache.eviction.lru import LRUEviction
from paged_jax.kv_cache.prefix_cache import PrefixCache
from paged_jax.kv_cache.prefix_cache.hash import HashPrefixCache
from paged_jax.kv_cache.prefix_cache.radix import RadixPrefixCache


class Pool(BlockPool):
    """A pool of four blocks that notes what it evicts, and whose blocks can be given content."""

    def __init__(self, kind: type[PrefixCache] = HashPrefixCache) -> None:
        self.evicted: list[int] = []
        self.cache = kind(1, LRUEviction())
        super().__init__(4, self.cache, self.evicted.extend)

    def publish(self, *block_ids: int) -> None:
        """The blocks are the beginning of a prompt 1, 2, 3 and so on, a token in each."""
        user, table = User(list(range(1, 9))), BlockTable(list(block_ids))
        for index in range(len(block_ids)):
            assert self.cache.insert(user, table, index)


@pytest.fixture(params=[HashPrefixCache, RadixPrefixCache])
def pool(request: pytest.FixtureRequest) -> Pool:
    return Pool(request.param)


def test_blocks_are_handed_out_from_one_up(pool: Pool) -> None:
    assert pool.allocate(2) == [1, 2]
    assert (pool.num_free, pool.num_cached, pool.num_in_use, pool.num_available) == (2, 0, 2, 2)
    assert pool.allocate(0) == []
    assert pool.allocate(2) == [3, 4]
    pool.check([[1, 2], [3, 4]])


def test_taking_more_than_there_are_is_an_error_and_takes_nothing(pool: Pool) -> None:
    pool.allocate(3)
    pool.publish(1)
    pool.free([1])
    with pytest.raises(RuntimeError, match="3 blocks wanted, 2 available"):
        pool.allocate(3)
    assert (pool.num_free, pool.num_cached, pool.evicted) == (1, 1, [])
    pool.check([[2, 3]])


def test_freed_block_is_free_or_cached(pool: Pool) -> None:
    pool.allocate(3)
    pool.publish(2)
    assert pool.free([1, 2, 3]) == [3, 1]
    assert (pool.num_free, pool.num_cached) == (3, 1)
    pool.check([])
    pool.allocate(3)
    assert pool.evicted == []
    assert pool.allocate(1) == [2]
    assert pool.evicted == [2]
    pool.check([[1, 2, 3, 4]])


def test_free_blocks_go_before_cached_ones_and_of_these_tails_go_first(pool: Pool) -> None:
    pool.allocate(3)
    pool.publish(1, 2, 3)
    pool.free([1, 2, 3])
    assert pool.allocate(3) == [4, 3, 2]
    assert pool.evicted == [3, 2]
    pool.check([[4, 3, 2]])
    assert pool.allocate(1) == [1]
    assert pool.num_available == 0


def test_the_block_that_was_used_last_stays_longest() -> None:
    pool = Pool()
    pool.allocate(3)
    pool.publish(1, 2, 3)
    for block in (2, 3, 1):
        pool.free([block])
    pool.share([2])
    pool.free([2])
    assert pool.allocate(4) == [4, 3, 1, 2]


def test_shared_block_stays_in_use_until_its_last_user_leaves(pool: Pool) -> None:
    (block,) = pool.allocate(1)
    pool.publish(block)
    pool.share([block])
    assert pool.ref_count(block) == 2
    assert pool.free([block]) == []
    assert (pool.num_in_use, pool.num_cached) == (1, 0)
    assert pool.free([block]) == []
    assert (pool.num_in_use, pool.num_cached) == (0, 1)
    pool.share([block])
    assert (pool.num_in_use, pool.num_cached) == (1, 0)
    pool.check([[block]])


def test_shared_block_without_content_is_free_after_its_last_user(pool: Pool) -> None:
    (block,) = pool.allocate(1)
    pool.share([block])
    assert pool.free([block]) == []
    assert pool.num_free == 3
    assert pool.free([block]) == [block]
    assert pool.num_free == 4
    pool.check([])


def test_freeing_twice_is_an_error(pool: Pool) -> None:
    pool.allocate(1)
    pool.free([1])
    with pytest.raises(RuntimeError, match="block 1 was freed more often than"):
        pool.free([1])


def test_freeing_a_cached_block_twice_is_an_error(pool: Pool) -> None:
    pool.allocate(1)
    pool.publish(1)
    pool.free([1])
    with pytest.raises(RuntimeError, match="block 1 was freed more often than"):
        pool.free([1])


def test_forgetting_frees_cached_blocks_and_leaves_those_in_use(pool: Pool) -> None:
    pool.allocate(3)
    pool.publish(3, 1, 2)
    pool.free([1, 2])
    assert sorted(pool.forget_cached()) == [1, 2]
    assert (pool.num_free, pool.num_cached, pool.num_in_use) == (3, 0, 1)
    assert pool.free([3]) == [3]
    pool.check([])
    assert pool.evicted == []  # nobody wanted blocks


@pytest.mark.parametrize(
    ("spoil", "tables", "sentence"),
    [
        (lambda pool: None, [[1, 2], [2]], "reference counts differ"),
        (lambda pool: None, [[1]], "reference counts differ"),
        (lambda pool: None, [[1, 1, 2]], "names a block twice"),
        (lambda pool: pool._free.append(1), [[1, 2]], "do not partition"),
        (lambda pool: pool._free.pop(), [[1, 2]], "do not partition"),
        (lambda pool: pool.publish(3), [[1, 2]], "do not partition"),
        (lambda pool: (pool.publish(1), pool.cache.unlock(1)), [[1, 2]], "counts other unlocked blocks"),
        (lambda pool: pool.cache.eviction.use(3) or pool.cache.eviction.add(3), [[1, 2]], "candidate"),
    ],
)
def test_check_finds_what_is_wrong(
    pool: Pool, spoil: Callable[[Pool], object], tables: list[list[int]], sentence: str
) -> None:
    pool.allocate(2)
    pool.check([[1, 2]])
    spoil(pool)
    with pytest.raises(AssertionError, match=sentence):
        pool.check(tables)


def test_a_zero_in_a_table_is_no_block(pool: Pool) -> None:
    pool.allocate(2)
    pool.check([[0, 0, 1], [0, 2]])


def test_lru_order() -> None:
    lru = LRUEviction()
    for block in (3, 1, 2):
        lru.use(block)
        lru.add(block)
    lru.remove(3)
    lru.use(3)
    lru.add(3)
    assert sorted(lru) == [1, 2, 3]
    assert [lru.pop() for _ in range(len(lru))] == [1, 2, 3]
