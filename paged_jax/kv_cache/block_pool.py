"""Who owns which block: every usable block is exactly one of free, cached and in use."""

from collections.abc import Callable, Iterable, Sequence

from paged_jax.kv_cache.prefix_cache import PrefixCache


class BlockPool:
    """Reference-counted blocks 1..num_blocks of one cache group. Block 0 is the null block, which is never handed out.

    A block whose last user leaves becomes free, or, while the prefix cache knows its content, cached; a cached block
    is given up (`on_evict` is told) when blocks are wanted and none is free.
    """

    def __init__(self, num_blocks: int, cache: PrefixCache, on_evict: Callable[[list[int]], None]) -> None:
        self.num_blocks = num_blocks
        self._cache = cache
        self._on_evict = on_evict
        self._free = list(range(num_blocks, 0, -1))  # a stack: low ids first
        self._ref_counts = [0] * (num_blocks + 1)

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody uses and whose content is still known to the prefix cache."""
        return self._cache.num_unlocked

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out: free and cached."""
        return len(self._free) + self._cache.num_unlocked

    @property
    def num_in_use(self) -> int:
        """Blocks with at least one user, each counted once."""
        return self.num_blocks - self.num_available

    def ref_count(self, block_id: int) -> int:
        """Number of block-table entries that name this block."""
        return self._ref_counts[block_id]

    def num_unused(self, block_ids: Sequence[int]) -> int:
        """How many of these cached blocks nobody uses."""
        counts = self._ref_counts
        return len([block for block in block_ids if not counts[block]])

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks with one reference each; the caller has checked `num_available`."""
        free = self._free
        if count == 1 and free:  # a decode's next block: by far the most frequent case
            block = free.pop()
            self._ref_counts[block] = 1
            return [block]
        if count > len(free) and count > self.num_available:
            raise RuntimeError(f"{count} blocks wanted, {self.num_available} available: the caller must check first")
        keep = max(0, len(free) - count)
        blocks = free[keep:]
        blocks.reverse()
        del free[keep:]
        if len(blocks) < count:
            evicted = [self._cache.evict() for _ in range(count - len(blocks))]
            self._on_evict(evicted)
            blocks += evicted
        counts = self._ref_counts
        for block in blocks:
            counts[block] = 1
        return blocks

    def share(self, block_ids: Sequence[int]) -> None:
        """Add a reference to each block, all of which are cached or in use."""
        counts = self._ref_counts
        for block in block_ids:
            if counts[block] == 0:
                self._cache.lock(block)
            counts[block] += 1

    def free(self, block_ids: Sequence[int]) -> list[int]:
        """Drop a reference to each block; return those that now hold nothing.

        Tails go first, so that of a cached chain the end, which is of no use without the rest, is evicted first.
        """
        emptied = []
        counts, cache = self._ref_counts, self._cache
        for block in reversed(block_ids):
            count = counts[block] = counts[block] - 1
            if count > 0:
                continue
            if count < 0:
                raise RuntimeError(f"block {block} was freed more often than it was allocated or shared")
            if block in cache:
                cache.unlock(block)
            else:
                self._free.append(block)
                emptied.append(block)
        return emptied

    def forget_cached(self) -> list[int]:
        """No block's content is known any more: cached ones become free and are returned."""
        blocks = self._cache.clear()
        self._free.extend(sorted(blocks, reverse=True))
        return blocks

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless each block is in one class and reference counts equal table entries."""
        entries = [0] * (self.num_blocks + 1)
        for table in tables:
            blocks = [block for block in table if block]
            for block in blocks:
                entries[block] += 1
            assert len(set(blocks)) == len(blocks), f"a block table names a block twice: {list(table)}"
        assert entries == self._ref_counts, "reference counts differ from block-table entries"
        in_use = [b for b in range(1, self.num_blocks + 1) if self._ref_counts[b]]
        cached = [b for b in range(1, self.num_blocks + 1) if b in self._cache and not self._ref_counts[b]]
        assert sorted(self._free + cached + in_use) == list(range(1, self.num_blocks + 1)), (
            "free, cached and used blocks do not partition the pool"
        )
        assert len(cached) == self._cache.num_unlocked, "the prefix cache counts other unlocked blocks"
        self._cache.check()
