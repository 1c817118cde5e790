"""Buddy allocation (Knowlton, CACM 1965; Knuth vol. 1, section 2.5) of contiguous runs of blocks."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence


class BuddyPool:
    """Blocks 1..num_blocks of one cache group, given out as runs of a power of two. Block 0 is the null block.

    A run of 2^k blocks begins at a multiple of 2^k, counted from block 1. What is wanted is cut from the shortest free
    run that is long enough, of those the one with the lowest ids; the rest is halved into free runs. A run that comes
    back is joined with its other half while that is free. When `num_blocks` is no power of two, the pool begins as
    several runs, the longest first, one for each bit of the number. No block is shared or cached.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        """Blocks of free runs."""
        self._free: list[list[int]] = [[] for _ in range(num_blocks.bit_length())]  # by order; ascending first blocks
        self._orders: dict[int, int] = {}  # of the runs in use, by first block
        first = 1
        for order in reversed(range(len(self._free))):
            if num_blocks >> order & 1:
                self._free[order].append(first)
                first += 1 << order

    @property
    def longest_run(self) -> int:
        """Blocks of the longest run that the empty pool has."""
        return 1 << (self.num_blocks.bit_length() - 1)

    @property
    def num_cached(self) -> int:
        """None: a block holds something only while it is in use."""
        return 0

    @property
    def num_available(self) -> int:
        """Blocks of free runs, however short."""
        return self.num_free

    @property
    def num_in_use(self) -> int:
        """Blocks of the runs in use."""
        return self.num_blocks - self.num_free

    @staticmethod
    def run_length(count: int) -> int:
        """Blocks of the run that is given to whom wants `count`: the next power of two."""
        return 1 << _order(count)

    def has_run(self, count: int) -> bool:
        """Whether `allocate` could hand out `count` blocks."""
        return any(self._free[_order(count) :])

    def ref_count(self, block_id: int) -> int:
        """1 for a block of a run in use, else 0."""
        firsts = ((block_id - 1 >> order << order) + 1 for order in range(len(self._free)))
        return sum(self._orders.get(first) == order for order, first in enumerate(firsts))

    def allocate(self, count: int) -> list[int]:
        """Hand out a run of at least `count` blocks, all of it; the caller has checked `has_run`."""
        wanted = _order(count)
        order = next((order for order in range(wanted, len(self._free)) if self._free[order]), None)
        if order is None:
            raise RuntimeError(f"a run of {count} blocks wanted, and none is as long: the caller must check first")
        first = self._free[order].pop(0)
        for half in reversed(range(wanted, order)):
            self._free[half].append(first + (1 << half))  # was empty, else the run would have been cut from it
        self._orders[first] = wanted
        self.num_free -= 1 << wanted
        return list(range(first, first + (1 << wanted)))

    def share(self, block_ids: Sequence[int]) -> None:
        """Only ever called with no blocks."""
        if block_ids:
            raise RuntimeError(f"block {block_ids[0]} is part of a run, which has one owner")

    def free(self, block_ids: Sequence[int]) -> list[int]:
        """Take a whole run back, as it was handed out; return its blocks, which now hold nothing."""
        first = block_ids[0]
        order = self._orders.get(first)
        if order is None or block_ids[-1] != first + (1 << order) - 1 or len(block_ids) != 1 << order:
            raise RuntimeError(f"blocks {first} to {block_ids[-1]} are no run in use")
        del self._orders[first]
        self.num_free += 1 << order
        while (at := self._find_free(order, buddy := (first - 1 ^ 1 << order) + 1)) is not None:
            del self._free[order][at]
            first = min(first, buddy)
            order += 1
        insort(self._free[order], first)
        return list(block_ids)

    def forget_cached(self) -> list[int]:
        """Nothing to forget."""
        return []

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the tables are the runs in use, and these and the free ones tile the pool."""
        used = []
        for table in tables:
            assert list(table) == list(range(table[0], table[0] + len(table))), "a block table is not contiguous"
            used.append((table[0], len(table)))
        assert sorted(used) == sorted((f, 1 << o) for f, o in self._orders.items()), (
            "block tables are not the runs in use"
        )
        free = [(first, 1 << order) for order, firsts in enumerate(self._free) for first in firsts]
        end = 1
        for first, length in sorted(used + free):
            assert first == end, f"block {min(first, end)} is lost or has two owners"
            assert (first - 1) % length == 0, f"the run of {length} blocks at {first} is not aligned"
            end += length
        assert end == self.num_blocks + 1, "runs do not end where the pool ends"
        for order, firsts in enumerate(self._free):
            assert firsts == sorted(firsts), "free runs are out of order"
            assert not any((f - 1 ^ 1 << order) + 1 in firsts for f in firsts), "two free halves were not joined"
        assert self.num_free == sum(length for _, length in free), "free blocks are miscounted"

    def _find_free(self, order: int, first: int) -> int | None:
        """Where the run that begins with this block lies among the free ones; None if it is not free."""
        at = bisect_left(self._free[order], first)
        return at if at < len(self._free[order]) and self._free[order][at] == first else None


def _order(count: int) -> int:
    """The least k with 2^k >= count."""
    return (count - 1).bit_length()
