"""Who owns which block: every usable block is exactly one of free, cached and in use."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol


class Eviction(Protocol):
    """Order in which cached blocks that nobody uses are given up."""

    def add(self, block_id: int) -> None:
        """A cached block has lost its last user."""
        ...

    def remove(self, block_id: int) -> None:
        """A cached block is in use again, or is no longer cached."""
        ...

    def pop(self) -> int:
        """Choose the block to give up next and take it out."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]: ...


class BlockPool:
    """Reference-counted blocks 1..num_blocks. Block 0 is the null block, which is never handed out.

    A block whose last user leaves becomes free, or, while the prefix cache knows its content, cached; a cached block
    is given up (`on_evict` tells the prefix cache) when blocks are wanted and none is free.
    """

    def __init__(self, num_blocks: int, eviction: Eviction, on_evict: Callable[[int], None]) -> None:
        self.num_blocks = num_blocks
        self._eviction = eviction
        self._on_evict = on_evict
        self._free = list(range(num_blocks, 0, -1))  # a stack: low ids first
        self._ref_counts = [0] * (num_blocks + 1)
        self._is_cached = [False] * (num_blocks + 1)

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody uses and whose content is still known to the prefix cache."""
        return len(self._eviction)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out: free and cached."""
        return len(self._free) + len(self._eviction)

    @property
    def num_in_use(self) -> int:
        """Blocks with at least one user, each counted once."""
        return self.num_blocks - self.num_available

    def ref_count(self, block_id: int) -> int:
        """Number of block-table entries that name this block."""
        return self._ref_counts[block_id]

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks with one reference each; the caller has checked `num_available`."""
        if count > self.num_available:
            raise RuntimeError(f"{count} blocks wanted, {self.num_available} available: the caller must check first")
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block = self._eviction.pop()
                self._is_cached[block] = False
                self._on_evict(block)
            self._ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def share(self, block_ids: Sequence[int]) -> None:
        """Add a reference to each block, all of which are cached or in use."""
        for block in block_ids:
            if self._ref_counts[block] == 0:
                self._eviction.remove(block)
            self._ref_counts[block] += 1

    def free(self, block_ids: Sequence[int]) -> list[int]:
        """Drop a reference to each block; return those that now hold nothing.

        Tails go first, so that of a cached chain the end, which is of no use without the rest, is evicted first.
        """
        emptied = []
        for block in reversed(block_ids):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] < 0:
                raise RuntimeError(f"block {block} was freed more often than it was allocated or shared")
            if self._ref_counts[block] == 0:
                if self._is_cached[block]:
                    self._eviction.add(block)
                else:
                    self._free.append(block)
                    emptied.append(block)
        return emptied

    def mark_cached(self, block_id: int) -> None:
        """The prefix cache now knows this block, which is in use."""
        self._is_cached[block_id] = True

    def forget_cached(self) -> list[int]:
        """No block's content is known any more: cached ones become free and are returned."""
        blocks = [self._eviction.pop() for _ in range(len(self._eviction))]
        self._free.extend(reversed(blocks))
        self._is_cached = [False] * (self.num_blocks + 1)
        return blocks

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless each block is in one class and reference counts equal table entries."""
        entries = [0] * (self.num_blocks + 1)
        for table in tables:
            for block in table:
                entries[block] += 1
            assert len(set(table)) == len(table), f"a block table names a block twice: {list(table)}"
        assert entries[0] == 0, "the null block is in a block table"
        assert entries == self._ref_counts, "reference counts differ from block-table entries"
        free, cached = list(self._free), list(self._eviction)
        used = [b for b in range(1, self.num_blocks + 1) if self._ref_counts[b]]
        assert sorted(free + cached + used) == list(range(1, self.num_blocks + 1)), (
            "free, cached and used blocks do not partition the pool"
        )
        assert all(self._is_cached[b] for b in cached), "an evictable block is not known to the prefix cache"
        assert not any(self._is_cached[b] for b in free), "a free block is known to the prefix cache"
