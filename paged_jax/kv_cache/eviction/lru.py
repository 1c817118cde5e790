"""Least recently used first."""

from paged_jax.kv_cache.eviction.ranked import RankedEviction


class LRUEviction(RankedEviction):
    """Gives up the block whose last user left longest ago."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0
        self._last_use: dict[int, int] = {}

    def use(self, block_id: int) -> None:
        """Note the time, counted in uses."""
        self._now += 1
        self._last_use[block_id] = self._now

    def _rank(self, block_id: int) -> int:
        return self._last_use[block_id]
