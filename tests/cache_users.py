"""Requests as the KV cache manager sees them, and managers for them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from paged_jax.kv_cache.block_table import BlockTable
from paged_jax.kv_cache.eviction.lru import LRUEviction
from paged_jax.kv_cache.group import CacheGroup
from paged_jax.kv_cache.manager import CacheSpec, KVCacheManager, Match
from paged_jax.kv_cache.prefix_cache import PrefixCache
from paged_jax.kv_cache.prefix_cache.hash import HashPrefixCache

FULL = CacheGroup(1, 1, 8)


def windowed(window: int, num_layers: int = 1) -> CacheGroup:
    """Layers whose queries see so many keys, their own included."""
    return CacheGroup(num_layers, 1, 8, sliding_window=window)


@dataclass(eq=False)
class User:
    """The part of a request that the manager sees."""

    token_ids: list[int]
    cache_salt: str = ""
    request_id: str = "it"
    num_computed_tokens: int = 0
    num_writable_tokens: int = 0
    next_publish: int = 0
    block_contents: list[bytes] = field(default_factory=list)
    block_tables: tuple[BlockTable, ...] = ()
    host_blocks: tuple[list[int], ...] = ()
    match: Match | None = None

    @property
    def tables(self) -> list[list[int]]:
        """Per cache group the block ids."""
        return [table.block_ids for table in self.block_tables]

    @property
    def blocks(self) -> list[int]:
        """The block ids of the first cache group."""
        return self.tables[0]


def make(
    num_blocks: int,
    block_size: int = 4,
    groups: Sequence[CacheGroup] = (FULL,),
    *,
    prefix_cache: type[PrefixCache] = HashPrefixCache,
    num_swap_blocks: int = 0,
    max_request_len: int = 10_000,
    max_step_tokens: int = 10_000,
    watermark: float = 0.0,
) -> KVCacheManager:
    """A manager with LRU eviction."""
    return KVCacheManager(
        CacheSpec(
            block_size=block_size,
            num_blocks=num_blocks,
            groups=tuple(groups),
            num_swap_blocks=num_swap_blocks,
            max_request_len=max_request_len,
            max_step_tokens=max_step_tokens,
            watermark=watermark,
            make_prefix_cache=lambda: prefix_cache(block_size, LRUEviction()),
        )
    )


def book(manager: KVCacheManager, user: User, count: int) -> None:
    """The user's next tokens, for which it has blocks, were computed."""
    user.num_computed_tokens += count
    manager.advance(count)
    if user.num_computed_tokens >= user.next_publish:
        manager.publish(user)


def lacking(user: User) -> int:
    """Tokens that are not computed."""
    return len(user.token_ids) - user.num_computed_tokens


def compute(manager: KVCacheManager, user: User) -> bool:
    """Admit the request and compute all its tokens at once."""
    if not manager.admit(user, len(user.token_ids) - manager.num_cached_tokens(user)):
        return False
    book(manager, user, lacking(user))
    return True


def grow(manager: KVCacheManager, user: User, *token_ids: int) -> bool:
    """Append tokens to a request with blocks, and compute all that it lacks."""
    user.token_ids += token_ids
    if not manager.extend(user, lacking(user)):
        return False
    book(manager, user, lacking(user))
    return True


def step(manager: KVCacheManager, user: User, count: int) -> bool:
    """Compute so many of the user's tokens."""
    if not manager.extend(user, count):
        return False
    book(manager, user, count)
    return True


def parts(manager: KVCacheManager) -> tuple[int, int, int, int]:
    """Slots with tokens, unfilled, cached and free: the parts of `usage`, which must sum to all slots."""
    usage = manager.usage()
    numbers = (usage.token_states, usage.internal_fragmentation, usage.cached, usage.free)
    assert usage.reserved == usage.external_fragmentation == 0
    assert min(numbers) >= 0
    spec = manager.spec
    assert sum(numbers) % (spec.num_blocks * spec.block_size) == 0
    return numbers


def in_pool(manager: KVCacheManager) -> tuple[int, int, int]:
    """Blocks of the only cache group in use, cached and free."""
    (pool,) = manager.pools
    return pool.num_in_use, pool.num_cached, pool.num_free
