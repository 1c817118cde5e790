"""Prefix caches, one file each: they find the blocks that already hold the beginning of a request's tokens."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol

from paged_jax.kv_cache.block_table import BlockTable
from paged_jax.kv_cache.eviction import Eviction


class PrefixUser(Protocol):
    """What a prefix cache reads of a request, and where it keeps what it has worked out."""

    token_ids: list[int]
    """All tokens known so far; only ever appended to."""
    cache_salt: str
    """Requests share blocks only with those of the same salt."""
    block_contents: list[bytes]
    """What identifies each leading whole block's content and all before it, as far as it was worked out."""


class CachedRun(NamedTuple):
    """Cached blocks that follow each other."""

    parent: int | None
    """Number of the run that they follow; None: they begin a prompt, or what they follow is not cached any more."""
    block_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


class PrefixCache(ABC):
    """Full blocks of one cache group by their content.

    A cached block is locked while a request uses it; an unlocked one may be evicted.
    """

    supports_windows: ClassVar[bool] = False
    """Whether single blocks can be found whose predecessors are gone, as a sliding window needs it."""

    def __init__(self, block_size: int, eviction: Eviction) -> None:
        self.block_size = block_size
        self.eviction = eviction
        self.version = 0
        """Changes whenever `match` could answer differently."""
        self.num_unlocked = 0
        """Cached blocks that nobody uses."""

    @abstractmethod
    def match(self, user: PrefixUser, max_blocks: int) -> list[int]:
        """Blocks of the longest cached run of whole blocks at the tokens' beginning, at most `max_blocks`."""

    @abstractmethod
    def insert(self, user: PrefixUser, table: BlockTable, index: int) -> bool:
        """Offer the table's block number `index`, which is full and in use; indices ascend.

        False when the same content is already cached in another block, which then stays the one that is found.
        """

    @abstractmethod
    def hit(self, block_ids: Sequence[int]) -> None:
        """A request has found these blocks and taken them."""

    @abstractmethod
    def lock(self, block_id: int) -> None:
        """A cached block that nobody used is in use."""

    @abstractmethod
    def unlock(self, block_id: int) -> None:
        """A cached block has lost its last user; of a request's blocks the last is unlocked first."""

    @abstractmethod
    def evict(self) -> int:
        """Give up an unlocked block, of which there is at least one; returns it."""

    @abstractmethod
    def clear(self) -> list[int]:
        """Forget everything; returns the blocks that were unlocked."""

    @abstractmethod
    def __contains__(self, block_id: object) -> bool:
        """Whether the block is cached."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of cached blocks, locked ones included."""

    @abstractmethod
    def check(self) -> None:
        """Raise AssertionError unless everything that is kept agrees."""

    def find(self, user: PrefixUser, index: int) -> int | None:
        """The block that holds block number `index` of the tokens, with everything before it the same."""
        raise NotImplementedError(f"{type(self).__name__} does not support windows")

    def runs(self) -> list[CachedRun]:
        """Everything that is cached, parents first: to look at, not to serve with, since it takes time by its size."""
        raise NotImplementedError(f"{type(self).__name__} does not tell what it holds")
