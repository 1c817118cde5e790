"""No reuse between requests."""

from collections.abc import Sequence
from typing import ClassVar, NoReturn

from paged_jax.kv_cache.block_table import BlockTable
from paged_jax.kv_cache.prefix_cache import CachedRun, PrefixCache, PrefixUser


class NoPrefixCache(PrefixCache):
    """Finds nothing and keeps nothing."""

    supports_windows: ClassVar[bool] = True

    def match(self, user: PrefixUser, max_blocks: int) -> list[int]:
        """Return no block."""
        return []

    def find(self, user: PrefixUser, index: int) -> None:
        """Return no block."""

    def insert(self, user: PrefixUser, table: BlockTable, index: int) -> bool:
        """Keep nothing."""
        return False

    def hit(self, block_ids: Sequence[int]) -> None:
        """Only ever called with no blocks."""
        for block in block_ids:
            self._refuse(block)

    def lock(self, block_id: int) -> None:
        """Never called: no block is cached."""
        self._refuse(block_id)

    def unlock(self, block_id: int) -> None:
        """Never called: no block is cached."""
        self._refuse(block_id)

    def evict(self) -> int:
        """Never called: no block is unlocked."""
        raise RuntimeError("no block is cached, so none can be evicted")

    def clear(self) -> list[int]:
        """Nothing to forget."""
        return []

    def __contains__(self, block_id: object) -> bool:
        return False

    def __len__(self) -> int:
        return 0

    def check(self) -> None:
        """Raise AssertionError if a block is a candidate for eviction."""
        assert self.num_unlocked == len(self.eviction) == 0, "a candidate for eviction is not cached"

    def runs(self) -> list[CachedRun]:
        """Nothing is cached."""
        return []

    @staticmethod
    def _refuse(block_id: int) -> NoReturn:
        raise RuntimeError(f"block {block_id} was never cached")
