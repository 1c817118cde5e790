"""Which cached block is given up first: policies, one file each."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence


class Eviction(ABC):
    """Order in which cached blocks that nobody uses are given up.

    A block is known from `insert` to `pop` or `forget`; in between it is a candidate from `add` to `remove`.
    """

    @abstractmethod
    def insert(self, block_id: int, index: int, key: Callable[[], Hashable]) -> None:
        """The block's content is cached now; it is in use.

        `index` is the block's number in its prefix; `key()` identifies its content and all before it.
        """

    @abstractmethod
    def hit(self, block_ids: Sequence[int]) -> None:
        """A request found these blocks and took them."""

    @abstractmethod
    def use(self, block_id: int) -> None:
        """The block has lost its last user just now. It may become a candidate much later, if others depend on it."""

    @abstractmethod
    def add(self, block_id: int) -> None:
        """The block, which nobody uses, may be given up from now on."""

    @abstractmethod
    def remove(self, block_id: int) -> None:
        """The block may not be given up any more: it is in use again, or something depends on it."""

    @abstractmethod
    def pop(self) -> int:
        """Choose the candidate to give up next, and forget it."""

    @abstractmethod
    def forget(self, block_id: int) -> None:
        """The block's content is not cached any more."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of candidates."""

    @abstractmethod
    def __iter__(self) -> Iterator[int]:
        """The candidates, in any order."""
