"""Common part of the policies: a heap of candidates by rank."""

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Any

from paged_jax.kv_cache.eviction import Eviction

_SLACK = 64  # stale entries that are not worth a rebuild


class RankedEviction(Eviction):
    """Gives up the candidate of the lowest rank. Adding and popping are O(log n), removing is O(1).

    A removed candidate's entry stays in the heap until it comes up or until such entries are in the majority. What a
    policy notes of a block may outlive it: block ids are few, and come again.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Any, int]] = {}  # candidate -> its only valid entry, (rank, block)
        self._heap: list[tuple[Any, int]] = []

    @abstractmethod
    def _rank(self, block_id: int) -> Any:
        """The block's rank as it becomes a candidate; ranks of one policy compare with each other."""

    def insert(self, block_id: int, index: int, key: Callable[[], Hashable]) -> None:
        """Nothing to note."""

    def hit(self, block_ids: Sequence[int]) -> None:
        """Nothing to note."""

    def use(self, block_id: int) -> None:
        """Nothing to note."""

    def add(self, block_id: int) -> None:
        """Rank the block."""
        self._entries[block_id] = entry = (self._rank(block_id), block_id)
        heappush(self._heap, entry)

    def remove(self, block_id: int) -> None:
        """Leave the block's entry behind, stale."""
        del self._entries[block_id]
        if len(self._heap) > 2 * len(self._entries) + _SLACK:
            self._heap = list(self._entries.values())
            heapify(self._heap)

    def pop(self) -> int:
        """Take out and forget the candidate of the lowest rank."""
        if not self._entries:
            raise RuntimeError("there is no block to give up")
        entry = heappop(self._heap)
        while self._entries.get(entry[1]) is not entry:
            entry = heappop(self._heap)
        block_id = entry[1]
        del self._entries[block_id]
        self.forget(block_id)
        return block_id

    def forget(self, block_id: int) -> None:
        """Take the block out, if it is a candidate."""
        if block_id in self._entries:
            self.remove(block_id)

    def _rerank(self, block_id: int) -> None:
        """The block's rank has changed; nothing to do unless it is a candidate."""
        if block_id in self._entries:
            self.remove(block_id)
            self.add(block_id)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[int]:
        return iter(self._entries)
