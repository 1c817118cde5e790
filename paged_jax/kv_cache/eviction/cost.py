"""GreedyDual: cheapest to recompute first, with ageing."""

from collections.abc import Callable, Hashable

from paged_jax.kv_cache.eviction.ranked import RankedEviction

EQUAL_CONTEXT = 256
"""Blocks of context at which attention costs as much as the linear layers: 4,096 tokens in blocks of 16.

With 12 d^2 weights a layer, a token costs 24 d^2 operations in the linear layers and 4 d a token of context in
attention: equal at 6 d tokens, where d is the model's width.
"""


class CostEviction(RankedEviction):
    """Gives up the block of the lowest priority: what it costs to recompute, plus the clock when it was last used.

    The cost of block number i is 1 + i / EQUAL_CONTEXT, in units of its linear layers. The clock is the highest
    priority given up so far, so that a costly block that nobody uses goes in the end (GreedyDual: Young 1994; Cao and
    Irani 1997). Of equal priorities the least recently used block goes.

    The radix cache offers only the last blocks of prefixes. Over the hash cache the first block of a prefix is the
    cheapest, and the rest cannot be found without it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = 0
        self._clock = 0.0
        self._costs: dict[int, float] = {}
        self._ranks: dict[int, tuple[float, int]] = {}

    def insert(self, block_id: int, index: int, key: Callable[[], Hashable]) -> None:
        """Work out the block's cost."""
        self._costs[block_id] = 1 + index / EQUAL_CONTEXT

    def use(self, block_id: int) -> None:
        """Set the block's priority."""
        self._now += 1
        self._ranks[block_id] = (self._clock + self._costs[block_id], self._now)

    def pop(self) -> int:
        """Take out the block of the lowest priority, and move the clock there."""
        block_id = super().pop()
        self._clock = max(self._clock, self._ranks[block_id][0])
        return block_id

    def _rank(self, block_id: int) -> tuple[float, int]:
        return self._ranks[block_id]
