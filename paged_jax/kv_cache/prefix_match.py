"""The longest cached beginning of a request's tokens that every cache group still has as far as it needs it."""

from collections.abc import Sequence

from paged_jax.kv_cache.prefix_cache import PrefixCache, PrefixUser


def longest_match(
    caches: Sequence[PrefixCache], windows: Sequence[int | None], block_size: int, user: PrefixUser, limit: int
) -> tuple[int, list[list[int]]]:
    """How many leading whole blocks need not be computed, at most `limit`, and each group's blocks for them.

    A group without a window needs all of them, a group with one the last few, which the next query sees.
    """
    while True:
        found: list[list[int]] = []
        length = limit
        for cache, window in zip(caches, windows, strict=True):
            if window is None:
                blocks = cache.match(user, length)
                length = len(blocks)
            else:
                length, blocks = _windowed_match(cache, window, block_size, user, length)
            found.append(blocks)
        if length == limit or len(caches) == 1:
            return length, found
        limit = length  # a later group has less: the others may need other blocks then


def first_seen_block(window: int, position: int, block_size: int) -> int:
    """The first block that the query at `position` sees: of its keys the first is at position - window + 1."""
    return max(0, position - window + 1) // block_size


def _windowed_match(
    cache: PrefixCache, window: int, block_size: int, user: PrefixUser, limit: int
) -> tuple[int, list[int]]:
    """The most leading blocks, at most `limit`, after which the window's blocks are all cached, and the latter."""
    length = limit
    blocks: list[int] = []
    while length - len(blocks) > first_seen_block(window, length * block_size, block_size):
        index = length - len(blocks) - 1
        block = cache.find(user, index)
        if block is None:
            length, blocks = index, []
        else:
            blocks.append(block)
    return length, blocks[::-1]
