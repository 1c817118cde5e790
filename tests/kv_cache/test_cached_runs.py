"""What a prefix cache tells of what it holds."""

import random

import pytest
from prefix_users import BLOCK_SIZE, release, take

from paged_jax.kv_cache.eviction.fifo import FIFOEviction
from paged_jax.kv_cache.eviction.lru import LRUEviction
from paged_jax.kv_cache.prefix_cache import CachedRun
from paged_jax.kv_cache.prefix_cache.hash import HashPrefixCache
from paged_jax.kv_cache.prefix_cache.none import NoPrefixCache
from paged_jax.kv_cache.prefix_cache.radix import RadixPrefixCache


def tokens(letters):
    return tuple(token for letter in letters for token in (0, ord(letter)))


def test_the_tree_tells_its_runs():
    tree = RadixPrefixCache(BLOCK_SIZE, LRUEviction())
    take(tree, "abc", 1, 2, 3)
    assert tree.runs() == [CachedRun(None, (1, 2, 3), tokens("abc"))]
    take(tree, "abd", 1, 2, 4)
    take(tree, "x", 5)
    assert tree.runs() == [
        CachedRun(None, (1, 2), tokens("ab")),
        CachedRun(0, (3,), tokens("c")),
        CachedRun(0, (4,), tokens("d")),
        CachedRun(None, (5,), tokens("x")),
    ]


def test_the_dictionary_tells_a_run_for_each_block():
    cache = HashPrefixCache(BLOCK_SIZE, LRUEviction())
    take(cache, "ab", 1, 2)
    take(cache, "ac", 1, 3)
    assert cache.runs() == [
        CachedRun(None, (1,), tokens("a")),
        CachedRun(0, (2,), tokens("b")),
        CachedRun(0, (3,), tokens("c")),
    ]


def test_in_a_dictionary_the_rest_of_a_prefix_may_be_left_alone():
    cache = HashPrefixCache(BLOCK_SIZE, FIFOEviction())
    take(cache, "abc", 1, 2, 3)
    release(cache, 1, 2, 3)
    assert cache.evict() == 1
    assert cache.runs() == [CachedRun(None, (2,), tokens("b")), CachedRun(0, (3,), tokens("c"))]


def test_salts_keep_runs_apart():
    for cache in HashPrefixCache(BLOCK_SIZE, LRUEviction()), RadixPrefixCache(BLOCK_SIZE, LRUEviction()):
        take(cache, "a", 1, salt="one")
        take(cache, "a", 2, salt="two")
        assert cache.runs() == [CachedRun(None, (1,), tokens("a")), CachedRun(None, (2,), tokens("a"))]


def test_nothing_is_cached_where_nothing_is_shared():
    assert NoPrefixCache(BLOCK_SIZE, LRUEviction()).runs() == []


@pytest.mark.parametrize("kind", [HashPrefixCache, RadixPrefixCache])
def test_the_way_to_each_cached_block_spells_what_it_was_cached_for(kind):
    rng, cache, texts = random.Random(5), kind(BLOCK_SIZE, LRUEviction()), {}
    block = 0
    for _ in range(40):
        text = "".join(rng.choice("ab") for _ in range(rng.randint(1, 6)))
        blocks = list(range(block + 1, block + 1 + len(text)))
        block += len(text)
        take(cache, text, *blocks)
        texts |= {number: text[: i + 1] for i, number in enumerate(blocks)}
    runs = cache.runs()
    spelt = []
    for number, run in enumerate(runs):
        assert run.parent is None or run.parent < number
        before = () if run.parent is None else spelt[run.parent]
        spelt.append(before + run.token_ids)
        for i, cached in enumerate(run.block_ids):
            assert cached in cache
            assert before + run.token_ids[: (i + 1) * BLOCK_SIZE] == tokens(texts[cached])
    assert sum(len(run.block_ids) for run in runs) == len(cache)
