"""Requests as a manager of reservations sees them, and managers of small pools."""

from dataclasses import dataclass, field

from paged_jax.kv_cache.block_table import BlockTable
from paged_jax.kv_cache.eviction.lru import LRUEviction
from paged_jax.kv_cache.group import CacheGroup
from paged_jax.kv_cache.manager import CacheSpec, Match
from paged_jax.kv_cache.prefix_cache.none import NoPrefixCache
from paged_jax.kv_cache.reservation import Reservation

WINDOWED = (CacheGroup(2, 1, 8), CacheGroup(4, 1, 8, sliding_window=3))


@dataclass(eq=False)
class User:
    """The part of a request that the manager sees."""

    token_ids: list[int]
    expected_output_len: int | None = None
    max_total_tokens: int = 10**6
    request_id: str = "it"
    cache_salt: str = ""
    num_computed_tokens: int = 0
    num_writable_tokens: int = 0
    next_publish: int = 0
    num_prompt_tokens: int = -1
    block_contents: list[bytes] = field(default_factory=list)
    block_tables: tuple[BlockTable, ...] = ()
    host_blocks: tuple[list[int], ...] = ()
    match: Match | None = None

    def __post_init__(self) -> None:
        if self.num_prompt_tokens < 0:
            self.num_prompt_tokens = len(self.token_ids)

    @property
    def blocks(self) -> list[int]:
        return self.block_tables[0].block_ids


def make(
    kind: type[Reservation],
    num_blocks: int,
    block_size: int = 4,
    *,
    max_request_len: int = 32,
    groups: tuple[CacheGroup, ...] = (CacheGroup(1, 1, 8),),
    num_swap_blocks: int = 0,
) -> Reservation:
    return kind(
        CacheSpec(
            block_size=block_size,
            num_blocks=num_blocks,
            groups=groups,
            num_swap_blocks=num_swap_blocks,
            max_request_len=max_request_len,
            max_step_tokens=64,
            watermark=0.0,
            make_prefix_cache=lambda: NoPrefixCache(block_size, LRUEviction()),
        )
    )


def compute(manager: Reservation, user: User) -> None:
    """Compute all tokens of a request that has blocks."""
    assert manager.extend(user, len(user.token_ids) - user.num_computed_tokens)
    manager.advance(len(user.token_ids) - user.num_computed_tokens)
    user.num_computed_tokens = len(user.token_ids)
    manager.publish(user)


def admit(manager: Reservation, user: User) -> bool:
    """Admit a request and compute all its tokens."""
    if not manager.admit(user, 1):
        return False
    compute(manager, user)
    return True


def states(manager: Reservation) -> tuple[int, int, int, int, int]:
    """Tokens, reserved, internal fragmentation, free, external fragmentation; they sum to the pool."""
    usage = manager.usage()
    parts = (
        usage.token_states,
        usage.reserved,
        usage.internal_fragmentation,
        usage.free,
        usage.external_fragmentation,
    )
    assert usage.cached == 0
    assert min(parts) >= 0
    assert sum(parts) == manager.spec.num_blocks * manager.block_size * sum(manager._weights)
    return parts
