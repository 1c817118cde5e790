"""The pages of one cache group on a device that has no arithmetic: each slot says whose tokens it stands for."""

from collections.abc import Mapping, Sequence

from cache_users import User

from paged_jax.kv_cache.manager import KVCacheManager
from paged_jax.kv_cache.swap import SwappedBlocks

type Slot = tuple[int, ...] | None
"""The tokens up to the slot's own, since keys and values depend on all of them; None: nothing that may be read."""


class WatchedPages:
    """Does a plan's moves in the documented order, and asserts that a query finds what it sees."""

    def __init__(self, manager: KVCacheManager, group: int) -> None:
        self._group = group
        self._window = manager.spec.groups[group].sliding_window or 10**9
        self._size = manager.block_size
        self._pages: list[list[Slot]] = [[None] * self._size for _ in range(manager.spec.num_blocks + 1)]
        self._host: list[list[Slot]] = [[None] * self._size for _ in range(manager.spec.num_swap_blocks)]

    def move(
        self,
        swap_outs: Sequence[SwappedBlocks],
        copies: Sequence[tuple[int, int]],
        emptied: Sequence[int],
        swap_ins: Sequence[SwappedBlocks],
    ) -> None:
        """Gather, copy, poison, scatter."""
        pages, host, group = self._pages, self._host, self._group
        for moved in swap_outs:
            for block, target in zip(moved.device_blocks[group], moved.host_blocks[group], strict=True):
                host[target] = list(pages[block])
        targets = {target for _, target in copies}
        assert len(targets) == len(copies), "two copies go to one block"
        contents = [list(pages[source]) for source, _ in copies]
        for (_, target), content in zip(copies, contents, strict=True):
            pages[target] = content
        for block in set(emptied) - targets:
            pages[block] = [None] * self._size
        for moved in swap_ins:
            for target, block in zip(moved.device_blocks[group], moved.host_blocks[group], strict=True):
                pages[target] = list(host[block])

    def compute(self, scheduled: Mapping[User, int]) -> None:
        """So many next tokens of each request."""
        written = set()
        for user, count in scheduled.items():
            self.check(user)
            table, computed = user.tables[self._group], user.num_computed_tokens
            for position in range(computed, computed + count):
                block, offset = table[position // self._size], position % self._size
                assert block != 0
                assert (block, offset) not in written, "two requests write to one slot"
                written.add((block, offset))
                self._pages[block][offset] = tuple(user.token_ids[: position + 1])

    def check(self, user: User) -> None:
        """All that the user's next query sees is there."""
        table, computed = user.tables[self._group], user.num_computed_tokens
        for position in range(max(0, computed - self._window + 1), computed):
            block = table[position // self._size]
            assert block != 0
            assert self._pages[block][position % self._size] == tuple(user.token_ids[: position + 1])

    def filled(self, users: Sequence[User]) -> set[tuple[int, int]]:
        """Block and offset of the slots that hold a token of somebody."""
        places = [(u.tables[self._group], p) for u in users for p in range(u.num_computed_tokens)]
        return {(table[p // self._size], p % self._size) for table, p in places if table[p // self._size]}
