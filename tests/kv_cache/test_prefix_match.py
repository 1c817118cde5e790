"""The longest usable prefix of several cache groups, against trying every length."""

import hypothesis.strategies as st
import pytest
from cache_users import User
from hypothesis import given, settings

from paged_jax.kv_cache.block_table import BlockTable
from paged_jax.kv_cache.eviction.lru import LRUEviction
from paged_jax.kv_cache.prefix_cache import PrefixCache
from paged_jax.kv_cache.prefix_cache.hash import HashPrefixCache
from paged_jax.kv_cache.prefix_cache.none import NoPrefixCache
from paged_jax.kv_cache.prefix_cache.radix import RadixPrefixCache
from paged_jax.kv_cache.prefix_match import first_seen_block, longest_match

NUM_BLOCKS = 12
WINDOWS = [None, 1, 3, 4, 5, 16]


def prompt(block_size: int) -> User:
    return User([7 * i % 5 for i in range(NUM_BLOCKS * block_size)])


def block_id(group: int, index: int) -> int:
    """Which block holds block number `index` of the prompt, if it is cached."""
    return 100 * (group + 1) + index


def cache_with(kind: type[PrefixCache], block_size: int, group: int, present: set[int]) -> PrefixCache:
    cache = kind(block_size, LRUEviction())
    table = BlockTable([block_id(group, index) for index in range(NUM_BLOCKS)])
    for index in sorted(present):
        assert cache.insert(prompt(block_size), table, index)
    return cache


def seen_blocks(window: int | None, position: int, block_size: int) -> list[int]:
    """Blocks with a key that the query at the position sees, other than those of the position's own block on."""
    keys = range(position) if window is None else range(max(0, position - window + 1), position)
    return sorted({key // block_size for key in keys})


def by_trying(
    present: list[set[int]], windows: list[int | None], block_size: int, limit: int
) -> tuple[int, list[list[int]]]:
    for length in range(limit, -1, -1):
        wanted = [seen_blocks(window, length * block_size, block_size) for window in windows]
        if all(have.issuperset(want) for have, want in zip(present, wanted, strict=True)):
            return length, [[block_id(g, index) for index in want] for g, want in enumerate(wanted)]
    raise AssertionError("nothing is always enough for nothing")


@st.composite
def missing_blocks(draw: st.DrawFn) -> set[int]:
    """Cached blocks: few or many are missing."""
    share = draw(st.sampled_from([1, 2, 4, 12]))
    return {index for index in range(NUM_BLOCKS) if draw(st.integers(0, share)) > 0}


@settings(max_examples=400)
@given(
    groups=st.lists(st.tuples(st.sampled_from(WINDOWS), missing_blocks()), min_size=1, max_size=3),
    block_size=st.sampled_from([1, 3, 4]),
    limit=st.integers(0, NUM_BLOCKS),
)
def test_equals_trying_every_length(groups: list[tuple[int | None, set[int]]], block_size: int, limit: int) -> None:
    windows = [window for window, _ in groups]
    present = [blocks for _, blocks in groups]
    caches = [cache_with(HashPrefixCache, block_size, g, blocks) for g, blocks in enumerate(present)]
    expected = by_trying(present, windows, block_size, limit)
    assert longest_match(caches, windows, block_size, prompt(block_size), limit) == expected


@settings(max_examples=100)
@given(
    lengths=st.lists(st.integers(0, NUM_BLOCKS), min_size=1, max_size=3),
    block_size=st.sampled_from([1, 3, 4]),
    limit=st.integers(0, NUM_BLOCKS),
)
def test_trees_without_windows_agree_on_the_shortest(lengths: list[int], block_size: int, limit: int) -> None:
    caches = [cache_with(RadixPrefixCache, block_size, g, set(range(n))) for g, n in enumerate(lengths)]
    length = min([*lengths, limit])
    found = longest_match(caches, [None] * len(caches), block_size, prompt(block_size), limit)
    assert found == (length, [[block_id(g, index) for index in range(length)] for g in range(len(caches))])


@pytest.mark.parametrize("block_size", [1, 3, 4])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 16])
def test_first_seen_block(window: int, block_size: int) -> None:
    for position in range(60):
        keys = range(max(0, position - window + 1), position + 1)
        assert first_seen_block(window, position, block_size) == keys[0] // block_size


def match(*groups: tuple[int | None, set[int]], limit: int = 6) -> tuple[int, list[list[int]]]:
    """With blocks of 4; block number i of group g is 100 * (g + 1) + i."""
    caches = [cache_with(HashPrefixCache, 4, g, present) for g, (_, present) in enumerate(groups)]
    return longest_match(caches, [window for window, _ in groups], 4, prompt(4), limit)


def test_by_hand() -> None:
    assert match((None, {0, 1, 2, 4, 5})) == (3, [[100, 101, 102]])
    # the query at 24 sees keys 20 to 24 through a window of 5, 19 to 24 through one of 6
    assert match((5, {5})) == (6, [[105]])
    assert match((6, {5})) == (0, [[]])
    assert match((6, {1, 2, 5})) == (3, [[101, 102]])
    # a short beginning is enough for itself, however wide the window
    assert match((16, {0, 1, 4, 5})) == (2, [[100, 101]])
    assert match((1, set())) == (6, [[]])  # sees itself only


def test_a_later_group_sends_the_earlier_ones_back() -> None:
    # group 0 could have 6 blocks, and 2, but not the 4 that group 1 has: then group 1 needs two others
    assert match((6, {0, 1, 4, 5}), (None, {0, 1, 2, 3})) == (2, [[100, 101], [200, 201]])
    assert match((5, {1, 5}), (5, {3, 1})) == (2, [[101], [201]])
    assert match((5, {5}), (5, {4}), (5, {3})) == (0, [[], [], []])
    assert match((5, {3, 2}), (5, {5, 3, 2}), (None, {0, 1, 2})) == (3, [[102], [202], [300, 301, 302]])


def test_another_prompt_finds_nothing() -> None:
    caches = [cache_with(HashPrefixCache, 4, g, set(range(NUM_BLOCKS))) for g in range(2)]
    other = User([9, *prompt(4).token_ids[1:]])
    assert longest_match(caches, [None, 5], 4, other, 6) == (0, [[], []])
    salted = User(prompt(4).token_ids, cache_salt="x")
    assert longest_match(caches, [None, 5], 4, salted, 6) == (0, [[], []])


def test_without_a_cache() -> None:
    caches = [NoPrefixCache(4, LRUEviction()) for _ in range(2)]
    assert longest_match(caches, [None, 5], 4, prompt(4), 6) == (0, [[], []])
