"""What stands for requests in tests of the prefix caches."""

from dataclasses import dataclass, field
from typing import Any

from paged_jax.kv_cache.block_table import BlockTable
from paged_jax.kv_cache.prefix_cache import PrefixCache

BLOCK_SIZE = 2


class CountingList(list[int]):
    """Counts the tokens that are read."""

    num_read = 0

    def __getitem__(self, key: Any) -> Any:
        item = super().__getitem__(key)
        self.num_read += len(item) if isinstance(key, slice) else 1
        return item


@dataclass(eq=False)
class User:
    """A request as the caches see it, and the blocks that it holds."""

    token_ids: list[int]
    cache_salt: str = ""
    block_contents: list[bytes] = field(default_factory=list)
    table: BlockTable = field(default_factory=BlockTable)

    @property
    def num_whole(self) -> int:
        return len(self.token_ids) // BLOCK_SIZE


def user(text: str, salt: str = "") -> User:
    """A user whose blocks are letters: "ab" stands for two blocks."""
    return User([token for letter in text for token in (0, ord(letter))], salt)


def take(cache: PrefixCache, text: str, *block_ids: int, salt: str = "") -> User:
    """A new user computes its own blocks, without looking any up."""
    new = user(text, salt)
    publish(cache, new, *block_ids)
    return new


def publish(cache: PrefixCache, holder: User, *block_ids: int) -> list[bool]:
    """The user computes more blocks and offers them."""
    answers = []
    for block in block_ids:
        holder.table.block_ids.append(block)
        answers.append(cache.insert(holder, holder.table, len(holder.table) - 1))
        cache.check()
    return answers


def release(cache: PrefixCache, *block_ids: int) -> None:
    """Blocks lose their last users; ids in the order of the prefix."""
    for block in reversed(block_ids):
        if block in cache:
            cache.unlock(block)
        cache.check()


def match(cache: PrefixCache, text: str, salt: str = "") -> list[int]:
    return cache.match(user(text, salt), len(text))
