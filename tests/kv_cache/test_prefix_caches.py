"""The prefix caches by hand-made histories, and against a brute-force model under every eviction policy."""

from collections.abc import Callable

import pytest
from prefix_users import BLOCK_SIZE, CountingList, User, match, publish, release, take, user

from paged_jax.kv_cache.eviction import Eviction
from paged_jax.kv_cache.eviction.belady import BeladyEviction
from paged_jax.kv_cache.eviction.cost import CostEviction
from paged_jax.kv_cache.eviction.fifo import FIFOEviction
from paged_jax.kv_cache.eviction.lfu import LFUEviction
from paged_jax.kv_cache.eviction.lru import LRUEviction
from paged_jax.kv_cache.prefix_cache import PrefixCache
from paged_jax.kv_cache.prefix_cache.hash import HashPrefixCache, content_keys
from paged_jax.kv_cache.prefix_cache.none import NoPrefixCache
from paged_jax.kv_cache.prefix_cache.radix import RadixPrefixCache

CACHES = [HashPrefixCache, RadixPrefixCache]
EVICTIONS = [LRUEviction, LFUEviction, FIFOEviction, CostEviction, BeladyEviction]


@pytest.fixture(params=CACHES)
def cache(request: pytest.FixtureRequest) -> PrefixCache:
    return request.param(BLOCK_SIZE, LRUEviction())


def test_matches_the_longest_run_of_whole_blocks(cache: PrefixCache) -> None:
    take(cache, "abcd", 1, 2, 3, 4)
    assert match(cache, "abcd") == [1, 2, 3, 4]
    assert match(cache, "abx") == [1, 2]
    assert match(cache, "bcd") == match(cache, "xbcd") == match(cache, "") == []
    longer = user("abcdef")
    assert cache.match(longer, 6) == [1, 2, 3, 4]
    assert cache.match(longer, 3) == [1, 2, 3]
    assert cache.match(longer, 0) == []
    partial = User(user("abc").token_ids[:-1])
    assert cache.match(partial, 3) == [1, 2]


def test_matches_across_branches(cache: PrefixCache) -> None:
    take(cache, "abcd", 1, 2, 3, 4)
    second = user("abxy")
    second.table.block_ids = cache.match(second, 4)
    assert publish(cache, second, 5, 6) == [True, True]
    take(cache, "z", 7)
    assert match(cache, "abcd") == [1, 2, 3, 4]
    assert match(cache, "abxyz") == [1, 2, 5, 6]
    assert match(cache, "zb") == [7]
    assert len(cache) == 7


def test_the_first_block_of_a_content_stays_the_one_found(cache: PrefixCache) -> None:
    take(cache, "ab", 1, 2)
    version = cache.version
    second = user("ab")
    assert publish(cache, second, 3, 4) == [False, False]
    assert cache.version == version
    assert match(cache, "ab") == [1, 2]
    assert (3 in cache, 1 in cache, len(cache)) == (False, True, 2)


def test_offering_a_found_block_again_changes_nothing(cache: PrefixCache) -> None:
    first = take(cache, "ab", 1, 2)
    version = cache.version
    first.table.cursor = None
    assert cache.insert(first, first.table, 1)
    assert (cache.version, len(cache)) == (version, 2)
    cache.check()


def test_salts_isolate(cache: PrefixCache) -> None:
    take(cache, "ab", 1, 2)
    take(cache, "ab", 3, 4, salt="s")
    take(cache, "ab", 5, 6, salt="\u00e9")
    assert match(cache, "ab") == [1, 2]
    assert match(cache, "ab", "s") == [3, 4]
    assert match(cache, "ab", "\u00e9") == [5, 6]
    assert match(cache, "ab", "t") == []


def test_a_salt_that_spells_a_content_finds_nothing() -> None:
    for first in range(10**6):  # until a block's content is text, and could be a salt
        beginning = [first, 1, 2, 3]
        try:
            salt = content_keys(beginning, BLOCK_SIZE)[1].decode()
        except UnicodeDecodeError:
            continue
        break
    cache = HashPrefixCache(BLOCK_SIZE, LRUEviction())
    publish(cache, User([*beginning, 50, 51]), 1, 2, 3)
    assert cache.match(User([*beginning, 50, 51]), 3) == [1, 2, 3]
    assert cache.match(User([50, 51], salt), 1) == []


def test_locked_blocks_are_not_given_up(cache: PrefixCache) -> None:
    take(cache, "abc", 1, 2, 3)
    assert cache.num_unlocked == 0
    release(cache, 1, 2, 3)
    assert cache.num_unlocked == 3
    cache.lock(1)
    cache.lock(2)
    assert cache.num_unlocked == 1
    assert cache.evict() == 3
    assert (cache.num_unlocked, len(cache), match(cache, "abc")) == (0, 2, [1, 2])
    cache.check()


def test_tails_are_given_up_before_heads(cache: PrefixCache) -> None:
    take(cache, "abc", 1, 2, 3)
    take(cache, "x", 4)
    release(cache, 1, 2, 3)
    release(cache, 4)
    assert [cache.evict() for _ in range(4)] == [3, 2, 1, 4]
    assert (len(cache), cache.num_unlocked) == (0, 0)
    cache.check()


def test_shared_blocks_count_once(cache: PrefixCache) -> None:
    """sglang #35270: what two entries of a tree share must not count as evictable twice."""
    take(cache, "abcd", 1, 2, 3, 4)
    second = user("abxy")
    second.table.block_ids = cache.match(second, 4)
    publish(cache, second, 5, 6)
    release(cache, 3, 4)  # the first user leaves 1 and 2 to the second
    assert cache.num_unlocked == 2
    release(cache, 1, 2, 5, 6)
    assert cache.num_unlocked == len(cache) == 6
    assert sorted(cache.evict() for _ in range(6)) == [1, 2, 3, 4, 5, 6]
    assert cache.num_unlocked == 0


def test_clear_returns_the_unlocked(cache: PrefixCache) -> None:
    holder = take(cache, "abcd", 1, 2)
    other = take(cache, "xy", 3, 4)
    release(cache, 3, 4)
    version = cache.version
    assert sorted(cache.clear()) == [3, 4]
    assert (len(cache), cache.num_unlocked, match(cache, "ab"), 1 in cache) == (0, 0, [], False)
    assert cache.version != version
    cache.check()
    assert publish(cache, holder, 5) == [True]  # its notes of what was cached are void
    assert other.table.block_ids == [3, 4]
    assert match(cache, "abc") == ([1, 2, 5] if isinstance(cache, RadixPrefixCache) else [])


def test_version_changes_with_what_is_found(cache: PrefixCache) -> None:
    versions = [cache.version]
    take(cache, "a", 1)
    versions.append(cache.version)
    cache.match(user("ab"), 2)
    assert cache.version == versions[-1]
    release(cache, 1)
    versions.append(cache.evict() and cache.version)
    versions.append(cache.clear() or cache.version)
    assert len(set(versions)) == 4


@pytest.mark.parametrize("make", EVICTIONS)
@pytest.mark.parametrize("make_cache", CACHES)
def test_hits_and_contents_reach_the_policy(
    make_cache: Callable[[int, Eviction], PrefixCache], make: Callable[[], Eviction]
) -> None:
    eviction = make()
    if isinstance(eviction, BeladyEviction):
        eviction.set_future([content_keys(user("y").token_ids, BLOCK_SIZE)])
    cache = make_cache(BLOCK_SIZE, eviction)
    take(cache, "x", 1)
    take(cache, "y", 2)
    cache.hit([2])
    release(cache, 2)
    release(cache, 1)
    assert cache.evict() == (2 if make in (LRUEviction, CostEviction) else 1)


def test_find_needs_the_same_beginning_but_not_that_it_is_cached() -> None:
    cache = HashPrefixCache(BLOCK_SIZE, LRUEviction())
    take(cache, "abc", 1, 2, 3)
    release(cache, 3, 2, 1)  # as a window does: the head first
    assert cache.evict() == 1
    assert match(cache, "abc") == []
    assert [cache.find(user("abcd"), index) for index in range(4)] == [None, 2, 3, None]
    assert cache.find(user("xbc"), 1) is None


def test_the_tree_finds_no_single_blocks() -> None:
    assert (HashPrefixCache.supports_windows, RadixPrefixCache.supports_windows) == (True, False)
    with pytest.raises(NotImplementedError, match="RadixPrefixCache"):
        RadixPrefixCache(BLOCK_SIZE, LRUEviction()).find(user("a"), 0)


def test_contents_are_worked_out_once_and_only_as_needed() -> None:
    cache = HashPrefixCache(BLOCK_SIZE, LRUEviction())
    holder = user("abcdef")
    holder.token_ids = CountingList(holder.token_ids)
    cache.match(holder, 2)
    assert (len(holder.block_contents), holder.token_ids.num_read) == (2, 2 * BLOCK_SIZE)
    cache.find(holder, 3)
    cache.match(holder, 4)
    publish(cache, holder, 1, 2, 3, 4)
    assert holder.token_ids.num_read == 4 * BLOCK_SIZE
    assert holder.block_contents == content_keys(user("abcd").token_ids, BLOCK_SIZE)


def test_keys_identify_all_before() -> None:
    keys = {salt: content_keys([*user("aab").token_ids, 7], BLOCK_SIZE, salt) for salt in ("", "s")}
    assert [len(keys[salt]) for salt in keys] == [3, 3]
    assert len({key for salt in keys for key in keys[salt]}) == 6


def test_a_collision_does_not_find_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    class Constant:
        def __init__(self, content: bytes, digest_size: int, person: bytes = b"") -> None:
            self.size = digest_size

        def digest(self) -> bytes:
            return bytes(self.size)

    monkeypatch.setattr("paged_jax.kv_cache.prefix_cache.hash.blake2b", Constant)
    cache = HashPrefixCache(BLOCK_SIZE, LRUEviction())
    take(cache, "abc", 1, 2, 3)
    assert match(cache, "b") == [2]  # the collision is there: without the digest only the block's own tokens count
    assert match(cache, "axc") == [1]
    assert match(cache, "xyz") == []
    assert publish(cache, user("axc"), 4, 5, 6) == [False, True, False]
    assert match(cache, "axc") == [1, 5, 3]


def test_no_cache_keeps_nothing() -> None:
    cache = NoPrefixCache(BLOCK_SIZE, LRUEviction())
    holder = user("ab")
    assert publish(cache, holder, 1, 2) == [False, False]
    assert (cache.match(holder, 2), cache.find(holder, 0), len(cache), 1 in cache, cache.clear()) == (
        [],
        None,
        0,
        False,
        [],
    )
    assert (cache.num_unlocked, cache.version, holder.block_contents) == (0, 0, [])
    cache.hit([])
    for misuse in (cache.lock, cache.unlock, lambda block: cache.hit([block]), lambda _: cache.evict()):
        with pytest.raises(RuntimeError):
            misuse(1)
