"""Least recently used first."""

from collections.abc import Iterator


class LRUEviction:
    """Gives up the block whose last user left longest ago. All operations are O(1)."""

    def __init__(self) -> None:
        self._blocks: dict[int, None] = {}  # dicts keep insertion order

    def add(self, block_id: int) -> None:
        """A cached block has lost its last user: it is now the most recent one."""
        self._blocks[block_id] = None

    def remove(self, block_id: int) -> None:
        """The block is in use again."""
        del self._blocks[block_id]

    def pop(self) -> int:
        """Take out the block that was added first."""
        block_id = next(iter(self._blocks))
        del self._blocks[block_id]
        return block_id

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)
