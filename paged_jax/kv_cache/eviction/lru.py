"""Least recently used first."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import chain

from paged_jax.kv_cache.eviction import Eviction


class LRUEviction(Eviction):
    """Gives up the block whose last user left longest ago.

    Blocks nearly always become candidates in the order of their last use, so that a queue does. Those that come later
    than others that were used after them, as in a radix tree when its leaves go, wait in a heap. All operations are
    O(1) for the former, pop and add O(log n) for the latter.
    """

    def __init__(self) -> None:
        self._now = 0
        self._last_use: dict[int, int] = {}
        self._queue: OrderedDict[int, int] = OrderedDict()  # candidate -> last use, ascending
        self._newest = 0  # last use of the last that joined the queue
        self._late: dict[int, int] = {}  # the other candidates
        self._heap: list[tuple[int, int]] = []  # (last use, block) of those, and of some that are candidates no more

    def insert(self, block_id: int, index: int, key: Callable[[], Hashable]) -> None:
        """Nothing to note."""

    def hit(self, block_ids: Sequence[int]) -> None:
        """Nothing to note: it is the end of a use that counts."""

    def use(self, block_id: int) -> None:
        """Note the time, counted in uses."""
        self._now += 1
        self._last_use[block_id] = self._now

    def add(self, block_id: int) -> None:
        """Queue the block."""
        time = self._last_use[block_id]
        if time >= self._newest:
            self._newest = time
            self._queue[block_id] = time
        else:
            self._late[block_id] = time
            heappush(self._heap, (time, block_id))
            if len(self._heap) > 2 * len(self._late) + 64:  # most of them are candidates no more
                self._heap = sorted((time, block) for block, time in self._late.items())

    def remove(self, block_id: int) -> None:
        """Take the block out of the queue."""
        if self._queue.pop(block_id, None) is None:
            del self._late[block_id]

    def pop(self) -> int:
        """Take out the candidate that was used longest ago."""
        heap = self._heap
        while heap and self._late.get(heap[0][1]) != heap[0][0]:
            heappop(heap)  # no candidate any more, or one of another time
        if heap and (not self._queue or heap[0][0] < self._queue[next(iter(self._queue))]):
            _, block_id = heappop(heap)
            del self._late[block_id]
            return block_id
        if not self._queue:
            raise RuntimeError("there is no block to give up")
        return self._queue.popitem(last=False)[0]

    def forget(self, block_id: int) -> None:
        """Take the block out, if it is a candidate."""
        if self._queue.pop(block_id, None) is None:
            self._late.pop(block_id, None)

    def __len__(self) -> int:
        return len(self._queue) + len(self._late)

    def __iter__(self) -> Iterator[int]:
        return chain(self._queue, self._late)
