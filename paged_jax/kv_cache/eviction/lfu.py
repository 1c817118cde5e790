"""Least frequently used first."""

from collections.abc import Callable, Hashable, Sequence

from paged_jax.kv_cache.eviction.ranked import RankedEviction


class LFUEviction(RankedEviction):
    """Gives up the block that was found least often since it was cached; of several, the least recently used."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0
        self._last_use: dict[int, int] = {}
        self._num_hits: dict[int, int] = {}

    def insert(self, block_id: int, index: int, key: Callable[[], Hashable]) -> None:
        """Nobody has found the block yet: who computed it does not count."""
        self._num_hits[block_id] = 0

    def hit(self, block_ids: Sequence[int]) -> None:
        """Count the hits."""
        for block_id in block_ids:
            self._num_hits[block_id] += 1
            self._rerank(block_id)

    def use(self, block_id: int) -> None:
        """Note the time, counted in uses."""
        self._now += 1
        self._last_use[block_id] = self._now

    def _rank(self, block_id: int) -> tuple[int, int]:
        return self._num_hits[block_id], self._last_use[block_id]
