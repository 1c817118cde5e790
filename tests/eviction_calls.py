"""Short ways to tell an eviction policy what happens to blocks."""

from paged_jax.kv_cache.eviction import Eviction


def insert(eviction: Eviction, *block_ids: int, index: int = 0) -> None:
    """Contents are cached, each named after its block."""
    for block in block_ids:
        eviction.insert(block, index, lambda block=block: f"content {block}")


def release(eviction: Eviction, *block_ids: int) -> None:
    """Blocks lose their last users, and nothing depends on them."""
    for block in block_ids:
        eviction.use(block)
        eviction.add(block)


def pop_all(eviction: Eviction) -> list[int]:
    """All candidates in the order in which they are given up."""
    return [eviction.pop() for _ in range(len(eviction))]
