"""First in, first out."""

from collections.abc import Callable, Hashable

from paged_jax.kv_cache.eviction.ranked import RankedEviction


class FIFOEviction(RankedEviction):
    """Gives up the block that was cached first, used since or not.

    A prefix's first block is cached before the rest, so that over the hash cache it also goes before the rest, which
    cannot be found without it. The radix cache gives up the last block of a prefix first under any policy.
    """

    def __init__(self) -> None:
        super().__init__()
        self._num_inserted = 0
        self._number: dict[int, int] = {}

    def insert(self, block_id: int, index: int, key: Callable[[], Hashable]) -> None:
        """Number the block."""
        self._num_inserted += 1
        self._number[block_id] = self._num_inserted

    def _rank(self, block_id: int) -> int:
        return self._number[block_id]
