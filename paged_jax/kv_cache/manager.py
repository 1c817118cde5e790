"""Gives requests blocks and takes them back: the pool, the block tables and the prefix cache as one."""

from collections.abc import Sequence
from typing import Protocol

from paged_jax.kv_cache.block_pool import BlockPool, Eviction
from paged_jax.kv_cache.block_table import BlockTable
from paged_jax.kv_cache.usage import KVUsage


class PrefixCache(Protocol):
    """Finds the blocks that already hold the beginning of a request's tokens."""

    def match(self, token_ids: Sequence[int]) -> tuple[list[int], list[bytes]]:
        """Blocks, and their hashes, of the longest cached prefix."""
        ...

    def insert(self, block_id: int, index: int, token_ids: Sequence[int], hashes: list[bytes]) -> bool:
        """Offer a full block; whether it is now the one that is found."""
        ...

    def remove(self, block_id: int) -> None:
        """The block is about to hold something else."""
        ...

    def clear(self) -> None:
        """Forget everything."""
        ...


class CacheUser(Protocol):
    """What the manager reads and writes of a request."""

    token_ids: list[int]
    """All tokens known so far."""
    num_computed_tokens: int
    """Tokens whose keys and values are in the cache."""
    block_tables: tuple[BlockTable, ...]
    """One per cache group; empty while the request holds no blocks."""


class KVCacheManager:
    """Blocks of one cache group for all requests.

    A request's block table covers at least its computed tokens and those scheduled. Full blocks are offered to the
    prefix cache once their tokens are computed; they stay cached after their last user has left, until evicted.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_cache: PrefixCache, eviction: Eviction) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self._emptied: list[int] = []
        self.pool = BlockPool(num_blocks, eviction, self._forget)

    def match(self, request: CacheUser) -> tuple[list[int], list[bytes]]:
        """Cached blocks that hold the beginning of the request's tokens, and their hashes; takes no reference.

        The last token is always left to compute, since it is its output that the next token is sampled from.
        """
        return self.prefix_cache.match(request.token_ids[:-1])

    def admit(self, request: CacheUser, match: tuple[list[int], list[bytes]], num_new_tokens: int) -> bool:
        """Give a request without blocks the matched ones and new ones for the tokens after them, or nothing.

        There must be blocks for all its tokens, not only for the first chunk: a prompt that does not fit would be
        preempted half-way and begun again, over and over. Cached blocks that are matched stop being available to
        `allocate`: that is counted before anything is taken.
        """
        shared, hashes = match
        available = self.pool.num_available - sum(self.pool.ref_count(b) == 0 for b in shared)
        if self._blocks_for(len(request.token_ids)) - len(shared) > available:
            return False
        num_matched = len(shared) * self.block_size
        count = self._blocks_for(num_matched + num_new_tokens) - len(shared)
        self.pool.share(shared)
        request.block_tables = (BlockTable([*shared, *self.pool.allocate(count)], list(hashes)),)
        request.num_computed_tokens = num_matched
        return True

    def extend(self, request: CacheUser, num_new_tokens: int) -> bool:
        """Make room for the next tokens of a running request; False, and nothing taken, when blocks run out."""
        (table,) = request.block_tables
        count = self._blocks_for(request.num_computed_tokens + num_new_tokens) - len(table)
        if count <= 0:
            return True
        if count > self.pool.num_available:
            return False
        table.block_ids.extend(self.pool.allocate(count))
        return True

    def publish(self, request: CacheUser) -> None:
        """Offer the request's full blocks to the prefix cache: their tokens are computed now."""
        (table,) = request.block_tables
        for index in range(len(table.hashes), request.num_computed_tokens // self.block_size):
            block = table.block_ids[index]
            if self.prefix_cache.insert(block, index, request.token_ids, table.hashes):
                self.pool.mark_cached(block)

    def free(self, request: CacheUser) -> None:
        """Take all blocks back; what the prefix cache knows stays available for hits."""
        for table in request.block_tables:
            self._emptied += self.pool.free(table.block_ids)
        request.block_tables = ()
        request.num_computed_tokens = 0

    def reset_prefix_cache(self) -> None:
        """Forget all cached content; blocks in use stay in use."""
        self._emptied += self.pool.forget_cached()
        self.prefix_cache.clear()

    def take_emptied(self) -> list[int]:
        """Blocks whose content was given up since the last call, some of which may be in use again."""
        emptied, self._emptied = self._emptied, []
        return emptied

    def usage(self, running: Sequence[CacheUser]) -> KVUsage:
        """Token slots by what they hold; only the tail of a block table can be unfilled, and tails are not shared."""
        unfilled = sum(
            len(table) * self.block_size - request.num_computed_tokens
            for request in running
            for table in request.block_tables
        )
        return KVUsage(
            token_states=self.pool.num_in_use * self.block_size - unfilled,
            internal_fragmentation=unfilled,
            cached=self.pool.num_cached * self.block_size,
            free=self.pool.num_free * self.block_size,
        )

    def check_integrity(self, running: Sequence[CacheUser]) -> None:
        """Raise AssertionError unless every block is in one class and every count equals its table entries."""
        tables = [table for request in running for table in request.block_tables]
        self.pool.check(table.block_ids for table in tables)
        for request in running:
            (table,) = request.block_tables
            assert len(table) * self.block_size >= request.num_computed_tokens, "computed tokens without a block"

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _forget(self, block_id: int) -> None:
        self.prefix_cache.remove(block_id)
        self._emptied.append(block_id)
