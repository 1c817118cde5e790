"""The radix tree: its runs, its notes of where requests publish, and what it gives up."""

from prefix_users import BLOCK_SIZE, CountingList, User, match, publish, release, take, user

from paged_jax.kv_cache.eviction.fifo import FIFOEviction
from paged_jax.kv_cache.eviction.lru import LRUEviction
from paged_jax.kv_cache.prefix_cache.radix import RadixPrefixCache


def test_a_salt_is_not_mistaken_for_tokens() -> None:
    """The radix tree's first keys hold the salt and the tokens: a salt of a block's length must not shift them."""
    tree = RadixPrefixCache(BLOCK_SIZE, LRUEviction())
    take(tree, "ab", 1, 2)
    first = bytes(8 * BLOCK_SIZE).decode()
    assert tree.match(User([0, ord("a")] * 2, first), 2) == []
    assert tree.match(User([0, 0, 0, ord("a")], ""), 2) == []


def test_publishing_one_more_block_reads_only_its_tokens() -> None:
    cache = RadixPrefixCache(BLOCK_SIZE, LRUEviction())
    holder = user("abcdefgh")
    publish(cache, holder, 1, 2, 3, 4, 5, 6)
    holder.token_ids = CountingList(holder.token_ids)
    publish(cache, holder, 7)
    assert holder.token_ids.num_read == BLOCK_SIZE
    take(cache, "abx", 11, 12, 13)  # splits the run
    publish(cache, holder, 8)
    assert holder.token_ids.num_read == 2 * BLOCK_SIZE
    assert match(cache, "abcdefgh") == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_split_keeps_cursors_above_and_below() -> None:
    cache = RadixPrefixCache(BLOCK_SIZE, LRUEviction())
    long = take(cache, "abcd", 1, 2, 3, 4)
    short = take(cache, "abx", 5, 6)  # duplicates: its cursor is in the run of the first
    take(cache, "ay", 7, 8)
    take(cache, "abcz", 9, 10, 11, 12)
    for holder in (long, short):
        holder.token_ids = CountingList([*holder.token_ids, 9, 9])
    assert publish(cache, short, 13) == [True]
    assert publish(cache, long, 14) == [True]
    assert (short.token_ids.num_read, long.token_ids.num_read) == (BLOCK_SIZE, BLOCK_SIZE)
    assert match(cache, "abx") == [1, 2, 13]
    assert cache.match(long, 5) == [1, 2, 3, 4, 14]
    assert match(cache, "ay") == [1, 8]
    assert match(cache, "abcz") == [1, 2, 3, 12]


def test_an_evicted_path_is_published_again_from_own_blocks() -> None:
    cache = RadixPrefixCache(BLOCK_SIZE, LRUEviction())
    take(cache, "abc", 1, 2, 3)
    second = user("abcd")
    assert publish(cache, second, 4, 5, 6) == [False, False, False]
    release(cache, 1, 2, 3)
    assert [cache.evict(), cache.evict()] == [3, 2]
    assert publish(cache, second, 7) == [True]
    assert match(cache, "abcd") == [1, 5, 6, 7]
    assert [block in cache for block in (4, 5, 6, 7)] == [False, True, True, True]
    assert cache.num_unlocked == 1


def test_what_grew_in_place_of_an_evicted_end_is_not_mistaken_for_it() -> None:
    """The run is as long again and ends with the same block, but differs before it."""
    cache = RadixPrefixCache(BLOCK_SIZE, LRUEviction())
    take(cache, "abc", 1, 2, 3)
    second = user("abcd")
    publish(cache, second, 4, 5, 6)
    release(cache, 1, 2, 3)
    assert [cache.evict(), cache.evict()] == [3, 2]
    take(cache, "axc", 7, 8, 9)
    assert publish(cache, second, 10) == [True]
    assert match(cache, "axcd") == [1, 8, 9]
    assert match(cache, "abcd") == [1, 5, 6, 10]


def test_unlocked_blocks_above_locked_ones_can_be_given_up() -> None:
    """A request with duplicates of the first blocks extended the path of a request that has left."""
    cache = RadixPrefixCache(BLOCK_SIZE, LRUEviction())
    take(cache, "ab", 1, 2)
    second = user("abcdef")
    assert publish(cache, second, 3, 4, 5, 6) == [False, False, True, True]
    take(cache, "abcx", 7, 8, 9, 10)  # below the second's third block
    release(cache, 1, 2)
    assert cache.num_unlocked == 2
    assert cache.evict() == 2
    cache.check()
    assert [block in cache for block in (1, 5, 6, 10)] == [True, False, False, False]
    assert (cache.evict(), cache.num_unlocked, len(cache)) == (1, 0, 0)
    assert publish(cache, second, 11) == [True]
    assert match(cache, "abcde") == [3, 4, 5, 6, 11]


def test_the_tree_gives_up_only_ends() -> None:
    cache = RadixPrefixCache(BLOCK_SIZE, FIFOEviction())  # which would give up the beginning first
    take(cache, "abc", 1, 2, 3)
    take(cache, "ax", 4, 5)
    release(cache, 1, 2, 3)
    release(cache, 5)
    assert [cache.evict() for _ in range(4)] == [3, 2, 5, 1]


def test_a_run_must_match_to_its_end_before_a_branch_is_taken() -> None:
    cache = RadixPrefixCache(BLOCK_SIZE, LRUEviction())
    take(cache, "abcd", 1, 2, 3, 4)
    take(cache, "abcx", 5, 6, 7, 8)
    assert match(cache, "adxd") == match(cache, "ad") == [1]


def test_of_unlocked_blocks_above_locked_ones_the_deepest_is_given_up() -> None:
    cache = RadixPrefixCache(BLOCK_SIZE, LRUEviction())
    take(cache, "ab", 1, 2)
    take(cache, "ax", 3, 4)
    take(cache, "abc", 5, 6, 7)
    take(cache, "axc", 8, 9, 10)
    release(cache, 1, 2)
    release(cache, 4)
    assert cache.num_unlocked == 3
    assert sorted([cache.evict(), cache.evict()]) == [2, 4]
    cache.check()
    assert cache.evict() == 1
    assert (len(cache), cache.num_unlocked) == (0, 0)


def test_publishing_under_an_end_takes_it_from_the_candidates() -> None:
    cache = RadixPrefixCache(BLOCK_SIZE, LRUEviction())
    take(cache, "ab", 1, 2)
    second = take(cache, "ab", 3, 4)
    release(cache, 1, 2)
    take(cache, "z", 5)
    release(cache, 5)
    second.token_ids += user("c").token_ids
    assert publish(cache, second, 6) == [True]
    assert cache.evict() == 5
